"""What a step appends to the texts, and where its path is among nodes and columns, compiled for the CPU with numba.

`texts` and `bookkeeping` hold the specification.  This file is imported with the first step.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stree.kernels.numba_jit import compiled

__all__ = ["emit", "path_on_columns", "path_on_nodes"]

Array = np.ndarray[Any, Any]


def emit(tokens: Tensor, path: Tensor, path_lengths: Tensor, next_token: Tensor, texts: Any) -> Tensor:
    """Append the tokens after the path's nodes; see `stree.kernels.step.texts`."""
    report = tokens.new_zeros(len(path), path.shape[1] + 3)
    _emit(
        *_arrays(tokens, path, path_lengths, next_token, texts.stop, texts.limit),
        texts.tokens.numpy(), texts.lengths.numpy(), texts.is_finished.numpy(), texts.pending.numpy(), report.numpy(),
    )  # fmt: skip
    return report


def path_on_columns(path: Tensor, path_lengths: Tensor, numbers: Tensor | None, num_run: int) -> tuple[Tensor, Tensor]:
    """Map an accepted path to the columns that it commits; see `stree.kernels.step.bookkeeping`."""
    columns, count = torch.empty_like(path), path.new_empty(len(path))
    number = path.new_empty(0, 0, dtype=torch.long) if numbers is None else numbers
    _columns(*_arrays(path, path_lengths, number), num_run, columns.numpy(), count.numpy())
    return columns, count


def path_on_nodes(path: Tensor, path_lengths: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Mark the nodes of a path and the sequences that took part; see `stree.kernels.step.bookkeeping`."""
    is_on, is_live = torch.zeros(len(path), n), torch.empty(len(path), dtype=torch.bool)
    _nodes(*_arrays(path, path_lengths), is_on.numpy(), is_live.numpy())
    return is_on, is_live


def _arrays(*tensors: Tensor) -> list[Array]:
    """Return tensors as contiguous arrays, for which alone these functions are compiled."""
    return [tensor.contiguous().numpy() for tensor in tensors]


@compiled
def _emit(
    tokens: Array, path: Array, path_lengths: Array, next_token: Array, stop: Array, limit: Array,
    text: Array, lengths: Array, is_finished: Array, pending: Array, report: Array,
) -> None:  # fmt: skip
    """Do what `emit` does; the last five are written."""
    batch, m = path.shape
    for b in range(batch):
        length, before = np.int64(path_lengths[b]), lengths[b]
        count = min(length, limit[b] - before - 1)
        for place in range(m):
            follows = max(path[b, (place + 1) % m], 0)
            report[b, place] = next_token[b] if place == length - 1 else tokens[b, follows]
        for place in range(count):
            for token in stop[b]:
                if report[b, place] == token:
                    is_finished[b], count = True, min(count, place + 1)
        for place in range(count):
            text[b, before + 1 + place] = report[b, place]
        lengths[b] = before + count
        is_finished[b] |= lengths[b] + 1 >= limit[b]
        if length > 0:
            pending[b] = next_token[b]
        report[b, m], report[b, m + 1] = count, length


@compiled
def _columns(path: Array, path_lengths: Array, numbers: Array, num_run: int, columns: Array, count: Array) -> None:
    """Do what `path_on_columns` does; the last two are written."""
    for b in range(path.shape[0]):
        committed = 0
        for place in range(path.shape[1]):
            node = max(path[b, place - 1], 0) if place else -1
            if place and numbers.shape[1]:
                node = numbers[b, node]
            columns[b, place] = node + 1
            committed += (not place or 0 <= node < num_run - 1) and place < path_lengths[b]
        count[b] = committed


@compiled
def _nodes(path: Array, path_lengths: Array, is_on: Array, is_live: Array) -> None:
    """Do what `path_on_nodes` does; the last two are written, the first of them where it is not 0."""
    for b in range(path.shape[0]):
        for place in range(min(path_lengths[b], path.shape[1])):
            if 0 <= path[b, place] < is_on.shape[1]:
                is_on[b, path[b, place]] = 1
        is_live[b] = path_lengths[b] > 0
