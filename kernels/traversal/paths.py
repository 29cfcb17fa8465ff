"""Index arithmetic on trees that the acceptance rules share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stree.kernels.dispatch import host_bound
from stree.kernels.traversal.operands import Tree, Walked

__all__ = ["Siblings", "deepest"]


@dataclass(frozen=True, slots=True, eq=False)
class Siblings:
    """Draw order among the children of each node.

    Attributes:
        parents: int64[batch, n], 0 for the root and padding.
        is_drafted: bool[batch, n], neither root nor padding.
        is_earlier: bool[batch, n, n], [node, earlier sibling].
        rank: int64[batch, n], number of earlier siblings.
        most: largest number of children of a node, or an upper bound of it.
    """

    parents: Tensor
    is_drafted: Tensor
    is_earlier: Tensor
    rank: Tensor
    most: int

    @classmethod
    def of(cls, tree: Tree, max_children: int | None = None) -> Siblings:
        """Compare all nodes of a tree; on a device ``most`` is ``max_children`` (or n - 1), to avoid synchronising."""
        is_drafted = tree.parents >= 0
        index = torch.arange(tree.parents.shape[1], device=tree.parents.device)
        is_earlier = (tree.parents[:, :, None] == tree.parents[:, None]) & (index[:, None] > index)
        is_earlier &= is_drafted[:, :, None]
        rank = is_earlier.sum(-1)
        most = 1 + host_bound(rank, (len(index) - 1 if max_children is None else max_children) - 1)
        return cls(tree.parents.clamp(min=0).long(), is_drafted, is_earlier, rank, most)

    def first_of(self, is_chosen: Tensor) -> Tensor:
        """Keep of the chosen nodes, bool[batch, n], the first one of each group of siblings."""
        return is_chosen & ~(self.is_earlier & is_chosen[:, None, :]).any(-1)


def deepest(tree: Tree, is_accepted: Tensor, max_depth: int) -> Walked:
    """Find the deepest node that is accepted with all its ancestors, and its path.

    Args:
        tree: n nodes.
        is_accepted: bool[batch, n]; the root counts as accepted.
        max_depth: upper bound of the depths.
    """
    n = tree.tokens.shape[1]
    index = torch.arange(n, device=tree.tokens.device)
    is_rejected = ~is_accepted & (index > 0)
    is_reached = ~(tree.ancestor_mask & is_rejected[:, None, :]).any(-1)
    # Of equally deep nodes the first: the root before padding, an earlier sibling before a later one of the same token.
    score = torch.where(is_reached, tree.depths.long() * n + (n - 1 - index), -1)
    leaf = score.argmax(1)
    on_path = tree.ancestor_mask.gather(1, leaf.view(-1, 1, 1).expand(-1, 1, n)).squeeze(1)
    path = torch.where(on_path, index, n).sort(1).values[:, : min(n, max_depth + 1)]
    return Walked(torch.where(path < n, path, -1).to(torch.int32), on_path.sum(1, dtype=torch.int32), leaf)
