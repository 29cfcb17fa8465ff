"""Prefill of prompts and of further tokens by transformers' forward, and the checks of a caller's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.kernels.checks import describe
from stree.models.checks import is_integer
from stree.models.layers.base import LayerSpec, state_dtype
from stree.models.patched_model import PatchedModel
from stree.models.patching import is_hooked, is_linear, num_features
from stree.models.state import DecodeState

__all__ = ["can_continue", "check_extension", "check_prompts", "continue_prompts", "pads_exactly", "run_prompts"]


def check_prompts(state: DecodeState, input_ids: Tensor, lengths: Tensor | None) -> list[int]:
    """Return the true lengths of prompts after checking them and the state to fill.

    Raises:
        ValueError: a wrong shape or dtype, an empty prompt, or one beyond the state's max_length.
        RuntimeError: the state is not empty.
    """
    sizes = _sizes(state, input_ids, lengths)
    if state.length_bound or state.pending_tree is not None:
        raise RuntimeError("prefill needs an empty state; this one holds tokens already")
    if min(sizes, default=0) < 1:
        raise ValueError(f"every prompt needs at least one token, got lengths {sizes}")
    if max(sizes) > state.max_length:
        raise ValueError(f"a prompt of {max(sizes)} tokens exceeds max_length {state.max_length}")
    return sizes


def check_extension(state: DecodeState, input_ids: Tensor, lengths: Tensor | None) -> list[int]:
    """Return the true lengths of further tokens after checking them against the state.

    Raises:
        ValueError: a wrong shape or dtype, no column, or a text that would exceed the state's max_length.
    """
    sizes = _sizes(state, input_ids, lengths)
    longest = max(held + size for held, size in zip(state.lengths.tolist(), sizes, strict=True))
    if not input_ids.shape[1]:
        raise ValueError("input_ids must have at least one column, got none")
    if longest > state.max_length:
        raise ValueError(f"extending makes {longest} tokens, which exceeds max_length {state.max_length}")
    return sizes


def _sizes(state: DecodeState, input_ids: Tensor, lengths: Tensor | None) -> list[int]:
    """Return the true length of every row after checking shapes and dtypes."""
    batch = state.batch_size
    if not is_integer(input_ids) or input_ids.dim() != 2 or input_ids.shape[0] != batch:
        raise ValueError(f"input_ids must be int64[{batch}, length], got {describe(input_ids)}")
    if lengths is not None and (not is_integer(lengths) or lengths.shape != (batch,)):
        raise ValueError(f"lengths must be int[{batch}], got {describe(lengths)}")
    width = input_ids.shape[1]
    sizes: list[int] = [width] * batch if lengths is None else lengths.tolist()
    if not 0 <= min(sizes) <= max(sizes) <= width:
        raise ValueError(f"lengths must be in [0, {width}], up to the width of input_ids, got {sizes}")
    return sizes


def run_prompts(
    model: PatchedModel,
    state: DecodeState,
    input_ids: Tensor,
    sizes: list[int],
    hidden_layers: Sequence[int] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Run prompts with transformers' forward, in one batch where padding is exact, and fill a state.

    Args:
        model: of the state.
        state: empty.
        input_ids: int64[batch, length], right-padded.
        sizes: tokens of each prompt.
        hidden_layers: layers whose hidden states are returned, or None.

    Returns:
        float32[batch, vocab] logits after each prompt (float64 for float64 models), and, where layers are given,
        float[batch, longest, len(hidden_layers), hidden_size].
    """
    if len(set(sizes)) == 1 or pads_exactly(model):
        scores, recorded = _run_batch(model, state, input_ids, sizes, hidden_layers)
        return scores, [] if recorded is None else [recorded]
    logits, hidden = [], []
    for row, size in enumerate(sizes):
        single = model.new_state(1, state.max_length, state.max_nodes)
        scores, recorded = _run_batch(model, single, input_ids[row : row + 1], [size], hidden_layers)
        logits.append(scores)
        if recorded is not None:
            hidden.append(F.pad(recorded, (0, 0, 0, 0, 0, max(sizes) - size)))
        state.write_row(row, single)
    return torch.cat(logits), [torch.cat(hidden)] if hidden else []


