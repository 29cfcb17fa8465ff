"""A depth-first walk of token trees that keeps few states: what the Triton scan of a diagonal state reads.

A walk that visits the children of a node by growing size of their subtrees needs the state of a node again only while
it is in a child that is not the last, the largest.  Such a child holds less than half of the nodes below its parent,
so at most log2 n states are kept at once, whatever the tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["NODE_BITS", "SLOT_BITS", "depth_first_walk", "walk_slots"]

NODE_BITS, SLOT_BITS = 16, 8


def walk_slots(n: int) -> int:
    """Return the most states that a walk of n nodes keeps at once.

    A node's state is kept if it has two children, hence three nodes with itself; each smaller sibling on the way
    doubles the count: at least 4 * 2^k - 1 nodes for the (k + 1)-th state kept.  The state above the root is one too.
    """
    return max(1, ((n + 1) // 4).bit_length())


def depth_first_walk(parents: Tensor, mask: Tensor) -> Tensor:
    """List the nodes of each tree in the order of the walk, with the slots that their states are kept in.

    An entry is node + (take << 16) + (keep << 24).  take 0: the parent is the node of the entry before (the committed
    state for the first entry); take k: the parent's state is in slot k - 1.  keep k: the node's own state is kept
    in slot k - 1; 0: it need not.  Slot 0 holds the committed state at first, for nodes without a parent.

    Args:
        parents: int32[batch, n], -1 for the root and for padding.
        mask: bool[batch, n, n], ancestors of each node, itself included.

    Returns:
        int32[batch, n].
    """
    n = parents.shape[1]
    index = torch.arange(n, dtype=torch.int32, device=parents.device)
    size = mask.sum(1, dtype=torch.int32)
    rank = size * n + index
    sibling = parents[:, :, None] == parents[:, None]
    before = sibling & (rank[:, None] < rank[:, :, None])
    skipped = torch.sum(before * size[:, None], 2, dtype=torch.int32)  # nodes of the siblings visited earlier
    is_last = ~(sibling & (rank[:, None] > rank[:, :, None])).any(2)
    branches = (parents[:, None] == index[:, None]).sum(2) > 1
    # Sums along the path from the root; small integers, exact in float32.
    place, above = (mask.float() @ torch.stack((skipped + 1, ~is_last), 2).float()).int().unbind(2)
    take = torch.where(skipped > 0, above - (~is_last).int() + 1, 0)
    keep = torch.where(branches, above + 1, 0)
    entry = index + (take << NODE_BITS) + (keep << (NODE_BITS + SLOT_BITS))
    return torch.empty_like(entry).scatter_(1, place.long() - 1, entry)
