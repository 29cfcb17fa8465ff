"""What layers share of a tree and of an accepted path, in one Triton launch each."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stree.kernels.tiles import padded
from stree.kernels.topology_kernels import path_kernel, tree_kernel

__all__ = ["PathIndices", "TreeIndices", "path_indices", "tree_indices"]

ROWS = 16  # nodes that a program owns
ENTRIES = 32  # of a path that are read together


@dataclass(frozen=True, slots=True, eq=False)
class TreeIndices:
    """Fields of a `stree.kernels.topology.Topology` of the same names."""

    hidden: Tensor
    path_sum: Tensor
    bits: Tensor
    conv_index: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class PathIndices:
    """Fields of a `stree.kernels.topology.AcceptedPath` of the same names."""

    batch: Tensor
    rows: Tensor
    lengths: Tensor
    beyond: Tensor
    conv_from: Tensor | None
    conv_rows: Tensor | None
    conv_keeps: Tensor | None


def tree_indices(parents: Tensor, mask: Tensor, conv_width: int | None) -> TreeIndices:
    """Derive indices of trees, without reading the device.

    Args:
        parents: int32[batch, n].
        mask: bool[batch, n, n], ancestors of each node, itself included; its last dimension is contiguous.
        conv_width: taps of the short convolutions, or None.
    """
    batch, n = parents.shape
    parents, mask = parents.contiguous(), mask if mask.stride(2) == 1 else mask.contiguous()
    words = -(-n // 32)
    made = TreeIndices(
        hidden=mask.new_empty(batch, n, n),
        path_sum=mask.new_empty(batch, n, n, dtype=torch.float64),
        bits=mask.new_empty(batch, n, words, dtype=torch.int32),
        conv_index=None if conv_width is None else mask.new_empty(batch, n, conv_width, dtype=torch.int64),
    )
    with torch.cuda.device_of(mask):  # Triton launches on the current device, wherever the tensors are
        tree_kernel[(-(-n // ROWS), batch)](
            parents, mask, made.hidden, made.path_sum, made.bits, made.conv_index, n, words,
            parents.stride(0), mask.stride(0), mask.stride(1), WIDTH=conv_width or 0, ROWS=ROWS, num_warps=1,
        )  # fmt: skip
    return made


def path_indices(path: Tensor, path_lengths: Tensor, conv_width: int | None) -> PathIndices:
    """Derive indices of accepted paths, without reading the device.

    Args:
        path: int[batch, m], m at least 1.
        path_lengths: int[batch].
        conv_width: taps of the short convolutions; None or 1 for no window.
    """
    batch, m = path.shape
    history = 0 if conv_width is None else conv_width - 1

    def column(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor | None:
        return path.new_empty(shape, dtype=dtype) if history else None

    made = PathIndices(
        batch=path.new_empty(batch, 1, dtype=torch.int64),
        rows=path.new_empty(batch, m, dtype=torch.int64),
        lengths=path.new_empty(batch, dtype=torch.int64),
        beyond=path.new_empty(batch, m, dtype=torch.bool),
        conv_from=column(batch, history),
        conv_rows=column(batch, history),
        conv_keeps=column(batch, 1, history, dtype=torch.bool),
    )
    with torch.cuda.device_of(path):
        path_kernel[(batch,)](
            path, path_lengths, made.batch, made.rows, made.lengths, made.beyond, made.conv_from, made.conv_rows,
            made.conv_keeps, m, path.stride(0), path.stride(1), path_lengths.stride(0),
            HISTORY=history, COLUMNS=padded(history, 1), BLOCK=ENTRIES, num_warps=1,
        )  # fmt: skip
    return made
