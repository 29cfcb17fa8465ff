"""Ancestors and rows of token trees from their parents, in torch; `stree.kernels.topology` makes them once a step.

Everything here has fixed shapes and never reads the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ancestor_bits", "ancestor_mask", "conv_rows", "jump_rows", "prune", "take_rows"]


def ancestor_mask(parents: Tensor) -> Tensor:
    """Mark, for every node, the nodes on its path from the root, itself included.

    The parent relation is squared until it is closed, so the work is log2(n) matrix products and no loop over
    nodes.  A padding node (parent -1 at i > 0) has its own row only.

    Args:
        parents: int[batch, n], parents[:, i] < i, -1 for the root and for padding.

    Returns:
        bool[batch, n, n]; [b, i, j] is True where j is an ancestor of i or i itself.
    """
    n = parents.shape[1]
    index = torch.arange(n, device=parents.device)
    reach = (index == parents[..., None]) | (index == index[:, None])
    span = 1  # edges already closed over
    while span < n - 1:
        closed = reach.float()
        reach = torch.bmm(closed, closed) > 0
        span *= 2
    return reach


def ancestor_bits(mask: Tensor) -> Tensor:
    """Pack bool[batch, n, n] ancestors into int32[batch, n, ceil(n / 32)]: bit j % 32 of word j // 32 is column j."""
    n = mask.shape[2]
    words = -(-n // 32)
    columns = F.pad(mask, (0, 32 * words - n)).unflatten(2, (words, 32)).int()
    return torch.sum(columns << torch.arange(32, dtype=torch.int32, device=mask.device), -1, dtype=torch.int32)


def conv_rows(parents: Tensor, width: int) -> Tensor:
    """Find the rows that a causal convolution of this width reads at every node: its last ancestors and itself.

    Rows count through the concatenation [stored window (width - 1 rows), nodes (n rows)], oldest first, so a path
    that is shorter than the filter continues into the window.

    Args:
        parents: int[batch, n].
        width: taps of the filter.

    Returns:
        int64[batch, n, width], oldest tap first, the order of conv1d's weights.
    """
    batch, n = parents.shape
    history = width - 1
    nodes = (parents + history).long()  # the root's -1 becomes history - 1, the newest row of the window
    window = torch.arange(-1, history - 1, device=parents.device).expand(batch, history)
    before = torch.cat((window, nodes), 1)  # row that comes before each row
    row = torch.arange(history, history + n, device=parents.device).expand(batch, n)
    taps = [row]
    for _ in range(history):
        row = before.gather(1, row)
        taps.append(row)
    return torch.stack(taps[::-1], -1)


def jump_rows(parents: Tensor) -> tuple[Tensor, ...]:
    """List each node's ancestor 1, 2, 4, ... edges up; row n is everything above the root.

    Args:
        parents: int[batch, n].

    Returns:
        ceil(log2(n)) tensors int64[batch, n + 1]; together they span the deepest tree of n nodes.
    """
    batch, n = parents.shape
    above = torch.full((batch, 1), n, dtype=parents.dtype, device=parents.device)
    jump = torch.cat((torch.where(parents < 0, n, parents), above), 1).long()
    jumps: list[Tensor] = []
    while 2 ** len(jumps) < n:
        jumps.append(jump)
        jump = jump.gather(1, jump)
    return tuple(jumps)


def prune(kept: Tensor, parents: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the parents and the ancestors of kept nodes, whose parents are kept and come first.

    Args:
        kept: int64[batch, count] nodes.
        parents: int32[batch, n].
        mask: bool[batch, n, n].

    Returns:
        int32[batch, count] and bool[batch, count, count], numbered as in ``kept``.
    """
    number = torch.full(parents.shape, -1, device=kept.device)
    number.scatter_(1, kept, torch.arange(kept.shape[1], device=kept.device).expand_as(kept))
    above = parents.gather(1, kept)
    above = torch.where(above >= 0, number.gather(1, above.clamp(min=0).long()), -1).to(torch.int32)
    return above, mask.take_along_dim(kept[..., None], 1).take_along_dim(kept[:, None], 2)


def take_rows(nodes: Tensor, rows: Tensor, batch: Tensor | None = None) -> Tensor:
    """Gather rows int64[batch, m] of nodes [batch, n, ...] into [batch, m, ...], whole rows at a time.

    Several times faster on the CPU than `gather` with an expanded index.  `batch` is int64[batch, 1], 0, 1, 2, ...
    """
    size, n = nodes.shape[:2]
    if size > 1:
        if batch is None:
            batch = torch.arange(size, device=rows.device)[:, None]
        rows = torch.add(rows, batch, alpha=n)
    taken = nodes.flatten(0, 1).index_select(0, rows.flatten())
    return taken.view(size, -1, *nodes.shape[2:])
