"""Memory of a prefill: the peak of transformers' forward, which is run on tensors without values.

A model of the same configuration is made on the ``meta`` device, so this allocates nothing.  Three operations are
replaced there: attention, which would choose another algorithm; scans, whose loops over tokens or chunks would take
long; and products of experts, which refuse some dtypes.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from stree.models.measured_bytes import measured_bytes
from stree.models.patched_model import PatchedModel
from stree.models.peak_bytes import PeakBytes
from stree.models.prefill_functions import measured_on
from stree.models.state import DecodeState

__all__ = ["PrefillBytes", "model_without_values", "prefill_bytes"]

MOST_TOKENS = 1 << 20  # of longer texts the bytes of a token are those of this length
STEPS, LEAST_STEP = 32, 16  # lengths that are measured between a power of two and the next; tokens between two
ATTENTION = ("eager", "sdpa")  # implementations that run without values; others take no more memory than sdpa


def prefill_bytes(lm: PatchedModel, batch: int, length: int, *, held: int = 0, is_padded: bool = False) -> int:
    """Return the most bytes that transformers' forward of prompts holds: its cache, activations and temporaries.

    Args:
        lm: the model; its weights are not read.
        batch: prompts that run together.
        length: tokens of each, which are rounded up by 3 %, or 15 tokens, at most.
        held: tokens of each that have run before; rounded likewise.
        is_padded: whether the prompts differ in length.

    Returns:
        The bytes, or 0 for a model whose forward needs values.
    """
    if length > MOST_TOKENS:
        return prefill_bytes(lm, batch, MOST_TOKENS, held=held, is_padded=is_padded) * -(-length // MOST_TOKENS)
    length, held = _rounded(length), _rounded(held)
    sizes = batch, length, held, is_padded
    return measured_bytes("prefill", lm, sizes, lambda: _measure(lm, *sizes))


def _rounded(length: int) -> int:
    """Round up to a multiple of the step between two measured lengths."""
    step = max(LEAST_STEP, (1 << (length - 1).bit_length()) // (2 * STEPS)) if length else 1
    return -(-length // step) * step


def _measure(lm: PatchedModel, batch: int, length: int, held: int, is_padded: bool) -> int:
    """Run the forward on ``meta``."""
    other = copy.copy(lm)
    with torch.no_grad(), _disable_current_modes(), torch.device("meta"), measured_on(lm.device):
        other.model = model_without_values(lm)
        cache = lm.family.new_cache(other.model.config)
        positions = torch.arange(held, held + length).expand(batch, length)
        tokens = torch.zeros(batch, length, dtype=torch.long)
        specs = {site: dataclasses.replace(spec, device=tokens.device) for site, spec in lm.specs.items()}
        state = DecodeState(specs, batch, max(held, 1), 1, tokens.device)
        tracker = PrefillBytes(is_padded)
        with tracker, _Attention(lm.device):
            if held:
                state.store(cache, held)
            other.forward(tokens, cache, positions, None if held else torch.ones_like(tokens), logits_to_keep=1)
    return tracker.peak


def model_without_values(lm: PatchedModel) -> Any:
    """Return a model of the same class and configuration."""
    config = copy.deepcopy(lm.model.config)
    config._attn_implementation = _attention(config)
    model = lm.model_class(config).to(lm.dtype).eval()
    if getattr(model, "_can_set_experts_implementation", bool)():
        model.set_experts_implementation("grouped_mm")  # loops over experts that tokens are routed to need values
    for module in model.modules():
        if hasattr(module, "_rnn_scan"):
            module._rnn_scan = _rnn_scan
    return model


def _attention(config: Any) -> str:
    name = getattr(config, "_attn_implementation", None)
    return name if name in ATTENTION else "sdpa"


def _rnn_scan(hidden_states: Tensor, recurrent_gate: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Return what the RG-LRU's loop over tokens does, with a copy of its gate."""
    gate = torch.empty_like(recurrent_gate)
    out = torch.empty_like(hidden_states)
    del gate
    return out, torch.empty_like(hidden_states[:, 0], dtype=torch.float32)


class PrefillBytes(PeakBytes):
    """Counts bytes where experts may be of any dtype, and the model asks whether a mask hides padding."""

    def __init__(self, is_padded: bool) -> None:
        super().__init__()
        self._is_padded = is_padded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return not self._is_padded  # whether all of the mask is 1
        if func is torch.ops.aten._grouped_mm.default:
            func = _grouped_mm
        return super().__torch_dispatch__(func, types, args, kwargs)


def _grouped_mm(rows: Tensor, weights: Tensor, *_: Any, **__: Any) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[-1])


class _Attention(TorchFunctionMode):
    """Attention without a matrix of scores, but on a CPU for values of another width than the keys."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._is_cpu = device.type == "cpu"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = args
        if self._is_cpu and key.shape[-1] != value.shape[-1]:
            return func(*args, **kwargs)
        mask = kwargs.get("attn_mask")
        bias = None if mask is None else mask.to(query.dtype)
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        del bias
        return out
