"""Prefill of the first chunk of prompts by transformers' forward, and the checks of a caller's prompts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stree.models.checks import describe, is_integer
from stree.models.layers.base import state_dtype
from stree.models.patched_model import PatchedModel
from stree.models.patching import is_hooked, is_linear
from stree.models.state import DecodeState

__all__ = ["check_prompts", "run_prompts"]


def check_prompts(state: DecodeState, input_ids: Tensor, lengths: Tensor | None) -> list[int]:
    """Return the true lengths of prompts after checking them and the state to fill.

    Raises:
        ValueError: a wrong shape or dtype, an empty prompt, or one beyond the state's max_length.
        RuntimeError: the state is not empty.
    """
    batch = state.batch_size
    if not is_integer(input_ids) or input_ids.dim() != 2 or input_ids.shape[0] != batch:
        raise ValueError(f"input_ids must be int64[{batch}, length], got {describe(input_ids)}")
    if state.length_bound or state.pending is not None:
        raise RuntimeError("prefill needs an empty state; this one holds tokens already")
    width = input_ids.shape[1]
    if lengths is not None and (not is_integer(lengths) or lengths.shape != (batch,)):
        raise ValueError(f"lengths must be int[{batch}], got {describe(lengths)}")
    sizes = [width] * batch if lengths is None else lengths.tolist()
    if width == 0 or min(sizes) < 1:
        raise ValueError(f"every prompt needs at least one token, got lengths {sizes}")
    if max(sizes) > width:
        raise ValueError(f"lengths must be at most {width}, the width of input_ids, got {sizes}")
    if max(sizes) > state.max_length:
        raise ValueError(f"a prompt of {max(sizes)} tokens exceeds max_length {state.max_length}")
    return sizes


def run_prompts(model: PatchedModel, state: DecodeState, input_ids: Tensor, sizes: list[int]) -> Tensor:
    """Run prompts with transformers' forward, in one batch where padding is exact, and fill a state.

    Args:
        model: of the state.
        state: empty.
        input_ids: int64[batch, length], right-padded.
        sizes: tokens of each prompt.

    Returns:
        float32[batch, vocab] logits after each prompt (float64 for float64 models).
    """
    if len(set(sizes)) == 1 or _pads_exactly(model):
        return _run_batch(model, state, input_ids, sizes)
    rows = []
    for row, size in enumerate(sizes):
        single = model.new_state(1, state.max_length, state.max_nodes)
        rows.append(_run_batch(model, single, input_ids[row : row + 1], [size]))
        state.write_row(row, single)
    return torch.cat(rows)


def _run_batch(model: PatchedModel, state: DecodeState, input_ids: Tensor, sizes: list[int]) -> Tensor:
    """Run prompts together, left-padded where their lengths differ."""
    longest, lengths = max(sizes), torch.tensor(sizes, dtype=torch.int32, device=model.device)
    columns = torch.arange(longest, device=input_ids.device) - (longest - lengths.long())[:, None]
    positions, mask = columns.clamp(min=0), (columns >= 0).long()
    cache = model.family.new_cache(model.model.config)
    logits = model.forward(input_ids.gather(1, positions), cache, positions, mask, logits_to_keep=1)[:, -1]
    state.load(cache, model.mixers, lengths, longest)
    return logits.to(state_dtype(logits.dtype))


def _pads_exactly(model: PatchedModel) -> bool:
    """Return whether prompts of different lengths may be left-padded."""
    # Eager attention masks float64 scores with the smallest float64 and takes their softmax in float32, where that is
    # -inf: a column of padding, which attends to no token, becomes NaN.
    is_eager = getattr(model.model.config, "_attn_implementation", None) == "eager"
    if not model.family.pads_exactly or (is_eager and model.dtype == torch.float64):
        return False
    parts = (
        getattr(mixer, name, None)
        for site, mixer in model.mixers.items()
        for name in model.specs[site].before_convolution
    )
    return all(part is None or _maps_zeros_to_zeros(part) for part in parts)


def _maps_zeros_to_zeros(projection: Any) -> bool:
    """Return whether a projection maps zeros to zeros; if not, padding would enter the convolution window."""
    if is_linear(projection):
        return projection.bias is None
    weight = projection.weight
    return not is_hooked(projection) and not bool(projection(weight.new_zeros(1, 1, weight.shape[1])).any())
