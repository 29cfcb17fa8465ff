"""``stree trim-vocab`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GenerationConfig

from stree.cli import main
from stree.vocabulary import load_vocabulary

TEXT = "def area_of_circle(radius):\n    return 3.14159 * radius * radius\n" * 3


@pytest.mark.slow
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


def test_every_stop_token_that_a_target_names_is_kept(target_folder: str, tmp_path: Path) -> None:
    config = GenerationConfig.from_pretrained(target_folder)
    vocab = AutoTokenizer.from_pretrained(target_folder).get_vocab()
    try:
        GenerationConfig(eos_token_id=[vocab["w40"], vocab["w41"]]).save_pretrained(target_folder)
        (tmp_path / "text.txt").write_text("w1 w2 w3", encoding="utf-8")
        command = ["trim-vocab", "--target", target_folder, "--text", str(tmp_path / "text.txt")]
        assert main([*command, "--keep", "5", "--out", str(tmp_path / "kept.json")]) == 0
    finally:
        config.save_pretrained(target_folder)
    assert {vocab["w40"], vocab["w41"]} <= set(load_vocabulary(tmp_path / "kept.json", len(vocab)))
