"""The commands that prepare drafting: a datastore and a trimmed vocabulary, as a user runs them.

Run: python -m pytest tests/test_prepare.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stree.prepare import _generated, _stop_tokens
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from stree import generation
from stree.cli import main
from stree.inputs import ASSETS, documents
from stree.models.tree_lm import TreeLM
from stree.retrieval import Datastore
from stree.sampling import Sampling
from stree.vocabulary import load_vocabulary, save_vocabulary

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


def test_numbers_of_tokens_may_have_gaps(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 7, "b": 30}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "words")
    (tmp_path / "seen.txt").write_text("a b b", encoding="utf-8")
    out = tmp_path / "store"
    command = ["datastore", "build", str(tmp_path / "seen.txt"), "--tokenizer", str(tmp_path / "words")]
    assert main([*command, "--out", str(out)]) == 0
    assert Datastore.load(out).tree([7, 30], 1, min_match=2).tokens == [30]


def test_a_datastore_of_another_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = json.loads((ASSETS / "target" / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    Datastore.build([[1, 2, 3]], size, tokenizer="another").save(tmp_path / "other.store")
    command = ["generate", "x", "--drafter", "suffix", "--datastore", str(tmp_path / "other.store")]
    assert main(command) == 2
    assert "was built with another tokenizer than that of target 'bundled'" in capsys.readouterr().err
    assert main([*command[:3], "none", *command[4:]]) == 2
    assert "--datastore is read by --drafter suffix and fused" in capsys.readouterr().err


def test_a_vocabulary_is_trimmed_on_a_text_and_on_what_the_target_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code.py").write_text(TEXT, encoding="utf-8")
    out = tmp_path / "kept.json"
    assert main(["trim-vocab", "--text", str(tmp_path / "code.py"), "--keep", "300", "--out", str(out)]) == 0
    assert "300 of 4096 tokens, 100.0% of the" in capsys.readouterr().out
    kept = load_vocabulary(out, 4096)
    assert len(kept) == 300 and 0 in kept
    command = ["generate", TEXT[:60], "--drafter-vocab", str(out), "--max-new-tokens", "8", "--json"]
    assert main(command) == 0
    with_all = [*command[:2], *command[4:]]
    trimmed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(with_all) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["token_ids"] == trimmed["token_ids"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f(x):"}\n', encoding="utf-8")
    options = ["--prompts", str(prompts), "--keep", "5", "--max-new-tokens", "6", "--out", str(out)]
    assert main(["trim-vocab", *options]) == 0
    assert "5 of 4096 tokens" in capsys.readouterr().out
    assert len(load_vocabulary(out, 4096)) == 5


def test_a_fused_drafter_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for drafter in ("fused", "none"):
        assert main(["generate", TEXT[:80], "--drafter", drafter, "--max-new-tokens", "10", "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out.splitlines()[-1])["token_ids"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["datastore", "build", "nowhere", "--out", "x"], "there is no file or folder nowhere"),
        (["trim-vocab", "--text", "nowhere", "--keep", "9", "--out", "x"], "there is no file or folder nowhere"),
        (["trim-vocab", "--text", "{blank}", "--keep", "9", "--out", "x"], "there is no text in"),
        (["trim-vocab", "--text", "{code}", "--keep", "0", "--out", "x"], "keep must be in [1, 4096], got 0"),
        (["trim-vocab", "--prompts", "{code}", "--keep", "4097", "--out", "x"], "keep must be in [1, 4096], got 4097"),
        (
            ["trim-vocab", "--text", "{code}", "--keep", "9", "--out", "no/x"],
            "cannot write no/x: it stands in no",
        ),
        (["datastore", "build", "{blank}", "--out", "x"], "there is no text in"),
        (["datastore", "build", "{code}", "--out", "no/x"], "cannot write no/x: it stands in no"),
        (["datastore", "build", "{code}", "--out", "."], "cannot write .: it is a folder"),
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


def test_a_vocabulary_without_the_target_s_stop_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    save_vocabulary(path, [3, 5], 9)
    assert load_vocabulary(path, 9, [5]) == [3, 5]
    with pytest.raises(ValueError, match=r"kept.json' leaves out the target's stop tokens \[0, 7\]"):
        load_vocabulary(path, 9, [7, 5, 0])


def test_every_stop_token_that_a_target_names_is_kept(tmp_path: Path) -> None:
    config, tokenizer = PreTrainedConfig(eos_token_id=2, vocab_size=9), SimpleNamespace(eos_token_id=4)
    assert _stop_tokens(str(tmp_path), config, tokenizer) == [2, 4]
    GenerationConfig(eos_token_id=[2, 6, 11]).save_pretrained(tmp_path)
    assert _stop_tokens(str(tmp_path), config, tokenizer) == [2, 4, 6], "a token without a logit is left out"


def test_only_what_the_target_writes_is_counted_with_a_seed_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def generate(_: object, prompts: list[list[int]], **options: Any) -> SimpleNamespace:
        calls.append(options)
        return SimpleNamespace(sequences=[[*prompts[0], 8, 9]])

    monkeypatch.setattr(generation, "generate", generate)
    monkeypatch.setattr(TreeLM, "from_pretrained", lambda name: name)
    arguments = argparse.Namespace(temperature=0.7, max_new_tokens=2, seed=5)
    assert _generated(arguments, "target", [[1, 2], [3]], [4]) == [[8, 9], [8, 9]]
    common = {"sampling": Sampling(0.7), "max_new_tokens": 2, "stop_token_ids": [4]}
    assert calls == [{**common, "seed": 5}, {**common, "seed": 6}]
