"""The accepted path of a step on columns and nodes, and the path of a deferred commit.

On the CPU these are torch's operators, where Triton launches they are one launch each; the values are the same.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.kernels.dispatch import uses_triton
from stree.kernels.tiles import padded

__all__ = ["DeferredPath", "copy_rows", "defer_path", "path_on_columns", "path_on_nodes"]

ROW_COLUMNS = 256  # of a row that a program copies
MOST_SOURCES = 3  # whose rows are copied in one launch


@dataclass(frozen=True, slots=True, eq=False)
class DeferredPath:
    """Accepted paths whose commit is deferred to the next step; a step writes to both.

    Attributes:
        path: int64[batch, entries], nodes of the last tree; 0 past the length.
        lengths: int32[batch].
    """

    path: Tensor
    lengths: Tensor


def path_on_columns(path: Tensor, path_lengths: Tensor, numbers: Tensor | None, num_run: int) -> tuple[Tensor, Tensor]:
    """Map an accepted path to the columns of a draft model's tree that it commits.

    The tree begins with the last token before the root, which is committed in place of the path's last node; the node
    of number i is column i + 1.  What follows a node that was not run is not committed either.

    Args:
        path: int32[batch, m], accepted nodes from the root down; entries past the length may hold anything below n.
        path_lengths: int32[batch], 0 for a sequence that takes no part.
        numbers: int64[batch, n], of each node while the tree grew, -1 where it was not in it; None: 0, 1, 2, ...
        num_run: columns that were run.

    Returns:
        int32[batch, m] columns and int32[batch] how many of them are committed.
    """
    batch, m = path.shape
    if uses_triton(path):
        from stree.kernels.step.kernel import columns_kernel

        path, numbers = _rows_of(path), None if numbers is None else _rows_of(numbers)
        columns, count = path.new_empty(batch, m), path.new_empty(batch)
        with torch.cuda.device_of(path):
            columns_kernel[(batch,)](
                path, path_lengths.contiguous(), numbers, columns, count, m, num_run, path.stride(0),
                0 if numbers is None else numbers.stride(0), PLACES=padded(m), num_warps=1,
            )  # fmt: skip
        return columns, count
    nodes = path[:, :-1].clamp(min=0)
    if numbers is not None:
        nodes = numbers.gather(1, nodes.long()).to(torch.int32)
    columns = F.pad(nodes + 1, (1, 0))
    is_run = F.pad((nodes >= 0) & (nodes + 1 < num_run), (1, 0), value=True)
    count = (is_run & (torch.arange(m, device=path.device) < path_lengths[:, None])).sum(1, dtype=torch.int32)
    return columns, count


def path_on_nodes(path: Tensor, path_lengths: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Mark the nodes of a tree that are on an accepted path, and the sequences that took part.

    Args:
        path: int32[batch, m], accepted nodes from the root down; entries past the length may hold anything.
        path_lengths: int32[batch], 0 for a sequence that takes no part.
        n: nodes.

    Returns:
        float32[batch, n] of 1 and 0, and bool[batch].
    """
    batch, m = path.shape
    if uses_triton(path):
        from stree.kernels.step.kernel import nodes_kernel

        path = _rows_of(path)
        is_on = torch.empty(batch, n, dtype=torch.float32, device=path.device)
        is_live = torch.empty(batch, dtype=torch.bool, device=path.device)
        with torch.cuda.device_of(path):
            nodes_kernel[(batch,)](
                path, path_lengths.contiguous(), is_on, is_live, m, n, path.stride(0),
                NODES=padded(n), PLACES=padded(m), num_warps=1,
            )  # fmt: skip
        return is_on, is_live
    node, place = (torch.arange(size, device=path.device) for size in (n, m))
    is_there = (path[:, None] == node[:, None]) & (place < path_lengths[:, None])[:, None]
    return is_there.any(-1).float(), path_lengths > 0


def defer_path(path: Tensor, path_lengths: Tensor, deferred: DeferredPath, lengths: Tensor) -> None:
    """Store paths for a deferred commit, and count their tokens as committed.

    Args:
        path: int32[batch, m], nodes from the root down; no more than there are entries.
        path_lengths: int32[batch].
        deferred: written to.
        lengths: int32[batch], committed tokens; advanced.
    """
    entries = deferred.path.shape[1]
    if uses_triton(path):
        from stree.kernels.step.kernel import defer_kernel

        path = _rows_of(path)
        with torch.cuda.device_of(path):
            defer_kernel[(len(path),)](
                path, path_lengths.contiguous(), deferred.path, deferred.lengths, lengths, path.shape[1],
                path.stride(0), ENTRIES=entries, num_warps=1,
            )  # fmt: skip
        return
    deferred.lengths.copy_(path_lengths)
    beyond = torch.arange(entries, device=path.device) >= path_lengths[:, None]
    deferred.path.copy_(F.pad(path, (0, entries - path.shape[1])).masked_fill_(beyond, 0))
    lengths.add_(path_lengths)


def copy_rows(nodes: Tensor, begins: Tensor, sources: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Copy the rows of some nodes of every layer; on a GPU up to three tensors' in a launch.

    Args:
        nodes: int64[batch, entries].
        begins: int64[layers, batch, ..., 1], where a tree's nodes begin among the rows of a flat source.
        sources: tensors [layers, batch, ..., n, c], contiguous; c may be several dimensions.
        rows: [layers, batch, ..., entries, c] of each; written.
    """
    dim = begins.dim() - 1
    if uses_triton(nodes):
        for first in range(0, len(sources), MOST_SOURCES):
            one = slice(first, first + MOST_SOURCES)
            _copy_in_one(nodes, begins, sources[one], rows[one])
        return
    nodes = nodes.unflatten(0, (1, -1, *(1,) * (dim - 2)))
    index = (nodes + begins).flatten()
    for source, taken in zip(sources, rows, strict=True):
        torch.index_select(source.flatten(0, dim), 0, index, out=taken.flatten(0, dim))


def _copy_in_one(nodes: Tensor, begins: Tensor, sources: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Do the same in one launch."""
    from stree.kernels.step.kernel import rows_kernel

    dim = begins.dim() - 1
    widths = [source[(0,) * (dim + 1)].numel() for source in sources]
    trees, inner = begins.numel(), begins[0, 0].numel()
    none = [None] * (MOST_SOURCES - len(sources))
    with torch.cuda.device_of(nodes):
        rows_kernel[(trees, -(-max(widths) // ROW_COLUMNS))](
            nodes, *sources, *none, *rows, *none, *widths, *none, len(nodes), inner, sources[0].shape[dim],
            ENTRIES=nodes.shape[1], COLUMNS=ROW_COLUMNS, num_warps=4,
        )  # fmt: skip


def _rows_of(tensor: Tensor) -> Tensor:
    """Return a matrix whose rows are contiguous."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()
