"""Mistakes on the command line are named on standard error, end with status 2 and leave no file behind."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from stree.cli import main

# TARGET is the folder of a tiny model; the other files are written below.
GENERATE = "generate x --target TARGET"
DISTILL = "distill --out out"
BENCH = "bench run --target TARGET --drafter TARGET --limit 2 --suite mine=p.jsonl --methods plain --out out"
MISTAKES = {
    f"{GENERATE} --temperature -1": "temperature must be finite and not negative, got -1.0",
    f"{GENERATE} --budget 0": "budget must be at least 1, got 0",
    f"{GENERATE} --budget most": "budget must be a number of nodes or 'auto', got 'most'",
    f"{GENERATE} --dtype float31": "dtype must be 'auto', a floating torch dtype or its name, got 'float31'",
    f"{GENERATE} --device cuda": "device must be one that torch finds",
    f"{GENERATE} --verifier block": "block verification takes trees without branches",
    f"{GENERATE} --growth chain:2 --drafter suffix": "--growth shapes the trees of a draft model",
    f"{GENERATE} --drafter none --drafter-vocab x": "--drafter-vocab trims a draft model's head",
    f"{GENERATE} --drafter none --datastore x": "--datastore is read by --drafter suffix and fused",
    f"{GENERATE} --chat": "the target's tokenizer has no chat template; leave --chat out",
    "generate '' --target TARGET --drafter suffix": "the prompt is empty",
    "generate x --target no/such/folder": "no checkpoint that transformers can read at 'no/such/folder'",
    "info no/such/folder": "no checkpoint that transformers can read at 'no/such/folder'",
    "info --dtype int8": "dtype must be 'auto', a floating torch dtype or its name, got 'int8'",
    "datastore build nowhere --out x": "there is no file or folder nowhere",
    "datastore build blank.txt --out x": "there is no text in",
    "datastore build code.py --out no/x": "cannot write no/x: its folder does not exist",
    "datastore build code.py --out x --max-tokens 3": "the documents exceed max_tokens 3",
    "datastore build code.py --out x --target no/such/folder": "no tokenizer that transformers",
    "trim-vocab --text code.py --keep 0 --out x": "keep must be in [1, 4096], got 0",
    f"{DISTILL} --target TARGET --text nowhere": "there is no file or folder nowhere",
    f"{DISTILL} --target TARGET --text code.py --length 100": "length must be a multiple of 64",
    f"{DISTILL} --target TARGET --text code.py --dtype float16": "dtype must be bfloat16 or float32",
    f"{DISTILL} --target TARGET --text code.py": "training on windows of 512 needs at least 1026",
    f"{DISTILL} --target TARGET --text code.py --resume": "there is nothing to resume",
    f"{DISTILL} --target no/such/folder --text code.py": "no tokenizer that transformers can read",
    f"{BENCH} --suite mine=bad.jsonl": "suite 'mine': line 2 of bad.jsonl: a record needs one of the fields",
    f"{BENCH} --methods plain,chian:4": "method 'chian:4' is unknown; known are plain, transformers",
    f"{BENCH} --methods plain,stree:5": "method 'stree:5' cannot run: a tree of 13 nodes (root included) exceeds",
    f"{BENCH} --temperature hot": "--temperature must be a number or several, as 0,0.8, got 'hot'",
    f"{BENCH} --max-new-tokens 1": "max_new_tokens must be at least 2, got 1",
    f"{BENCH} --temperature 0,100": "temperatures must be in [0, 100), got [0.0, 100.0]",
    f"{BENCH} --limit -1": "--limit must not be negative, got -1",
    f"{BENCH} --chat": "--chat needs a tokenizer with a chat template",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_named_and_nothing_is_written(
    command: str, target_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--device cuda" in command and torch.cuda.is_available():
        pytest.skip("there is a device")
    files = {"blank.txt": " \n", "code.py": "def f(x):\n    return x\n", "p.jsonl": '{"prompt": "w1 w2"}\n'}
    files["bad.jsonl"] = '{"prompt": "a"}\n{"nothing": 1}\n'
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    with contextlib.chdir(tmp_path):
        words = ["" if word == "''" else word for word in command.replace("TARGET", target_folder).split()]
        assert main(words) == 2
    error = capsys.readouterr().err
    assert MISTAKES[command] in error, error
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {*files}
