"""The columns of a tree that begins to grow, and the tree that is cut out of them, compiled for the CPU with numba.

`reference.py` is the specification.  This file is imported with the first tree.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stree.kernels.numba_jit import compiled
from stree.kernels.step.texts import Seen
from stree.kernels.tree_growth.operands import Columns, Proposed

__all__ = ["begin", "cut"]

Array = np.ndarray[Any, Any]


def begin(seen: Seen, room: int) -> Columns:
    """Lay out columns; see `stree.kernels.tree_growth.api`."""
    batch = len(seen.pending)
    columns = _empty(batch, room, torch.empty(batch, room - 1))
    given = (part.contiguous().numpy() for part in (seen.tokens, seen.lengths, seen.pending))
    _begin(*given, *(part.numpy() for part in columns))
    return Columns(*columns)


def cut(columns: Columns, kept: Tensor | None, size: int) -> Proposed:
    """Cut a tree out of its columns; see `stree.kernels.tree_growth.api`."""
    batch, n = len(columns.tokens), size - 1 if kept is None else kept.shape[1]
    tree = _empty(batch, n, columns.values.new_empty(batch, n))
    rows = tree[1] if kept is None else torch.empty_like(tree[1])
    parts = columns.tokens, columns.parents, columns.depths, columns.mask, columns.values
    nodes = columns.tokens.new_empty(0, 0) if kept is None else kept.contiguous()
    _cut(*(part.numpy() for part in (*parts, nodes, *tree, rows)))
    return Proposed(*tree, rows)


def _empty(batch: int, n: int, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate tokens, parents, depths and ancestors of n nodes or columns; return them with the values."""
    parents = torch.empty(batch, n, dtype=torch.int32)
    mask = torch.empty(batch, n, n, dtype=torch.bool)
    return torch.empty(batch, n, dtype=torch.long), parents, torch.empty_like(parents), mask, values


@compiled
def _begin(
    text: Array, lengths: Array, pending: Array, tokens: Array, parents: Array, depths: Array, mask: Array,
    values: Array,
) -> None:  # fmt: skip
    """Do what `begin` does; the last five are written."""
    tokens[:], parents[:], depths[:], mask[:], values[:] = 0, -1, 0, False, 1
    for b in range(len(pending)):
        tokens[b, 0], tokens[b, 1] = text[b, lengths[b] - 1], pending[b]
        parents[b, 1], depths[b, 1], mask[b, 1, 0] = 0, 1, True
        for column in range(tokens.shape[1]):
            mask[b, column, column] = True


@compiled
def _cut(
    all_tokens: Array, all_parents: Array, all_depths: Array, all_mask: Array, all_values: Array, kept: Array,
    tokens: Array, parents: Array, depths: Array, mask: Array, values: Array, rows: Array,
) -> None:  # fmt: skip
    """Do what `cut` does; the last six are written."""
    batch, n = tokens.shape
    place_of = np.empty(all_tokens.shape[1], np.int32)
    for b in range(batch):
        place_of[:] = -1
        for place in range(n):
            node = kept[b, place] if kept.shape[1] else place
            place_of[node] = place
        for place in range(n):
            node = kept[b, place] if kept.shape[1] else place
            above = max(all_parents[b, node + 1] - 1, -1)
            rows[b, place] = above
            parents[b, place] = place_of[above] if above >= 0 else -1
            tokens[b, place], values[b, place] = all_tokens[b, node + 1], all_values[b, node]
            depths[b, place] = max(all_depths[b, node + 1] - 1, 0)
            for other in range(n):
                at = kept[b, other] if kept.shape[1] else other
                mask[b, place, other] = all_mask[b, node + 1, at + 1]
