"""``stree datastore build``, and reading of text files, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.calls import error_of, run_json
from helpers.tiny_models import VOCAB

from stree.bench.prompts import read_suite
from stree.cli import main
from stree.inputs import documents
from stree.retrieval import Datastore


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
        ("a.jsonl", b'{"text": "x"}\n{"texts": 1}\n', "line 2 of .*a.jsonl must have a text or prompt that"),
        ("b.jsonl", b"{", "line 1 of .*b.jsonl is not JSON"),
        ("e.jsonl", b"[" * 100_000, "line 1 of .*e.jsonl is not JSON"),
        ("f.jsonl", b'{"text": "x"}\n{"id": ' + b"1" * 5000 + b"}", "line 2 of .*f.jsonl is not JSON"),
        ("d.jsonl", b'{"text": "\\ud800"}', "line 1 of .*d.jsonl is no UTF-8 text"),
        ("c.txt", b"\xff\xfe", "c.txt is no UTF-8 text"),
    ],
)
def test_files_that_hold_no_text_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(documents([tmp_path / name]))
    if message.endswith("JSON"):
        with pytest.raises(ValueError, match="suite 'own': line [12] of ..jsonl: (not JSON|a record needs)"):
            read_suite("own", tmp_path / name)


@pytest.mark.slow
def test_a_datastore_is_built_and_drafted_from(
    target_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "w1 w2 w3", "--target", target_folder, "--drafter", "suffix", "--max-new-tokens", "24"]
    alone = run_json(capsys, *command)
    (tmp_path / "seen.txt").write_text("w1 w2 w3 " + alone["text"], encoding="utf-8")
    out = tmp_path / "seen.store"
    build = ["datastore", "build", str(tmp_path / "seen.txt"), "--target", target_folder, "--out", str(out)]
    assert main(build) == 0
    store = Datastore.load(out)
    assert f"1 texts, {store.num_tokens} tokens, {out.stat().st_size} bytes" in capsys.readouterr().out
    helped = run_json(capsys, *command, "--datastore", str(out))
    assert helped["token_ids"] == alone["token_ids"]
    assert helped["steps"] < alone["steps"], "what the store holds is drafted"


def test_a_datastore_of_another_tokenizer_is_refused(
    target_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Datastore.build([[1, 2, 3]], VOCAB, tokenizer="another").save(tmp_path / "other.store")
    command = ["generate", "x", "--target", target_folder, "--drafter", "suffix"]
    error = error_of(capsys, *command, "--datastore", str(tmp_path / "other.store"))
    assert "was built with another tokenizer than that of target" in error
