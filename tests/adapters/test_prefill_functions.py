"""Prefill beside causal-conv1d, mamba-ssm and fla, which transformers binds whatever the device of the model."""

from __future__ import annotations

import copy
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.cuda_packages import REFUSAL, aligned_only, bind_packages, refuse, write_packages
from helpers.family_states import Decoding
from helpers.tiny_family_models import EVERY_STATE, family_model, matrix
from helpers.tiny_models import TOLERANCE, tiny_model
from packaging.version import Version
from transformers import AutoConfig

import stree
from stree.models.families import family_of, stateful_modules
from stree.models.prefill_functions import serving_packages, warn_of_torch_functions
from stree.models.state_size import empty_model

ASSETS = Path(stree.__file__).parent / "assets"
# Families whose mixers call no function that a package may replace.
TORCH_ONLY = {"gemma", "gemma2", "gemma3_text", "llama", "minimax", "mistral", "qwen2", "qwen3", "recurrent_gemma"}
if Version(transformers.__version__) < Version("5.24"):
    TORCH_ONLY.add("lfm3")


def mixers_of(model: Any) -> list[Any]:
    """List one module of each class that holds a state."""
    return [*{type(module): module for _, module in stateful_modules(model, family_of(model.config))}.values()]


@pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")  # of transformers
@pytest.mark.parametrize("family", matrix(fast=EVERY_STATE))
def test_a_cpu_model_runs_where_packages_for_cuda_are_installed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model(family)
    bound = {name for mixer in mixers_of(model) for name in bind_packages(monkeypatch, type(mixer))}
    assert bool(bound) == (family not in TORCH_ONLY)
    if bound:
        with pytest.raises(RuntimeError, match=REFUSAL):
            model(torch.arange(1, 6)[None])
    decoding = Decoding(model, [17, 3, 9])
    assert decoding.prompt_error() < TOLERANCE[torch.float32]
    decoding.step([9, 4, 6])
    decoding.lm.self_check()
    text = decoding.model.generate(torch.tensor([decoding.texts[1]]), max_new_tokens=4, do_sample=False)[0].tolist()
    assert stree.generate(decoding.lm, [decoding.texts[1]], max_new_tokens=4, budget=4).sequences[0] == text


def as_module(function: Callable[..., Any]) -> torch.nn.Module:
    """Make a module of a function, as the package kernels does where it is installed."""
    func = function

    class Func(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs)

    return Func()


def test_functions_that_are_modules_of_the_package_kernels_are_routed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model("mamba2")
    kind = type(mixers_of(model)[0])
    bind_packages(monkeypatch, kind)
    file = sys.modules[kind.__module__]
    convolution = as_module(vars(file)["causal_conv1d_fn"])
    monkeypatch.setattr(file, "causal_conv1d_fn", convolution)
    with pytest.raises(RuntimeError, match=REFUSAL):
        model(torch.arange(1, 6)[None])
    assert Decoding(model, [17, 3]).prompt_error() < TOLERANCE[torch.float32]
    convolution.forward = refuse
    assert serving_packages(kind, torch.device("cuda"))["causal_conv1d_fn"] == "hub"


def test_packed_sequences_are_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mamba2")
    bind_packages(monkeypatch, type(mixers_of(model)[0]))
    mixer = next(iter(stree.TreeLM(model).mixers.values()))
    with pytest.raises(ValueError, match="causal_conv1d_fn of packed sequences needs tensors on a GPU, got .* cpu"):
        mixer(torch.ones(1, 5, 32), seq_idx=torch.zeros(1, 5, dtype=torch.int32))


@pytest.mark.slow
def test_the_first_command_runs_where_the_packages_are_installed(tmp_path: Path) -> None:
    write_packages(tmp_path)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "stree.cli", "generate", "Tom has 3 apples.", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--max-new-tokens", "8"], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def strides(monkeypatch: pytest.MonkeyPatch, model: Any, *, is_routed: bool = True) -> list[tuple[int, ...]]:
    """Run every kind of mixer without a device; return the strides that ``causal_conv1d_fn`` gets."""
    seen: list[tuple[int, ...]] = []
    mixers = [copy.deepcopy(mixer) for mixer in mixers_of(model)]
    for mixer in mixers:
        bind_packages(monkeypatch, type(mixer), {"causal_conv1d_fn": aligned_only(seen)})
    if is_routed:
        stree.TreeLM(model)
    config = model.config
    for mixer in mixers:
        names = inspect.signature(type(mixer).forward).parameters
        if "causal_conv1d_fn" not in vars(sys.modules[type(mixer).__module__]):
            continue
        if not any(isinstance(part, torch.nn.Conv1d) for part in mixer.children()):
            continue  # attention
        cache_name = next(name for name in ("cache", "cache_params", "past_key_values") if name in names)
        for batch, length in ((1, 3), (1, 12), (2, 13), (2, 1)):
            x = torch.empty(batch, length, config.hidden_size, device="meta", dtype=next(mixer.parameters()).dtype)
            for cache in (None, family_of(config).new_cache(config)):
                mixer.to("meta")(x, **({} if cache is None else {cache_name: cache}))
    return seen


@pytest.mark.parametrize("family", matrix())
def test_convolutions_get_strides_that_causal_conv1d_takes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bool(strides(monkeypatch, family_model(family))) == (family not in TORCH_ONLY)


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_the_bundled_models_convolutions_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = empty_model(AutoConfig.from_pretrained(ASSETS / name), torch.bfloat16)
    assert strides(monkeypatch, model)
    if name == "drafter":  # 7 heads: its projection has 519 columns
        with pytest.raises(RuntimeError, match="requires strides to be multiples of 8"):
            strides(monkeypatch, model, is_routed=False)


@pytest.mark.parametrize(("device", "packages"), [("cuda", "causal-conv1d mamba-ssm"), ("cpu", None)])
def test_what_would_speed_prefill_up_on_a_gpu_is_logged_there_only(
    device: str, packages: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = [type(mixer) for mixer in mixers_of(tiny_model("bamba"))]
    warn_of_torch_functions(kinds, torch.device(device))
    assert len(caplog.records) == (packages is not None)
    assert packages is None or "Prefill of BambaMixer on cuda runs transformers' torch functions" in caplog.text
    assert packages is None or f"install {packages} (docs/gpu.md" in caplog.text


def test_nothing_is_logged_where_the_packages_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kind = type(mixers_of(family_model("mamba2"))[0])
    bind_packages(monkeypatch, kind, {"causal_conv1d_fn": refuse})
    warn_of_torch_functions([kind], torch.device("cuda"))
    assert "install mamba-ssm (docs/gpu.md" in caplog.text and "conv1d" not in caplog.text
    caplog.clear()
    bind_packages(monkeypatch, kind)
    warn_of_torch_functions([kind], torch.device("cuda"))
    assert not caplog.records


def test_a_model_on_a_gpu_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[tuple[set[type], torch.device]] = []
    monkeypatch.setattr("stree.models.patched_model.warn_of_torch_functions", lambda *call: warned.append(call))
    lm = stree.TreeLM(tiny_model("mamba2"))
    assert warned == [({type(mixer) for mixer in lm.mixers.values()}, torch.device("cpu"))]
