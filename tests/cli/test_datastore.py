"""``stree datastore build``, and reading of text files, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stree.cli import main
from stree.inputs import ASSETS, documents
from stree.retrieval import Datastore

TEXT = "def area_of_circle(radius):\n    return 3.14159 * radius * radius\n" * 3


def test_texts_come_from_files_folders_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "b.txt").write_text("two", encoding="utf-8")
    (tmp_path / "folder" / "deep" / "a.py").write_text("three", encoding="utf-8")
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    (tmp_path / "lines.jsonl").write_text('{"text": "four"}\n\n{"prompt": "five", "id": 1}\n', encoding="utf-8")
    paths = [tmp_path / "folder", tmp_path / "empty.txt", tmp_path / "lines.jsonl"]
    assert list(documents(paths)) == ["two", "three", "four", "five"]
    lines = [{"text": "a\u2028b\x85c\u2029"}, {"text": ""}, {"prompt": "d"}]  # line ends that end no line of JSON
    content = "\ufeff" + "".join(json.dumps(line, ensure_ascii=False) + "\r\n" for line in lines)
    (tmp_path / "more.JSONL").write_text(content, encoding="utf-8", newline="")
    assert list(documents([tmp_path / "more.JSONL"])) == ["a\u2028b\x85c\u2029", "d"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "x"}\n{"texts": 1}\n',
            "line 2 of .*a.jsonl must have a text or prompt that is a string",
        ),
        ("b.jsonl", b"{", "line 1 of .*b.jsonl is not JSON"),
        ("d.jsonl", b'{"text": "\\ud800"}', "line 1 of .*d.jsonl is no UTF-8 text"),
        ("c.txt", b"\xff\xfe", "c.txt is no UTF-8 text"),
    ],
)
def test_files_that_hold_no_text_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(documents([tmp_path / name]))


@pytest.mark.slow
def test_a_datastore_is_built_and_drafted_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", TEXT[:40], "--drafter", "suffix", "--max-new-tokens", "24", "--json"]
    assert main(command) == 0
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])
    (tmp_path / "seen.txt").write_text(TEXT[:40] + alone["text"], encoding="utf-8")
    out = tmp_path / "seen.store"
    assert main(["datastore", "build", str(tmp_path / "seen.txt"), "--out", str(out)]) == 0
    store = Datastore.load(out)
    assert f"1 texts, {store.num_tokens} tokens, {out.stat().st_size} bytes" in capsys.readouterr().out
    assert main([*command, "--datastore", str(out)]) == 0
    helped = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert helped["token_ids"] == alone["token_ids"]
    assert helped["steps"] < alone["steps"], "what the store holds is drafted"


def test_a_datastore_of_another_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = json.loads((ASSETS / "target" / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    Datastore.build([[1, 2, 3]], size, tokenizer="another").save(tmp_path / "other.store")
    command = ["generate", "x", "--drafter", "suffix", "--datastore", str(tmp_path / "other.store")]
    assert main(command) == 2
    assert "was built with another tokenizer than that of target 'bundled'" in capsys.readouterr().err
    assert main([*command[:3], "none", *command[4:]]) == 2
    assert "--datastore is read by --drafter suffix and fused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["datastore", "build", "nowhere", "--out", "x"], "there is no file or folder nowhere"),
        (["trim-vocab", "--text", "{code}", "--keep", "0", "--out", "x"], "keep must be in [1, 4096], got 0"),
        (
            ["trim-vocab", "--text", "{code}", "--keep", "9", "--out", "no/x"],
            "cannot write no/x: its folder does not exist",
        ),
        (["datastore", "build", "{blank}", "--out", "x"], "there is no text in"),
        (["datastore", "build", "{code}", "--out", "no/x"], "cannot write no/x: its folder does not exist"),
        (["datastore", "build", "{code}", "--out", "x", "--max-tokens", "3"], "the documents exceed max_tokens 3"),
        (
            ["datastore", "build", "{code}", "--out", "x", "--target", "no/such/folder"],
            "no tokenizer that transformers",
        ),
        (["generate", "x", "--drafter", "none", "--drafter-vocab", "x"], "--drafter-vocab trims a draft model's head"),
    ],
)
def test_mistakes_are_said_and_nothing_is_written(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blank.txt").write_text(" \n", encoding="utf-8")
    (tmp_path / "code.py").write_text(TEXT, encoding="utf-8")
    assert main([option.format(blank="blank.txt", code="code.py") for option in options]) == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"blank.txt", "code.py"}
