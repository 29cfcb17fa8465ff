"""Index arithmetic on trees that every rule of acceptance shares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stree.kernels.dispatch import host_can_read
from stree.tree import TokenTree

__all__ = ["Siblings", "deepest"]


@dataclass(frozen=True, slots=True, eq=False)
class Siblings:
    """Who stands before whom among the children of one node.

    Attributes:
        parents: int64[batch, n], 0 for the root and padding.
        is_drafted: bool[batch, n], neither root nor padding.
        is_elder: bool[batch, n, n], [node, elder sibling].
        rank: int64[batch, n], number of elder siblings.
        most: children of the node that has most, or a bound of them.
    """

    parents: Tensor
    is_drafted: Tensor
    is_elder: Tensor
    rank: Tensor
    most: int

    @classmethod
    def of(cls, tree: TokenTree, max_children: int | None = None) -> Siblings:
        """Compare all nodes of a tree with each other; where reading would wait, the bound stands for the most."""
        is_drafted = tree.parents >= 0
        index = torch.arange(tree.parents.shape[1], device=tree.parents.device)
        is_elder = (tree.parents[:, :, None] == tree.parents[:, None]) & (index[:, None] > index)
        is_elder &= is_drafted[:, :, None]
        rank = is_elder.sum(-1)
        if host_can_read(rank):
            most = int((rank + is_drafted).max())
        else:
            most = len(index) - 1 if max_children is None else max_children
        return cls(tree.parents.clamp(min=0).long(), is_drafted, is_elder, rank, most)

    def eldest_of(self, is_kept: Tensor) -> Tensor:
        """Keep of bool[batch, n] nodes those that have no elder sibling among them."""
        return is_kept & ~(self.is_elder & is_kept[:, None, :]).any(-1)


def deepest(tree: TokenTree, is_kept: Tensor, max_depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the deepest node whose whole path below the root is kept: its index, path and path length."""
    n = tree.tokens.shape[1]
    index = torch.arange(n, device=tree.tokens.device)
    blocked = ~is_kept & (index > 0)
    reached = ~(tree.ancestor_mask & blocked[:, None, :]).any(-1)
    # Of equally deep nodes the first is taken: the root before padding, an elder before a sibling of the same token.
    score = torch.where(reached, tree.depths.long() * n + (n - 1 - index), -1)
    leaf = score.argmax(1)
    on_path = tree.ancestor_mask.gather(1, leaf.view(-1, 1, 1).expand(-1, 1, n)).squeeze(1)
    width = min(n, max_depth + 1)
    path = torch.where(on_path, index, n).sort(1).values[:, :width]
    return leaf, torch.where(path < n, path, -1).to(torch.int32), on_path.sum(1, dtype=torch.int32)
