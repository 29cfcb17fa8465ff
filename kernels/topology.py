"""The shape of a batch of token trees, computed once a step and read by every operation of every layer.

It knows indices only: no tokens, no model, no layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Topology", "ancestor_mask"]


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


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """Parents of a batch of trees and what the operations need of them.

    Attributes:
        parents: int32[batch, n], topological order, -1 for the root and for padding nodes.
        mask: bool[batch, n, n], ancestors of each node, itself included.
        depths: int32[batch, n], edges from the root; 0 for padding.
    """

    parents: Tensor
    mask: Tensor
    depths: Tensor

    @classmethod
    def of(cls, parents: Tensor) -> Topology:
        """Derive mask and depths from int32[batch, n] parents, without reading the device."""
        mask = ancestor_mask(parents)
        return cls(parents, mask, mask.sum(-1, dtype=torch.int32) - 1)
