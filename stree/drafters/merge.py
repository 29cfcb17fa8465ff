"""Merging two trees: retrieved nodes are appended to a model's tree, or the best nodes of both are kept."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.drafters.base import Draft
from stree.growth import Proposal
from stree.tree import TokenTree
from stree.verify import DELTA, DraftProbs

__all__ = [
    "Listed",
    "append_best",
    "append_row",
    "has_share",
    "keep_best",
    "keep_first",
    "on_own_nodes",
    "with_delta",
]


class Listed(NamedTuple):
    """One row of a tree on the host: tokens, parents and path values of its nodes."""

    tokens: list[int]
    parents: list[int]
    values: list[float]

    @classmethod
    def of(cls, tree: TokenTree, values: Tensor, row: int) -> Listed:
        """List a row of a tree with float[batch, n] values."""
        return cls(tree.tokens[row].tolist(), tree.parents[row].tolist(), values[row].tolist())


def keep_first(tree: TokenTree, nodes: Tensor) -> TokenTree:
    """Make padding of all but the first int64[batch] nodes of each tree; its root stays.

    That keeps trees that were drawn lossless: whether a node stays depends on those before it alone.
    """
    if tree.tokens.shape[1] == 1:
        return tree
    is_node = ~tree.is_padding
    is_kept = is_node & (is_node.cumsum(1) <= nodes.clamp(min=1)[:, None])
    return TokenTree.unchecked(tree.tokens * is_kept, torch.where(is_kept, tree.parents, -1))


def keep_best(tree: TokenTree, values: Tensor, nodes: Tensor | int) -> TokenTree:
    """Make padding of all but so many nodes of the greatest value, of all rows or int64[batch]; the root stays.

    Values never rise along a path.
    """
    order = values.sort(dim=1, descending=True, stable=True).indices  # padding has value 0
    most = nodes if isinstance(nodes, int) else nodes.clamp(min=1)[:, None]
    is_best = (torch.arange(order.shape[1], device=order.device) < most).expand_as(order)
    is_kept = torch.zeros_like(tree.is_padding).scatter_(1, order, is_best)
    return TokenTree.unchecked(tree.tokens * is_kept, torch.where(is_kept, tree.parents, -1))


def append_best(draft: Draft, retrieved: Draft, is_kept: Tensor, most: Tensor | int) -> tuple[TokenTree, Tensor]:
    """Append retrieved nodes to a model's tree, best first.

    Each is appended below the longest prefix that the model's tree shares with its path.

    Args:
        draft: the model's, with values.
        retrieved: the other, with values.
        is_kept: bool[batch, retrieved nodes], those to append.
        most: most nodes appended, for all rows or int64[batch].

    Returns:
        The united tree and the values of its nodes, float[batch, n].
    """
    assert draft.values is not None and retrieved.values is not None, "propose has checked"
    tree, batch = draft.tree, len(draft.values)
    limits = [most] * batch if isinstance(most, int) else most.tolist()
    rows = []
    for row, (kept, limit) in enumerate(zip(is_kept.tolist(), limits, strict=True)):
        own = Listed.of(tree, draft.values, row)
        other = Listed.of(retrieved.tree, retrieved.values, row)
        rows.append(append_row(own, other, kept, most=limit))
    size = max(len(row.tokens) for row in rows)
    device = tree.tokens.device
    tokens, parents, values = (
        torch.tensor([part + [empty] * (size - len(part)) for part in parts], dtype=dtype, device=device)
        for parts, empty, dtype in zip(
            zip(*rows, strict=True), (0, -1, 0.0), (torch.long, torch.int32, draft.values.dtype), strict=True
        )
    )
    return TokenTree.unchecked(tokens, parents), values


def append_row(own: Listed, other: Listed, is_kept: list[bool], *, most: int) -> Listed:
    """Unite one row of two trees; return all nodes and their values in the united tree.

    A child's probability is the retrieved one, plus the model's share of what the retrieved children of the same node
    leave (an escape, as in PPM).
    """
    tokens, parents = list(own.tokens), list(own.parents)
    children = {(parent, tokens[node]): node for node, parent in enumerate(parents) if parent >= 0}
    united = {0: 0}  # node of the united tree for each retrieved one
    share = [0.0] * len(tokens)  # of each node, its retrieved probability given its parent
    covered = [0.0] * len(tokens)  # the sum of that over a node's children
    for node in range(1, len(other.tokens)):
        above = united.get(other.parents[node], -1)
        if not is_kept[node] or above < 0:
            continue
        key = (above, other.tokens[node])
        if key not in children:
            if len(tokens) - len(own.tokens) >= most:
                continue
            children[key] = len(tokens)
            tokens.append(other.tokens[node])
            parents.append(above)
            share.append(0.0)
            covered.append(0.0)
        united[node] = child = children[key]
        share[child] = other.values[node] / max(other.values[other.parents[node]], 1e-30)
        covered[above] += share[child]
    values = [1.0] * len(tokens)
    for node in range(1, len(tokens)):
        above = parents[node]
        if above < 0:
            values[node] = 0.0
            continue
        drafted = own.values[node] / max(own.values[above], 1e-30) if node < len(own.tokens) else 0.0
        values[node] = values[above] * min(share[node] + max(1 - covered[above], 0.0) * drafted, 1.0)
    return Listed(tokens, parents, values)


def with_delta(draft: Draft, more: int, order: Tensor) -> tuple[DraftProbs | None, Tensor]:
    """Add ``more`` DELTA nodes to a draft, and put all nodes into int64[batch, n] ``order``.

    Returns:
        The distributions that nodes were drawn from, if any were, and the columns of all nodes, -1 for those added.
    """
    dists, own = draft.probs, draft.column
    if own is None:
        own = torch.arange(draft.tree.tokens.shape[1], device=order.device).expand(len(order), -1)
    column = F.pad(own, (0, more), value=-1).gather(1, order)
    if dists is None:
        return None, column
    batch = len(dists.row)
    row = torch.cat([dists.row, dists.row.new_zeros(batch, more)], 1).gather(1, order)
    kind = torch.cat([dists.kind, dists.kind.new_full((batch, more), DELTA)], 1).gather(1, order)
    most = None if dists.max_children is None else dists.max_children + more
    return DraftProbs(dists.probs, row, kind, most), column


def on_own_nodes(ratios: Tensor, column: Tensor, proposal: Proposal, size: int) -> Tensor:
    """Move float[batch, n] values of a united tree's nodes to the own nodes; 0 where a node was dropped.

    Args:
        ratios: of the united tree.
        column: int64[batch, n], of its nodes.
        proposal: the own tree.
        size: columns of it while it grew.
    """
    # The nodes of others all go to one place behind the last column.
    on_columns = ratios.new_zeros(len(ratios), size + 1).scatter(1, torch.where(column < 0, size, column), ratios)
    own = proposal.column
    return on_columns[:, : proposal.tree.tokens.shape[1]] if own is None else on_columns.gather(1, own)


def has_share(tree: TokenTree, probs: Tensor, least: float) -> Tensor:
    """Mask of the nodes below a first token with at least probability ``least``: bool[batch, n].

    Args:
        tree: retrieved.
        probs: float[batch, vocab], after the root.
        least: RASD's pruning threshold.
    """
    unlikely = (tree.depths == 1) & (probs.gather(1, tree.tokens) < least)
    return ~(tree.ancestor_mask & unlikely[:, None]).any(-1)
