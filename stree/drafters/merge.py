"""Two trees become one: what was retrieved is appended to a model's tree, or the best nodes of both are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from stree.drafters.base import Draft
from stree.drafters.retrieval_calibration import Listed
from stree.tree import TokenTree
from stree.verify import DELTA, DraftProbs

__all__ = ["graft", "graft_row", "keep_best", "with_delta"]


def keep_best(tree: TokenTree, values: Tensor, budget: int) -> TokenTree:
    """Make padding of all but the ``budget`` nodes of the greatest value, which never rises along a path."""
    order = values.sort(dim=1, descending=True, stable=True).indices  # padding has none
    is_kept = torch.zeros_like(tree.is_padding).scatter_(1, order[:, :budget], True)
    return TokenTree.unchecked(tree.tokens * is_kept, torch.where(is_kept, tree.parents, -1))


def graft(
    draft: Draft, retrieved: Draft, is_worth: Tensor, room: Tensor | int, *, shares: bool
) -> tuple[TokenTree, Tensor]:
    """Append retrieved nodes, best first and as many as there is room for, to a model's tree.

    They stand below the longest prefixes that the model's tree shares with them.  Unless it ``shares``, all of them are
    appended, as its nodes are to be tested after theirs.

    Returns the united tree and the values of its nodes, float[batch, n].
    """
    assert draft.values is not None and retrieved.values is not None, "propose looked"
    tree, batch = draft.tree, len(draft.values)
    rooms = [room] * batch if isinstance(room, int) else room.tolist()
    rows = []
    for row, (worth, left) in enumerate(zip(is_worth.tolist(), rooms, strict=True)):
        own, other = (Listed.of(one.tree, one.values, row) for one in (draft, retrieved) if one.values is not None)
        rows.append(graft_row(own, other, worth, room=left, shares=shares))
    size = max(len(row.tokens) for row in rows)
    device = tree.tokens.device
    tokens, parents, values = (
        torch.tensor([part + [empty] * (size - len(part)) for part in parts], dtype=dtype, device=device)
        for parts, empty, dtype in zip(
            zip(*rows, strict=True), (0, -1, 0.0), (torch.long, torch.int32, draft.values.dtype), strict=True
        )
    )
    return TokenTree.unchecked(tokens, parents), values


def graft_row(own: Listed, other: Listed, is_worth: list[bool], *, room: int, shares: bool) -> Listed:
    """Unite one row; give all nodes of the united tree, and what they are worth together.

    What was retrieved is believed first, and the model as far as that leaves something unsaid (an escape, as in PPM):
    a child's probability is the retrieved one, and of what the retrieved children leave the model's share.
    """
    tokens, parents = list(own.tokens), list(own.parents)
    children = {(parent, tokens[node]): node for node, parent in enumerate(parents) if parent >= 0} if shares else {}
    place = {0: 0}  # node of the united tree for each retrieved one
    share = [0.0] * len(tokens)  # of each node, what retrieval gives it below its parent
    said = [0.0] * len(tokens)  # the sum of that over a node's children
    for node in range(1, len(other.tokens)):
        above = place.get(other.parents[node], -1)
        if not is_worth[node] or above < 0:
            continue
        key = (above, other.tokens[node])
        if key not in children:
            if len(tokens) - len(own.tokens) >= room:
                continue
            children[key] = len(tokens)
            tokens.append(other.tokens[node])
            parents.append(above)
            share.append(0.0)
            said.append(0.0)
        place[node] = found = children[key]
        share[found] = other.values[node] / max(other.values[other.parents[node]], 1e-30)
        said[above] += share[found]
    values = [1.0] * len(tokens)
    for node in range(1, len(tokens)):
        above = parents[node]
        if above < 0:
            values[node] = 0.0
            continue
        drafted = own.values[node] / max(own.values[above], 1e-30) if node < len(own.tokens) else 0.0
        values[node] = values[above] * min(share[node] + max(1 - said[above], 0.0) * drafted, 1.0)
    return Listed(tokens, parents, values)


def with_delta(dists: DraftProbs | None, more: int, order: Tensor) -> DraftProbs | None:
    """Widen distributions to ``more`` nodes that are DELTA, and bring all nodes into another order."""
    if dists is None:
        return None
    batch = len(dists.row)
    row = torch.cat([dists.row, dists.row.new_zeros(batch, more)], 1).gather(1, order)
    kind = torch.cat([dists.kind, dists.kind.new_full((batch, more), DELTA)], 1).gather(1, order)
    most = None if dists.max_children is None else dists.max_children + more
    return DraftProbs(dists.probs, row, kind, most)
