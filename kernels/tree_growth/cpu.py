"""Which slots a layer of growth takes and the columns that they become, on the CPU, compiled with numba.

`reference.py` is the specification.  This file is imported with the first tree.
"""

# mypy: disable-error-code="untyped-decorator, no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stree.kernels.cpu_jit import compiled, inner
from stree.kernels.tree_growth.operands import Appended, Chosen, Columns, Layout, Terms

__all__ = ["append", "choose"]

Array = np.ndarray[Any, Any]

TINY = 1.2e-38  # of a value that others are compared with


def choose(value: Tensor, left: Tensor | None, below: Tensor | None, terms: Terms) -> tuple[Tensor, Tensor]:
    """Choose the best slots; see `stree.kernels.tree_growth.api`."""
    batch, count = value.shape
    slots = torch.empty(batch, min(terms.width, count), dtype=torch.long)
    is_taken = torch.empty(slots.shape, dtype=torch.bool)
    bounds = slots.new_empty(0) if left is None else left.long()
    reach = value.new_empty(0) if below is None else below.to(value.dtype)
    values, left_of_row, least = (part.contiguous().numpy() for part in (value, bounds, reach))
    _choose(
        values, left_of_row, left is not None, least, below is not None, terms.threshold, terms.layers_left,
        slots.numpy(), is_taken.numpy(),
    )  # fmt: skip
    return slots, is_taken


def append(columns: Columns, chosen: Chosen, left: Tensor, layout: Layout) -> Appended:
    """Append the nodes of a layer, without columns that would be padding in every row."""
    batch, count = chosen.slots.shape
    values = torch.empty(batch, count, dtype=chosen.value.dtype)
    column, tokens = torch.empty(batch, count, dtype=torch.long), torch.empty(batch, count, dtype=torch.long)
    width = _append(
        *(part.numpy() for part in (columns.tokens, columns.parents, columns.depths, columns.mask)),
        *(part.numpy() for part in (columns.values, left)),
        *(part.contiguous().numpy() for part in (chosen.slots, chosen.is_taken)),
        *(part.flatten(1).contiguous().numpy() for part in (chosen.value, chosen.tokens)),
        chosen.tokens.shape[-1], layout.width, layout.frontier, layout.size,
        -1 if layout.num_nodes is None else layout.num_nodes, layout.is_cut,
        values.numpy(), column.numpy(), tokens.numpy(),
    )  # fmt: skip
    return Appended(width, values, column, tokens)


@compiled
def _append(
    all_tokens: Array, parents: Array, depths: Array, mask: Array, all_values: Array, left: Array,
    slots: Array, is_taken: Array, value: Array, token: Array, ranks: int, width: int,
    frontier: int, size: int, num_nodes: int, is_cut: bool, values: Array,
    column: Array, tokens: Array,
) -> int:  # fmt: skip
    """Do what `append` does; return the number of columns appended.  Columns, `left` and the last three are written."""
    batch, count = slots.shape
    most = 0
    for b in range(batch):
        for place in range(count):
            slot = slots[b, place]
            values[b, place] = value[b, slot] if is_taken[b, place] else 0
            column[b, place] = slot // ranks + frontier
            tokens[b, place] = token[b, slot]
        if num_nodes >= 0:
            _keep_best(all_values[b, : size - 1], values[b], num_nodes)
        taken = 0
        for place in range(count):
            is_kept = is_taken[b, place] and values[b, place] >= 0
            values[b, place] = max(values[b, place], 0)
            column[b, place] = column[b, place] if is_kept else -1 - column[b, place]
            left[b] -= is_kept
            taken += is_kept and place < width
        most = max(most, taken)
    if is_cut or not most:
        width = most
    for b in range(batch):
        for place in range(count):
            is_kept, at = column[b, place] >= 0, size + place
            above = column[b, place] if is_kept else -1 - column[b, place]
            column[b, place] = above
            if place < width:
                all_tokens[b, at] = tokens[b, place] if is_kept else 0
                parents[b, at] = above if is_kept else -1
                depths[b, at] = depths[b, above] + 1 if is_kept else 0
                for other in range(size):
                    mask[b, at, other] = is_kept and mask[b, above, other]
                all_values[b, at - 1] = values[b, place]
    return width


@inner()
def _keep_best(known: Array, values: Array, num_nodes: int) -> None:
    """Make values -1 that are not among the best of a tree, its root counted."""
    both = np.empty(len(known) + len(values), values.dtype)
    for at in range(len(known)):
        both[at] = known[at]
    for at in range(len(values)):
        both[len(known) + at] = values[at]
    least = np.sort(both)[len(both) - num_nodes - 1]
    for at in range(len(values)):
        if values[at] < least:
            values[at] = -1


@compiled
def _choose(
    value: Array, left: Array, is_bounded: bool, below: Array, goes_by_size: bool, threshold: float, layers_left: int,
    slots: Array, is_taken: Array,
) -> None:  # fmt: skip
    """Do what ``choose`` does; ``slots`` and ``is_taken`` are written."""
    batch, count = value.shape
    width, least = slots.shape[1], value.dtype.type(threshold)
    ordered = np.empty(width, value.dtype)
    free = np.empty(count, np.bool_)
    for b in range(batch):
        for slot in range(count):
            free[slot] = True
        goes_on = True
        for place in range(width):
            best = -1
            for slot in range(count):
                if free[slot] and (best < 0 or value[b, slot] > value[b, best]):
                    best = slot
            free[best], slots[b, place], ordered[place] = False, best, value[b, best]
            worth = ordered[place] > 0
            if worth and is_bounded:
                worth = place < left[b]
                if worth and goes_by_size:
                    worth = goes_on = goes_on and _size(ordered, place, below) <= left[b]
                elif worth:
                    worth = ordered[place] >= least or place < left[b] // layers_left
            is_taken[b, place] = worth


@inner()
def _size(ordered: Array, place: int, below: Array) -> int:
    """Estimate how many nodes are worth as much as a slot: those before it and what typically grows below them."""
    size, tiny = place + 1, ordered.dtype.type(TINY)
    for other in range(place + 1):
        share = ordered[place] / max(ordered[other], tiny)
        low, high = 0, len(below)
        while low < high:
            middle = (low + high) // 2
            if below[middle] < share:
                low = middle + 1
            else:
                high = middle
        size += len(below) - low
    return size
