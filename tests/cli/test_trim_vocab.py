"""``stree trim-vocab`` as a user runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.calls import run_json
from helpers.tiny_models import VOCAB
from transformers import AutoTokenizer, GenerationConfig

from stree.cli import main
from stree.generation import generate
from stree.vocabulary import load_vocabulary


def test_a_vocabulary_is_trimmed_on_a_text_and_on_what_the_target_writes(
    target_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("w1 w2 w3 w1", encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w4 w5"}\n', encoding="utf-8")
    out = tmp_path / "kept.json"
    for options in (["--text", "text.txt"], ["--prompts", "prompts.jsonl", "--max-new-tokens", "6"]):
        files = [options[0], str(tmp_path / options[1]), *options[2:]]
        assert main(["trim-vocab", "--target", target_folder, *files, "--keep", "30", "--out", str(out)]) == 0
        assert f"30 of {VOCAB} tokens" in capsys.readouterr().out
        kept = load_vocabulary(out, VOCAB)
        assert len(kept) == 30 and 0 in kept
    command = ["generate", "w1 w2", "--target", target_folder, "--drafter", target_folder, "--max-new-tokens", "8"]
    trimmed, whole = run_json(capsys, *command, "--drafter-vocab", str(out)), run_json(capsys, *command)
    assert trimmed["token_ids"] == whole["token_ids"]


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


def test_prompts_go_through_the_chat_template(
    target_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w4 w5"}\n', encoding="utf-8")
    prompts = list[list[int]]()

    def noted(lm: Any, texts: list[list[int]], **options: Any) -> Any:
        prompts.extend(texts)
        return generate(lm, texts, **options)

    monkeypatch.setattr("stree.generation.generate", noted)
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    tokenizer.chat_template = "{% for message in messages %}w9 {{ message['content'] }} w8{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "chat")
    command = ["trim-vocab", "--target", target_folder, "--prompts", str(tmp_path / "prompts.jsonl"), "--keep", "9"]
    command += ["--max-new-tokens", "4", "--out", str(tmp_path / "kept.json"), "--chat"]
    assert main([*command, "--tokenizer", str(tmp_path / "chat")]) == 0
    assert prompts == [tokenizer("w9 w4 w5 w8")["input_ids"]]
    assert main(command) == 2, "negative control: the target's own tokenizer has no template"
