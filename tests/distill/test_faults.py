"""What must not go wrong in training: repeated texts, losses that diverge, damaged files, full disks, odd settings.

Run: python -m pytest tests/distill/test_faults.py
"""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from helpers.fast_cases import slow_unless
from helpers.tiny_models import VOCAB, tiny_model
from helpers.tiny_pairs import END, SETTINGS, interrupted_after, save_tiny

import stree
from stree.cli import main
from stree.distill import Settings, distill_drafter, network, training
from stree.distill.continuations import draw_prompts
from stree.distill.heads import HEADS
from stree.distill.settings import RECIPES
from stree.distill.text import Batches, Corpus, encode

TEXTS = [" ".join(f"w{1 + (start + step) % 8}" for step in range(30 + start)) for start in range(20)]
CASES_IN_CI = [("mtp-fspad", "bfloat16")]
CASES = [("model", "plain"), *((kind, "plain") for kind in HEADS)]
CASES += [(kind, name) for kind, names in RECIPES.items() for name in names if name != "plain"]
QUICK = ("--length", "16", "--hidden", "16", "--layers", "1", "--batch-size", "2", "--steps", "2", "--generated", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with its tokenizer on disk."""
    return Path(save_tiny(tmp_path_factory.mktemp("target")))


def distil(target: Path, out: Path, *options: str) -> int:
    return main(["distill", "--target", str(target), "--out", str(out), "--device", "cpu", *QUICK, *options])


@pytest.mark.slow
def test_texts_that_are_given_twice_are_left_out_and_it_is_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number, text in enumerate(TEXTS):
        (texts / f"{number}.txt").write_text(text)
    (texts / "copy.txt").write_text(TEXTS[3] + "\n")
    counts = []
    for number, given in enumerate(([texts], [texts, texts, texts / "5.txt"])):
        assert distil(folder, tmp_path / str(number), "--text", *map(str, given)) == 0
        counts.append(json.loads((tmp_path / str(number) / "distill.json").read_text())["text_tokens"])
        assert f"{1 + number * 22} of {21 + number * 22} texts are given twice" in capsys.readouterr().err
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_texts_given_twice_to_the_library_are_not_held_out_and_trained_on(
    target: stree.TreeLM, tokenizer: Any, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, steps=1, generated=0.0)
    one, two = (
        distill_drafter(target, tokenizer, TEXTS * times, tmp_path / str(times), settings)["text"] for times in (1, 2)
    )
    assert one == two


@pytest.mark.slow
def test_an_out_folder_among_the_texts_is_no_text(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(" ".join(TEXTS))
    out = tmp_path / "out"
    with interrupted_after(1):
        assert distil(folder, out, "--text", str(tmp_path)) == 130
    assert distil(folder, out, "--text", str(tmp_path), "--resume") == 0, capsys.readouterr().err
    assert distil(folder, out, "--text", str(tmp_path), "--force") == 0, capsys.readouterr().err


def test_a_loss_that_diverges_in_its_last_update_is_not_published(
    target: stree.TreeLM, tokenizer: Any, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, steps=1, generated=0.0, text_share=0.0, adam_lr=1e30, muon_lr=1e30)
    with pytest.raises(RuntimeError, match="distill: the loss is nan at step 1"):
        distill_drafter(target, tokenizer, TEXTS, tmp_path / "out", settings)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoints"]


@pytest.mark.parametrize(
    ("case", "dtype"),
    slow_unless(
        lambda *_: False,
        product(map("-".join, CASES), ("float32", "bfloat16")),
        in_ci=lambda *case: case in CASES_IN_CI,
    ),
)  # the others take minutes
def test_every_kind_recipe_and_dtype_trains_loads_and_generates(
    case: str, dtype: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, recipe = case.split("-")
    (tmp_path / "text.txt").write_text(" ".join(TEXTS))
    options = ["--kind", kind, "--recipe", recipe, "--target-dtype", dtype, "--generated", "0.5"]
    assert distil(folder, tmp_path / "out", "--text", str(tmp_path / "text.txt"), *options) == 0
    metrics = json.loads((tmp_path / "out" / "distill.json").read_text())
    assert all(math.isfinite(value) for value in (*metrics["tau"].values(), metrics["stages"]["distill"]["loss"]))
    capsys.readouterr()
    generate = ["generate", "--target", str(folder), "--device", "cpu", "--max-new-tokens", "6", "w1 w2 w3"]
    assert main([*generate, "--drafter", str(tmp_path / "out")]) == 0
    drafted = capsys.readouterr().out
    assert main([*generate, "--drafter", "none"]) == 0
    assert capsys.readouterr().out == drafted
    if kind == "model":
        from transformers import AutoModelForCausalLM

        assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == VOCAB


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from stree.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "most", [500, *(pytest.param(most, marks=pytest.mark.exhaustive) for most in (20_000, 30_000, 45_000))]
)
def test_a_disk_that_fills_gives_one_line_and_the_run_goes_on(most: int, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(" ".join(TEXTS))
    options = ["--text", str(tmp_path / "text.txt"), "--target", str(folder), "--out", str(tmp_path / "out"), *QUICK]
    command = [sys.executable, "-c", FULL, str(most), "distill", *options, "--device", "cpu"]
    failed = subprocess.run(command, capture_output=True, text=True)
    *_, last = failed.stderr.strip().splitlines()
    assert failed.returncode == 2 and "Traceback" not in failed.stderr
    assert last.startswith(f"stree: error: cannot write {tmp_path / 'out'}") and "File too large" in last
    assert distil(folder, tmp_path / "out", "--text", str(tmp_path / "text.txt"), "--resume") == 0


def test_a_text_of_stop_tokens_alone_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="there is no text to train on"):
        encode(["<|end|> <|end|> <|end|>"] * 30, tokenizer, VOCAB, END)
    empty = Corpus({"text": np.full(40, END, dtype=np.int32)}, {"text": 1.0}, separator=END)
    with pytest.raises(ValueError, match="holds nothing but stop tokens"):
        draw_prompts(empty, 2, 8, np.random.default_rng(0))


def test_a_checkpoint_with_one_changed_bit_is_refused(tmp_path: Path) -> None:
    def stage() -> Any:
        drafter = network.build(network.drafter_config(VOCAB, 16, 1, {}))
        batches = Batches(Corpus({"text": np.arange(40, dtype=np.int32)}, {"text": 1.0}), 16, 0)
        return training._Stage(tmp_path / "text.pt", drafter, training.make_optimizers(drafter, SETTINGS), batches)

    stage().save()
    whole = (tmp_path / "text.pt").read_bytes()
    stage().load()
    with ZipFile(tmp_path / "text.pt") as packed:
        files = [file for file in packed.infolist() if file.file_size > 8]
    for file in files[:: len(files) // 5]:
        names, more = struct.unpack("<HH", whole[file.header_offset + 26 : file.header_offset + 30])
        changed = bytearray(whole)
        changed[file.header_offset + 30 + names + more + file.file_size // 2] ^= 1
        (tmp_path / "text.pt").write_bytes(changed)
        with pytest.raises(ValueError, match=r"text\.pt cannot be read: .*begin anew by force"):
            stage().load()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decay": 0.0}, r"decay must be in \(0, 1\], got 0.0"),
        ({"decay": math.nan}, r"decay must be in \(0, 1\], got nan"),
        ({"warmup": -1.0}, r"warmup must be in \[0, 1\], got -1.0"),
        ({"save_every": math.nan}, "save_every must be finite and not negative, got nan"),
        ({"layers": math.nan}, "layers must be an integer, got float"),
        ({"steps": math.nan}, "steps must be an integer, got float"),
        ({"batch_size": 1.5}, "batch_size must be an integer, got float"),
        ({"length": math.nan}, "length must be an integer, got float"),
        ({"seed": 0.5}, "seed must be an integer, got float"),
        *(({name: math.nan}, f"{name} must be .*got nan") for name in ("minutes", "muon_lr", "adam_lr", "clip")),
        *(({name: math.nan}, f"{name} must be .*got nan") for name in ("text_share", "generated", "temperature")),
    ],
)
def test_odd_settings_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Settings(**changes)


@pytest.mark.parametrize("stop", [[], VOCAB, [0, VOCAB + 5], -1])
def test_a_stop_token_that_the_target_does_not_have_is_refused_by_name(
    stop: Any, tokenizer: Any, tmp_path: Path
) -> None:
    model = tiny_model("mamba2")
    model.config.eos_token_id = model.generation_config.eos_token_id = stop
    with pytest.raises(ValueError, match=r"eos_token_id .* must be .*tokens of the target's"):
        distill_drafter(stree.TreeLM(model), tokenizer, TEXTS, tmp_path / "out", SETTINGS)
    assert not (tmp_path / "out").exists()
