"""Scans of prefill in slices: their memory on meta tensors, and the same logits and states as a whole forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.family_states import Decoding
from helpers.fast_cases import slow_unless
from helpers.tiny_family_models import family_model, matrix
from helpers.tiny_models import TOLERANCE
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from stree.models import bounded_scan
from stree.models.bounded_scan import MOST_BYTES, run_in_slices
from stree.models.peak_bytes import peak_bytes

# By name: heads, headdim, dstate, groups and chunk size of Mamba-2 layers.
MAMBA2 = {
    "mamba2-2.7b": (80, 64, 128, 1, 256),
    "Nemotron-H-8B": (128, 64, 128, 8, 128),
    "Bamba-9B": (128, 64, 256, 1, 256),
    "Falcon-H1-7B": (24, 128, 256, 1, 256),
    "Zamba2-7B": (112, 64, 64, 2, 256),
}
SLICED = {
    # Families whose prefill calls a scan that may be sliced; the others call no function that a package may replace.
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "mamba",
    "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba", "zamba2",
}  # fmt: skip


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def mamba2_call(batch: int, length: int, sizes: tuple[int, ...]) -> tuple[str, Callable[..., Any], dict[str, Any]]:
    heads, headdim, dstate, groups, chunk = sizes
    rates = {name: on_meta(heads, dtype=torch.float32) for name in ("A", "D", "dt_bias")}
    inputs = {"hidden_states": on_meta(batch, length, heads, headdim), "dt": on_meta(batch, length, heads)}
    inputs |= {name: on_meta(batch, length, groups, dstate) for name in ("B", "C")}
    function = inspect.unwrap(modeling_mamba2.mamba2_chunk_scan)
    more = {"chunk_size": chunk, "dt_softplus": True, "return_final_states": True}
    return "mamba_chunk_scan_combined", function, inputs | rates | more


def delta_call(batch: int, length: int, *, per_channel: bool) -> tuple[str, Callable[..., Any], dict[str, Any]]:
    inputs = {name: on_meta(batch, length, 32, 128) for name in ("query", "key", "value")}
    inputs |= {"beta": on_meta(batch, length, 32), "g": on_meta(batch, length, 32, *[128] * per_channel)}
    kimi, qwen = modeling_kimi_linear.chunk_kimi_delta_attention, modeling_qwen3_next.torch_chunk_gated_delta_rule
    function = inspect.unwrap(kimi if per_channel else qwen)
    return "chunk_kda" if per_channel else "chunk_gated_delta_rule", function, inputs | {"output_final_state": True}


def mamba1_call(batch: int, length: int) -> tuple[str, Callable[..., Any], dict[str, Any]]:
    inputs = {name: on_meta(batch, 5120, length) for name in ("hidden_states", "dt", "z")}
    inputs |= {name: on_meta(batch, 16, length) for name in ("B", "C")}
    inputs |= {"A": on_meta(5120, 16, dtype=torch.float32), "D": on_meta(5120, dtype=torch.float32)}
    function = inspect.unwrap(modeling_mamba.mamba_selective_scan)
    return "selective_scan_fn", function, inputs | {"delta_softplus": True, "return_last_state": True}


CALLS: dict[str, Callable[[int, int], tuple[str, Callable[..., Any], dict[str, Any]]]] = {
    **{name: lambda b, n, sizes=sizes: mamba2_call(b, n, sizes) for name, sizes in MAMBA2.items()},  # type: ignore[misc]
    "Kimi-Linear-48B": lambda b, n: delta_call(b, n, per_channel=True),
    "Qwen3-Next-80B": lambda b, n: delta_call(b, n, per_channel=False),
    "mamba-2.8b": mamba1_call,
}


@pytest.mark.parametrize("name", slow_unless("Bamba-9B".__eq__, CALLS, in_ci=lambda name: name not in MAMBA2))
def test_published_layers_stay_within_the_bound(name: str) -> None:
    length = 256 if name == "mamba-2.8b" else 1024  # it is scanned token by token
    called, function, given = CALLS[name](8, length)
    most = bounded_scan.scan_bytes(called, function, torch.device("cuda"), **given)
    outputs = sum(tensor.nbytes for tensor in function(**given))
    assert peak_bytes(lambda: function(**given)) > 2 * MOST_BYTES
    assert most <= MOST_BYTES
    assert 0.9 * most < peak_bytes(lambda: run_in_slices(called, function, **given)) < 1.05 * most + outputs


def test_one_token_of_eight_texts_is_bounded_too() -> None:
    # transformers 5.17 makes one tensor of 64 GiB of them: it pads to a whole chunk.
    called, function, given = CALLS["Bamba-9B"](8, 1)
    assert peak_bytes(lambda: run_in_slices(called, function, **given)) < 1.1 * MOST_BYTES


def test_a_scan_on_a_cpu_stays_in_its_cache() -> None:
    called, function, given = mamba2_call(4, 512, (24, 64, 128, 1, 256))  # mamba2-130m
    on_cpu, elsewhere = (
        bounded_scan.scan_bytes(called, function, torch.device(device), **given) for device in ("cpu", "cuda")
    )
    # In transformers 5.17 the shortest slice takes more than the cache holds.
    assert on_cpu <= max(bounded_scan.CACHED_BYTES, elsewhere / 8)


@pytest.mark.parametrize("dtype", [torch.float64], indirect=True, ids=["float64"])
@pytest.mark.parametrize("family", matrix(fast=("qwen3_next",), in_ci=("gemma3_text", "kimi_linear", "zamba2")))
def test_prefill_in_slices_is_the_models_own_forward(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound(monkeypatch, 4096)
    calls = counted(monkeypatch)
    decoding = Decoding(family_model(family, dtype), [70, 9, 33])
    assert decoding.prompt_error() < TOLERANCE[dtype]
    decoding.score([13, 5, 8])
    assert (max(calls, default=0) > 3) == (family in SLICED)


def test_chunks_of_fewer_tokens_give_the_same(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    bound(monkeypatch, 1)
    calls = counted(monkeypatch)
    decoding = Decoding(family_model("mamba2", dtype, chunk_size=64), [70, 70])
    assert decoding.prompt_error() < TOLERANCE[dtype]
    assert max(calls) == 2 * 5  # rows by chunks of 16 tokens


def test_a_state_that_is_not_passed_on_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    Decoding(family_model("mamba2"), [70])  # its mixers are checked once, before the control
    bound(monkeypatch, 1)
    counted(monkeypatch, initial_states=None)
    assert Decoding(family_model("mamba2"), [70]).prompt_error() > 100 * TOLERANCE[torch.float32]


def bound(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    for name in ("MOST_BYTES", "CACHED_BYTES"):
        monkeypatch.setattr(bounded_scan, name, num_bytes)


def counted(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[int]:
    """Note how many slices each scan is run in; arguments may be changed in all of them."""
    slices: list[int] = []
    unchanged = bounded_scan.run_in_slices

    def run(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        slices.append(0)

        def call(*args: Any, **kwargs: Any) -> Any:
            slices[-1] += next(iter(kwargs.values())).device.type != "meta"
            return function(*args, **{**kwargs, **{name: changes[name] for name in changes if name in kwargs}})

        call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return unchanged(name, call, *args, **kwargs)

    monkeypatch.setattr("stree.models.prefill_functions.run_in_slices", run)
    return slices
