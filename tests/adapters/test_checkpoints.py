"""Checkpoints that are refused, and the device and dtype of loaded ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_models import VOCAB, tiny_config, tiny_model
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from stree import TreeLM

SUPPORTED = "model family 'gpt2' is not supported; supported: .*bamba.*llama.*mamba2"


def test_an_unsupported_family_is_refused_by_name() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=VOCAB))
    with pytest.raises(NotImplementedError, match=SUPPORTED):
        TreeLM(model)


def with_weights(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Make a function that writes a checkpoint with changed weights."""

    def write(folder: Path) -> None:
        tiny_model("bamba").save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return write


def with_file(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Make a function that writes a checkpoint whose file of weights is damaged."""

    def write(folder: Path) -> None:
        tiny_model("bamba").save_pretrained(folder)
        weights = folder / "model.safetensors"
        weights.write_bytes(change(weights.read_bytes()))

    return write


def with_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Make a function that writes a checkpoint of several files with a changed index."""

    def write(folder: Path) -> None:
        tiny_model("bamba").save_pretrained(folder, max_shard_size="20KB")
        file = folder / "model.safetensors.index.json"
        index = json.loads(file.read_text(encoding="utf-8"))
        change(index)
        file.write_text(json.dumps(index), encoding="utf-8")

    return write


A_LOG = "model.layers.0.mamba.A_log"
BAD_CHECKPOINTS: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "unsupported": (GPT2Config(n_layer=1).save_pretrained, NotImplementedError, SUPPORTED),
    "missing-folder": (Path.rmdir, ValueError, "no checkpoint that transformers can read at '{}'"),
    "empty-folder": (lambda _: None, ValueError, "no checkpoint that transformers can read at '{}'"),
    "config-garbled": (
        lambda folder: (folder / "config.json").write_text("{"),
        ValueError,
        "no checkpoint that transformers can read at '{}'.*valid JSON",
    ),
    "no-weights": (
        tiny_config("bamba").save_pretrained,
        ValueError,
        "checkpoint '{}' cannot be loaded: .*no file named model.safetensors",
    ),
    "truncated": (
        with_file(lambda file: file[:-1000]),
        ValueError,
        "checkpoint '{}' cannot be loaded: .*deserializing header",
    ),
    "garbled": (
        with_file(lambda _: b"not a checkpoint"),
        ValueError,
        "checkpoint '{}' cannot be loaded: .*deserializing header",
    ),
    "incomplete": (
        with_weights(lambda weights: weights.pop(A_LOG)),
        ValueError,
        "checkpoint '{}' lacks 1 weights: model.layers.0.mamba.A_log",
    ),
    "index-without-metadata": (
        with_index(lambda index: index.pop("metadata")),
        ValueError,
        "checkpoint '{}' cannot be loaded: its index of safetensors files has no metadata",
    ),
    "index-without-files": (
        with_index(lambda index: index.update(weight_map={A_LOG: None})),
        ValueError,
        "checkpoint '{}' cannot be loaded: .*index.json must hold a JSON object with a weight_map of tensors and their",
    ),
    "misshapen": (
        with_weights(lambda weights: weights.update({A_LOG: torch.zeros(7)})),
        ValueError,
        rf"checkpoint '{{}}' must have {A_LOG} \[4\], got \[7\] .1 weights differ",
    ),
}


@pytest.mark.parametrize(("make", "error", "message"), BAD_CHECKPOINTS.values(), ids=BAD_CHECKPOINTS)
def test_a_bad_checkpoint_is_refused(
    make: Callable[[Path], object], error: type[Exception], message: str, tmp_path: Path
) -> None:
    make(tmp_path)
    with pytest.raises(error, match=message.format(tmp_path)):
        TreeLM.from_pretrained(tmp_path, device="cpu")


@pytest.mark.parametrize("device", ["gpu", None, "cuda:1000", 1000])
def test_a_device_that_is_not_there_is_refused_before_anything_is_read(device: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"device must be one that torch finds, or 'auto', got {device!r}"):
        TreeLM.from_pretrained(tmp_path, device=device)


def test_a_known_family_is_read_without_the_code_that_its_checkpoint_names(tmp_path: Path) -> None:
    model = tiny_model("mamba2")
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"auto_map": {"AutoConfig": "code.C"}}), encoding="utf-8")
    (tmp_path / "code.py").write_text("raise ValueError('the code ran')\n", encoding="utf-8")
    assert type(TreeLM.from_pretrained(tmp_path).model) is type(model)


def test_a_path_in_place_of_a_model_is_refused() -> None:
    path: Any = "path/of/a/model"
    with pytest.raises(TypeError, match=r"model must be a loaded .*from_pretrained loads.*, got 'path/of/a/model'"):
        TreeLM(path)
