"""A hundred mistakes on the command line: one line on standard error, status 2, no weights loaded, no file left behind.

Run: python -m pytest tests/cli/test_mistakes.py
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_pairs import WORDS, save_tiny

from stree.cli import main

# TARGET is the folder of a tiny model, OTHER one of another tokenizer; the other files are written below.
MISTAKES: dict[str, dict[str, str]] = {
    "generate x --target TARGET": {
        "--temperature -1": "temperature must be finite and not negative, got -1.0",
        "--top-k 0": "top_k must be an integer of at least 1, got 0",
        "--top-p 0": "top_p must be in (0, 1], got 0.0",
        "--top-p nan": "top_p must be in (0, 1], got nan",
        "--logit-bias x": "--logit-bias must be JSON, got 'x'",
        '--logit-bias {"5":101}': "logit_bias must be in [-100, 100], got 101 for token 5",
        "--allowed-token-ids []": "allowed_token_ids must be a list of at least one token id, got []",
        "--repetition-penalty 0": "repetition_penalty must be above 0, got 0",
        "--min-new-tokens -1": "min_new_tokens must be an integer of at least 0, got -1",
        "--budget 0": "budget must be at least 1, got 0",
        "--budget most": "--budget must be a number of nodes or 'auto', got 'most'",
        "--max-new-tokens 0": "max_new_tokens must be at least 1, got 0",
        "--prefill-chunk 0": "prefill_chunk must be at least 1, got 0",
        "--dtype float31": "dtype must be 'auto', a floating torch dtype or its name, got 'float31'",
        "--dtype int8": "dtype must be 'auto', a floating torch dtype or its name, got 'int8'",
        "--device cuda": "device must be one that torch finds",
        "--verifier fastest": "--verifier must be one of auto, match, rejection, traversal, block, got 'fastest'",
        "--growth chian:4": "'chian:4'",
        "--growth chain": "'chain'",
        "--growth chain:0": "depth must be at least 1, got 0",
        "--growth chain:x": "'chain:x'",
        "--growth static:": "'static:'",
        "--growth calibrated:3 --budget 8": "for at most 3 draft calls write 'calibrated:8x3'",
        "--growth lossy-target-init:2,3": "--growth lossy-target-init does not keep the target's distribution",
        "--growth chain:9 --budget 4": "exceeds",
        "--growth chain:2 --drafter suffix": "--growth shapes the trees of a draft model",
        "--drafter suffix --drafter-vocab x": "--drafter-vocab trims a draft model's head",
        "--drafter none --datastore x": "--datastore is read by --drafter suffix and fused",
        "--drafter suffix --datastore nowhere": "no datastore can be read at 'nowhere'",
        "--drafter suffix --datastore code.py": "no datastore can be read at 'code.py'",
        "--drafter nowhere": "--drafter must be one of the names in --help, a folder, or a hub id",
        "--drafter fused:nowhere": "or a hub id OWNER/NAME, got 'nowhere'",
        "--drafter empty": "no checkpoint that transformers can read at 'empty'",
        "--drafter OTHER": "have different tokenizers (63 and 97 tokens",
        "--drafter head": "the layout of draft head 'head' is not known ('xpress')",
        "--drafter TARGET --drafter-vocab nowhere": "nowhere",
        "--drafter mtp --drafter-vocab nowhere": "nowhere",
        "--tokenizer nowhere": "no tokenizer that transformers can read at 'nowhere'",
        "--tokenizer odd": "no tokenizer that transformers can read at 'odd'",
        "--tokenizer word": "no tokenizer that transformers can read at 'word'",
        "--chat": "the target's tokenizer has no chat template; leave --chat out",
    },
    "generate": {
        "'' --target TARGET --drafter suffix": "the prompt is empty",
        "x --target no/such/folder": "no checkpoint that transformers can read at 'no/such/folder'",
        "x --target /no/such": "the target must be a folder or a hub id OWNER/NAME, and there is no folder /no/such",
        "x --target empty": "no checkpoint that transformers can read at 'empty'",
        "x --target lora": "checkpoint 'lora' is an adapter of peft without its model: merge it into the model",
        "x --target bert": "model family 'bert' is not supported; supported: ",
        "x --target broken": "no checkpoint that transformers can read at 'broken'",
        "x --target list": "its config.json holds list, not an object",
        "x --target code": "would execute code of its own",
        "x --target act": "hidden_act of the model's config must be an activation of transformers, got 'nothing'",
        "x --target layerless": "num_hidden_layers of the model's config must be at least 1, got 0",
        "x --target wordless": "vocab_size of the model's config must be at least 1, got 0",
        "x --target word": "Field 'vocab_size' expected int, got str",
    },
    "info": {
        "no/such/folder": "no checkpoint that transformers can read at 'no/such/folder'",
        "--dtype int8": "dtype must be 'auto', a floating torch dtype or its name, got 'int8'",
        "layerless": "num_hidden_layers of the model's config must be at least 1, got 0",
        "flat": "transformers makes no model of this config of mamba2",
    },
    "datastore build": {
        "nowhere --out x": "there is no file or folder nowhere",
        "blank.txt --out x": "there is no text in",
        "bytes.txt --out x": "bytes.txt is no UTF-8 text",
        "bad.jsonl --out x": "line 2 of bad.jsonl must have a text or prompt that is a string",
        "code.py --out no/x": "cannot write no/x: its folder does not exist",
        "code.py --out code.py": "cannot write code.py: it is one of the files to read",
        ". --out p.jsonl": "cannot write p.jsonl: it is one of the files to read",
        "code.py --out empty": "cannot write empty: it is a folder",
        "code.py --out /dev/full": "cannot write /dev/full: it is no regular file",
        "code.py --out pipe": "cannot write pipe: it is no regular file",
        "code.py --out x --max-tokens 3": "the documents exceed max_tokens 3",
        "code.py --out x --target no/such/folder": "no tokenizer that transformers",
    },
    "trim-vocab --text code.py": {
        "--keep 9 --out code.py": "cannot write code.py: it is one of the files to read",
        "--keep 0 --out x": "keep must be in [1, 4096], got 0",
        "--keep 9 --out no/x": "cannot write no/x: its folder does not exist",
        "--keep 9 --out /dev/full": "cannot write /dev/full: it is no regular file",
        "--keep 9 --out x --temperature -1": "temperature must be finite and not negative, got -1.0",
        "--keep 9 --out x --max-new-tokens 0": "max_new_tokens must be at least 1, got 0",
        "--keep 9 --out x --target no/such/folder": "no checkpoint that transformers can read",
        "--keep 9 --out x --target vit": "model family 'vit' is not supported",
    },
    "distill --out out --target TARGET --text": {
        "nowhere": "there is no file or folder nowhere",
        "blank.txt": "needs at least 1026",
        "code.py": "training on windows of 512 needs at least 1026",
        "code.py --length 100": "length must be a multiple of 64",
        "code.py --dtype float16": "dtype must be bfloat16 or float32",
        "code.py --minutes 0": "minutes must be finite and above 0, got 0.0",
        "code.py --steps 0": "steps must be at least 1, got 0",
        "code.py --hidden 20": "hidden must be a multiple of 16, got 20",
        "code.py --layers 0": "layers must be at least 1, got 0",
        "code.py --text-share 1": "text_share must be in [0, 1), got 1.0",
        "code.py --temperature -1": "temperature must be finite and not negative, got -1.0",
        "code.py --seed -1": "seed must be in [0, 2**31), got -1",
        "code.py --kind eagle4": "kind must be one of ",
        "code.py --resume": "there is nothing to resume",
        "code.py --resume --force": "resume goes on with a run, force begins anew: give one of them",
        "code.py --out code.py": "a folder is needed at code.py, but code.py is a file",
        "code.py --out TARGET": "holds files that stree distill did not make; choose another folder",
        "code.py --target no/such/folder": "no tokenizer that transformers can read",
        "code.py --length 8 --device gpu": "device must be one that torch finds",
        "code.py --length 8 --target-dtype int8": "dtype must be 'auto', a floating torch dtype",
    },
    "bench run --target TARGET --drafter TARGET --limit 2 --suite mine=p.jsonl --methods plain --out out": {
        "--suite mine=bad.jsonl": "suite 'mine': line 2 of bad.jsonl: a record needs one of the fields",
        "--suite mine=nowhere": "nowhere",
        "--suite mine": "'mine'",
        "--methods plain,chian:4": "method 'chian:4' is unknown; known are plain, transformers",
        "--methods plain,stree:5": "method 'stree:5' is unknown; known are plain, transformers",
        "--temperature hot": "--temperature must be a number or several, as 0,0.8, got 'hot'",
        "--top-p 2": "top_p must be in (0, 1], got 2.0",
        "--top-k 0": "top_k must be an integer of at least 1, got 0",
        "--seeds 0,a": "--seed must be a number or several, as 0,1, got '0,a'",
        "--repeats 0": "repeats must be at least 1, got 0",
        "--suite bundled,code=p.jsonl": "suite 'code' is given twice",
        "--temperature 0,100": "temperatures must be in [0, 100), got [0.0, 100.0]",
        "--max-new-tokens 1": "max_new_tokens must be at least 2, got 1",
        "--limit -1": "--limit must not be negative, got -1",
        "--threads -1": "--threads must not be negative, got -1",
        "--out code.py": "code.py is a file",
    },
    "bench": {
        "profile --target TARGET --budget 0": "--budget must be at least 1, got 0",
        "profile --target TARGET --out empty": "--out must be a file, got the folder empty",
        "profile --target TARGET --growth nothing": "'nothing'",
        "fit-rates --suite mine=p.jsonl --out x --ranks 100000": "ranks must be below 257, got 100000",
        "report nowhere": "nowhere",
    },
}
COMMANDS = {f"{command} {rest}": error for command, rows in MISTAKES.items() for rest, error in rows.items()}
FILES: dict[str, Any] = {
    "blank.txt": b" \n", "code.py": b"def f(x):\n    return x + 1 + 2 + 3 + 4 + 5 + 6 + 7\n",
    "p.jsonl": b'{"prompt": "w1 w2"}\n', "bad.jsonl": b'{"prompt": "a"}\n{"nothing": 1}\n',
    "lora/adapter_config.json": b'{"peft_type": "LORA"}',
    "bytes.txt": b"\xff\xfe\x00", "bert/config.json": b'{"model_type": "bert"}',
    "broken/config.json": b'{"model_type": ', "list/config.json": b"[1]",
    "code/config.json": b'{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}',
    "head/config.json": b'{"speculators_model_type": "xpress"}', "odd/tokenizer_config.json": b"[]",
    "act/config.json": b'{"model_type": "mamba2", "hidden_act": "nothing"}',
    "vit/config.json": b'{"model_type": "vit"}',
    "layerless/config.json": b'{"model_type": "mamba2", "num_hidden_layers": 0}',
    "wordless/config.json": b'{"model_type": "mamba2", "vocab_size": 0}',
    "word/config.json": b'{"model_type": "mamba2", "vocab_size": "many"}',
    "flat/config.json": b'{"model_type": "mamba2", "conv_kernel": -1}',
}  # fmt: skip


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a tiny model of another vocabulary."""
    return save_tiny(tmp_path_factory.mktemp("other"), words=WORDS[:62])


def test_there_are_a_hundred_of_them() -> None:
    assert len(COMMANDS) >= 100


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_is_named_before_weights_are_loaded_and_nothing_is_written(
    command: str, target_folder: str, other_folder: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if "--device cuda" in command and torch.cuda.is_available():
        pytest.skip("there is a device")

    def loaded(*arguments: Any, **options: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", loaded)
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with contextlib.chdir(tmp_path):
        words = command.replace("TARGET", target_folder).replace("OTHER", other_folder).split()
        assert main(["" if word == "''" else word for word in words]) == 2
    error = capsys.readouterr().err
    assert COMMANDS[command] in error, error
    assert error.startswith("stree: error: ") and "\n" not in error.strip(), error
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {*FILES}