def _run_batch(
    model: PatchedModel, state: DecodeState, input_ids: Tensor, sizes: list[int], hidden_layers: Sequence[int] | None
) -> tuple[Tensor, Tensor | None]:
    """Run prompts together, left-padded where their lengths differ."""
    longest, lengths = max(sizes), torch.tensor(sizes, dtype=torch.int32, device=model.device)
    index, padding = torch.arange(longest, device=model.device), longest - lengths.long()
    columns = index - padding[:, None]
    positions, mask = columns.clamp(min=0), (columns >= 0).long()
    cache = model.family.new_cache(model.model.config)
    logits, hidden = model.forward_recording(
        hidden_layers, input_ids.gather(1, positions), cache, positions, mask, logits_to_keep=1
    )
    state.load(cache, model.mixers, lengths, longest)
    if hidden is not None:  # moved left, as the input is
        columns = (index + padding[:, None]).clamp(max=longest - 1).to(hidden.device)
        hidden = hidden.take_along_dim(columns[:, :, None, None], dim=1)
    return logits[:, -1].to(state_dtype(logits.dtype)), hidden


def can_continue(model: PatchedModel, state: DecodeState, sizes: Sequence[int]) -> bool:
    """Return whether transformers' forward can run more tokens of every text, and has more than one chain to run."""
    return (
        model.family.continues_caches
        and min(sizes) == max(sizes) > state.max_nodes
        and len(set(state.lengths.tolist())) == 1
    )


@torch.no_grad()
def continue_prompts(
    model: PatchedModel,
    state: DecodeState,
    input_ids: Tensor,
    chunk_size: int,
    hidden_layers: Sequence[int] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Run more tokens with transformers' forward behind a copy of the state in its cache, and fill the state.

    Args:
        model: of the state; its family continues caches.
        state: of texts that are equally long; unchanged if a forward fails, but for its pending tree, which is dropped.
        input_ids: int64[batch, n].
        chunk_size: most tokens that one forward runs.
        hidden_layers: layers whose hidden states are returned, or None.

    Returns:
        Logits after the last tokens, and the hidden states of every chunk, as ``run_prompts`` returns them.
    """
    batch, length, recorded = state.batch_size, int(state.lengths[0]), list[Tensor]()
    state.pending_tree = None
    cache = model.family.new_cache(model.model.config)
    state.store(cache, length)
    for chunk in input_ids.split(chunk_size, dim=1):
        positions = torch.arange(length, length + chunk.shape[1], device=model.device).expand(batch, -1)
        logits, hidden = model.forward_recording(hidden_layers, chunk, cache, positions, logits_to_keep=1)
        length += chunk.shape[1]
        recorded += [] if hidden is None else [hidden]
    with state.changing():
        state.load(cache, model.mixers, torch.full_like(state.lengths, length), length)
    return logits[:, -1].to(state_dtype(logits.dtype)), recorded


def pads_exactly(model: PatchedModel) -> bool:
    """Return whether prompts of different lengths may be left-padded."""
    # Eager attention masks float64 scores with the smallest float64 and takes their softmax in float32, where that is
    # -inf: a column of padding, which attends to no token, becomes NaN.
    is_eager = getattr(model.model.config, "_attn_implementation", None) == "eager"
    if not model.family.pads_exactly or (is_eager and model.dtype == torch.float64):
        return False
    parts = (
        (getattr(mixer, name, None), model.specs[site])
        for site, mixer in model.mixers.items()
        for name in model.specs[site].before_convolution
    )
    return all(part is None or _maps_zeros_to_zeros(part, spec) for part, spec in parts)


def _maps_zeros_to_zeros(projection: Any, spec: LayerSpec) -> bool:
    """Return whether a projection maps zeros to zeros; if not, padding would enter the convolution window."""
    if is_linear(projection):
        return projection.bias is None
    zeros = torch.zeros(1, 1, num_features(projection)[0], dtype=spec.dtype, device=spec.device)
    return not is_hooked(projection) and not bool(projection(zeros).any())
