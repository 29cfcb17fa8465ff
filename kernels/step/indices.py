"""Indices of a tree and of an accepted path that all layers share, in one Triton launch each."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from stree.kernels.jit import jit
from stree.kernels.tiles import padded

__all__ = ["PathIndices", "TreeIndices", "path_indices", "tree_indices"]

ROWS = 16  # nodes that a program owns
ENTRIES = 32  # of a path that are read together


@jit(fuses=False, do_not_specialize=["n", "words", "stride_parents_b", "stride_mask_b", "stride_mask_n"])
def tree_kernel(
    parents_ptr, mask_ptr, hidden_ptr, path_sum_ptr, bits_ptr, index_ptr, n, words,
    stride_parents_b, stride_mask_b, stride_mask_n,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Turn some rows of a mask into words, its complement and a matrix, and list rows of taps; grid (blocks, batch)."""
    batch = tl.program_id(1).to(tl.int64)
    node = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    asked = node < n
    row = batch * n + node
    lane = tl.arange(0, 32)
    mask_ptr += batch * stride_mask_b
    for word in range(words):
        column = word * 32 + lane
        inside = asked[:, None] & (column < n)[None, :]
        seen = tl.load(mask_ptr + node[:, None] * stride_mask_n + column[None, :], inside, 0).to(tl.int32)
        place = row[:, None] * n + column[None, :]
        tl.store(hidden_ptr + place, seen == 0, inside)
        tl.store(path_sum_ptr + place, seen.to(tl.float64), inside)
        tl.store(bits_ptr + row * words + word, tl.sum(seen << lane[None, :], 1), asked)
    if WIDTH > 0:
        above = node
        for tap in tl.static_range(WIDTH):
            tl.store(index_ptr + row * WIDTH + (WIDTH - 1 - tap), (above + (WIDTH - 1)).to(tl.int64), asked)
            inside = asked & (above >= 0)
            parent = tl.load(parents_ptr + batch * stride_parents_b + above, inside, 0)
            above = tl.where(above >= 0, parent, above - 1)  # above the root: the rows of the window, newest first


@jit(fuses=False, do_not_specialize=["m", "stride_path_b", "stride_path_m", "stride_lengths"])
def path_kernel(
    path_ptr, given_ptr, batch_ptr, rows_ptr, lengths_ptr, beyond_ptr, from_ptr, entering_ptr, keeps_ptr, m,
    stride_path_b, stride_path_m, stride_lengths,
    HISTORY: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Widen a path and its length, mask what lies past it, and list what enters a window; grid (batch,)."""
    batch = tl.program_id(0).to(tl.int64)
    length = tl.load(given_ptr + batch * stride_lengths).to(tl.int64)
    tl.store(batch_ptr + batch, batch)
    tl.store(lengths_ptr + batch, length)
    path_ptr += batch * stride_path_b
    for start in range(0, m, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < m
        node = tl.load(path_ptr + entry * stride_path_m, inside & (entry < length), 0).to(tl.int64)
        tl.store(rows_ptr + batch * m + entry, node, inside)
        tl.store(beyond_ptr + batch * m + entry, entry >= length, inside)
    if HISTORY > 0:
        # Column t of the new window is row length + t of the sequence [old window, accepted nodes].
        column = tl.arange(0, COLUMNS)
        wanted = column < HISTORY
        source = length + column
        entry = tl.minimum(tl.maximum(source - HISTORY, 0), m - 1)
        node = tl.load(path_ptr + entry * stride_path_m, wanted & (entry < length), 0).to(tl.int64)
        place = batch * HISTORY + column
        tl.store(from_ptr + place, tl.minimum(source, HISTORY - 1), wanted)
        tl.store(entering_ptr + place, node, wanted)
        tl.store(keeps_ptr + place, source < HISTORY, wanted)


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
