"""Choice and rating of slots, the columns of a growing tree, and what acceptance models learn, in plain torch.

The specification of the operations of `stree.kernels.tree_growth.api` of the same names, which documents them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stree.kernels.step.texts import Seen
from stree.kernels.tree_growth.operands import (
    Appended,
    Children,
    Chosen,
    Columns,
    Kept,
    Layout,
    Level,
    Memory,
    Proposed,
    RankFit,
    Ratings,
    Table,
    Terms,
    Verdicts,
    Words,
)
from stree.kernels.tree_indices import prune

__all__ = [
    "append", "begin", "choose", "cut", "learn", "learn_level", "place", "rate_by_rank", "rate_by_table", "remember",
    "select", "spent_before",
]  # fmt: skip

MOST_WEIGHT = 12.0  # of a text's level: older evidence is forgotten
LEAST_PROB = 1e-9  # of a child, before its logarithm
LEAST_BLUNT = 0.02  # of 1 - the sum of squares of a distribution; what is sharper counts as much


def choose(value: Tensor, left: Tensor | None, below: Tensor | None, terms: Terms) -> tuple[Tensor, Tensor]:
    """Choose the best slots; see `stree.kernels.tree_growth.api`."""
    ordered, index = value.sort(dim=1, descending=True, stable=True)  # stable: an earlier sibling wins a tie
    ordered, index = ordered[:, : terms.width], index[:, : terms.width]
    is_taken = ordered > 0
    if left is not None:
        rank = torch.arange(ordered.shape[1], device=value.device)
        if below is None:
            is_worth = (ordered >= terms.threshold) | (rank < (left // terms.layers_left)[:, None])
        else:
            is_worth = _size_down_to(ordered, below) <= left[:, None]
        is_taken &= is_worth & (rank < left[:, None])
    return index, is_taken


def _size_down_to(ordered: Tensor, below: Tensor) -> Tensor:
    """Estimate how many nodes are worth as much as each slot: the slots before it and what typically grows below them.

    Args:
        ordered: float[batch, width], values of slots, best first.
        below: float32[m], relative values of what grows below a node, ascending.

    Returns:
        int64[batch, width], the slot itself counted; it never falls from slot to slot.
    """
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    least = ordered[:, :, None] / ordered[:, None].clamp(min=1.2e-38)  # [batch, slot, slot before it]
    worth = len(below) - torch.searchsorted(below.to(ordered.dtype), least)
    return rank + 1 + (worth * (rank <= rank[:, None])).sum(-1)


def rate_by_rank(fit: RankFit, level: Level, memory: Memory, given: Children) -> Tensor:
    """Rate children that are not drawn; see `stree.kernels.tree_growth.api`."""
    probs = given.probs
    ranks = probs.shape[-1]
    odds = fit.level[:ranks] + fit.by_confidence[:ranks] * probs.clamp(min=LEAST_PROB).log()
    odds = odds - fit.by_sharpness[:ranks] * (1 - given.norms.square()[..., None]).clamp(min=LEAST_BLUNT).log()
    if given.words is not None:
        is_held = _are_held(memory, given.words) & (probs > 0)
        others = is_held.sum(-1, keepdim=True) - is_held.long() > 0
        odds = odds + (torch.cat([is_held, others]).to(odds.dtype) * fit.by_text[:, None, None, :ranks]).sum(0)
    odds = odds.masked_fill(probs <= 0, -torch.inf)
    best, place = odds.max(-1, keepdim=True)  # of equal ones the first
    shifted = best + level.shift[:, None, None]
    left = (1 + best.exp()) / (1 + shifted.exp())  # by the likeliest to the others, relative to the fit
    chance = torch.minimum(odds.sigmoid() * left, shifted.sigmoid()).scatter(-1, place, shifted.sigmoid())
    return given.reach[..., None] * (chance * (probs > 0))


def rate_by_table(table: Table, given: Children) -> Ratings:
    """Rate slots by what a table has counted; see `stree.kernels.tree_growth.api`."""
    reach, probs = given.reach, given.probs
    ranks = probs.shape[-1]
    odds = table.passed / table.tests
    sharp = torch.bucketize(given.norms.square(), table.sharpness)
    sure = torch.bucketize(probs / (1 - spent_before(probs)).clamp(min=1e-6), table.confidence)
    before = table.rank[:ranks] * (len(table.sharpness) + 1) + sharp[..., None]
    cells = torch.stack([before, table.first_after + before * (len(table.confidence) + 1) + sure], -1)
    expected, found = odds.gather(1, cells.flatten(1)).view(cells.shape).unbind(-1)
    untested = torch.cat([reach[..., None], 1 - found[..., :-1]], -1).cumprod(-1)
    priority = (untested * expected).cummin(-1).values
    return Ratings(priority * (probs > 0), untested * found * (probs > 0), cells)


def begin(seen: Seen, room: int) -> Columns:
    """Lay out columns; see `stree.kernels.tree_growth.api`."""
    batch, device = len(seen.pending), seen.pending.device
    tokens = seen.pending.new_zeros(batch, room)
    tokens[:, :1] = seen.tokens.gather(1, seen.lengths[:, None] - 1)
    tokens[:, 1] = seen.pending
    parents = torch.full((batch, room), -1, dtype=torch.int32, device=device)
    parents[:, 1] = 0
    depths = torch.zeros(batch, room, dtype=torch.int32, device=device)
    depths[:, 1] = 1
    mask = torch.eye(room, dtype=torch.bool, device=device).repeat(batch, 1, 1)
    mask[:, 1, 0] = True
    values = torch.ones(batch, room - 1, dtype=torch.float32, device=device)
    return Columns(tokens, parents, depths, mask, values)


def append(columns: Columns, chosen: Chosen, left: Tensor, layout: Layout) -> Appended:
    """Append the nodes of a layer, all of its width; see `stree.kernels.tree_growth.api`."""
    slots, is_taken, width = chosen.slots, chosen.is_taken, layout.width
    values = chosen.value.flatten(1).gather(1, slots) * is_taken
    if layout.num_nodes is not None:
        # Values never grow along a path, so a node that is not among the best of the tree so far has no descendant
        # among the best of the finished tree.
        others = columns.values[:, : layout.size - 1]
        is_taken = is_taken & (values >= torch.cat([others, values], 1).topk(layout.num_nodes + 1).values[:, -1:])
        values = values * is_taken
    column = slots // chosen.tokens.shape[-1] + layout.frontier
    tokens = chosen.tokens.flatten(1).gather(1, slots)
    place(columns, layout.size, *(part[:, :width] for part in (column, tokens, values, is_taken)))
    left.sub_(is_taken.sum(1))
    return Appended(width, values, column, tokens)


def place(columns: Columns, size: int, column: Tensor, tokens: Tensor, values: Tensor, is_taken: Tensor) -> None:
    """Write nodes into the columns from ``size`` on, padding where they are not taken; in torch on every device.

    Args:
        columns: of the tree.
        size: columns in use.
        column: int64[batch, width], that each node is below.
        tokens: int64[batch, width].
        values: float[batch, width].
        is_taken: bool[batch, width].
    """
    end = size + column.shape[1]
    columns.values[:, size - 1 : end - 1] = values
    above = columns.mask[:, :size, :size].take_along_dim(column[..., None], 1)
    columns.mask[:, size:end, :size] = above & is_taken[..., None]
    columns.depths[:, size:end] = (columns.depths.gather(1, column) + 1) * is_taken
    columns.tokens[:, size:end] = tokens * is_taken
    columns.parents[:, size:end] = torch.where(is_taken, column, -1)


def select(columns: Columns, size: int, count: int, *, by_value: bool) -> Tensor:
    """Choose the nodes that are proposed; see `stree.kernels.tree_growth.api`."""
    if by_value:
        # Values never grow along a path and equal ones keep their order, so a kept node's parent is kept, before it.
        order = columns.values[:, : size - 1].sort(dim=1, descending=True, stable=True).indices
        return order[:, :count].sort(1).values
    is_padding = columns.parents[:, 1:size] < 0
    return is_padding.to(torch.int8).sort(dim=1, stable=True).indices[:, :count]


def cut(columns: Columns, kept: Tensor | None, size: int) -> Proposed:
    """Cut a tree out of its columns: all but the one before the root; see the api."""
    tokens, mask = columns.tokens[:, 1:size].clone(), columns.mask[:, 1:size, 1:size].clone()
    parents = (columns.parents[:, 1:size] - 1).clamp_(min=-1)
    depths, values = (columns.depths[:, 1:size] - 1).clamp_(min=0), columns.values[:, : size - 1]
    if kept is None:
        return Proposed(tokens, parents, depths, mask, values, parents)
    tokens, depths, values, rows = (part.gather(1, kept) for part in (tokens, depths, values, parents))
    parents, mask = prune(kept, parents, mask)
    return Proposed(tokens, parents, depths, mask, values, rows)


def learn(table: Table, kept: Sequence[Kept], verdicts: Verdicts) -> None:
    """Count every test by the probability that it is made; see `stree.kernels.tree_growth.api`."""
    taken = [cells.flatten(1, 2).gather(1, slots[..., None].expand(-1, -1, 2)) for cells, slots in kept]
    cells = torch.nn.functional.pad(torch.cat(taken, 1), (0, 0, 1, 0))
    if verdicts.numbers is not None:
        cells = cells.take_along_dim(verdicts.numbers[..., None], 1)
    parents = verdicts.parents
    is_drafted = parents >= 0
    ratios = torch.where(is_drafted, verdicts.ratios, 1.0).to(table.tests.dtype)
    index = torch.arange(cells.shape[1], device=ratios.device)
    is_elder = (parents[:, :, None] == parents[:, None]) & (index[:, None] > index)
    # Sums in float64 do not depend on how much padding a neighbour's larger tree brings.
    missed = (is_elder * (1 - ratios).clamp(min=1e-6).log()[:, None]).sum(-1, dtype=torch.float64)
    own = ratios.clamp(min=1e-6).log() + missed
    above = (verdicts.mask * own[:, None]).sum(-1) - own
    counts = is_drafted & verdicts.is_live[:, None]
    made = ((above + missed).exp() * counts).to(ratios.dtype)
    for number in range(2):
        table.tests.scatter_add_(1, cells[..., number], made)
        table.passed.scatter_add_(1, cells[..., number], made * ratios)


def learn_level(level: Level, values: Tensor, verdicts: Verdicts) -> None:
    """Learn from the likeliest children of the accepted nodes; see `stree.kernels.tree_growth.api`."""
    parents = verdicts.parents
    is_drafted = parents >= 0
    ratios = torch.where(is_drafted, verdicts.ratios, 1.0).to(values.dtype)
    index = torch.arange(parents.shape[1], device=parents.device)
    has_elder = ((parents[:, :, None] == parents[:, None]) & (index[:, None] > index)).any(-1)
    own = ratios.clamp(min=1e-6).log().double()  # as for a table: its sums do not depend on padding
    made = ((verdicts.mask * own[:, None]).sum(-1) - own).exp() * (is_drafted & ~has_elder & verdicts.is_live[:, None])
    chance = values / values.gather(1, parents.clamp(min=0).long()).clamp(min=1.2e-38)
    level.weight.add_((made * chance * (1 - chance)).sum(1)).clamp_(max=MOST_WEIGHT)
    level.shift.add_((made * (ratios - chance)).sum(1) / level.weight)


def remember(memory: Memory, tokens: Tensor, path: Tensor | None, lengths: Tensor) -> None:
    """Read how the texts go on; see `stree.kernels.tree_growth.api`."""
    tokens = tokens if path is None else tokens.gather(1, path.clamp(min=0).long())
    text = torch.cat([memory.last, tokens], 1)
    before, token, following = text[:, :-2], text[:, 1:-1], text[:, 2:]
    is_read = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    for index, is_there in zip(_places(memory, before, token, following), (token >= 0, before >= 0), strict=True):
        memory.places.scatter_(1, torch.where(is_read & is_there, index, 2 * memory.num_places), True)
    memory.last.copy_(text.gather(1, lengths[:, None].long() + torch.arange(2, device=tokens.device)))


def _are_held(memory: Memory, words: Words) -> Tensor:
    """Whether a text holds the pairs and the triples that children would make: bool[2, batch, above, ranks]."""
    batch, above, _ = words.children.shape
    column = slice(words.first, words.first + above)
    token, before = words.tokens[:, column], words.tokens.gather(1, words.parents[:, column].clamp(min=0).long())
    index = _places(memory, before[..., None], token[..., None], words.children)
    return memory.places.gather(1, index.movedim(1, 0).flatten(1)).view(batch, 2, above, -1).movedim(1, 0)


def _places(memory: Memory, before: Tensor, token: Tensor, following: Tensor) -> Tensor:
    """Return the places of pairs and of triples of tokens, int64[2, ...]; meaningless for negative tokens."""
    pair = token * 0x1E3779B1 + following * 0x05EBCA77
    number, count = torch.stack([pair, before * 0x27D4EB2F + pair]), memory.num_places
    place = (number ^ (number >> 17)) & (count - 1)
    place[1] += count
    return place


def spent_before(probs: Tensor) -> Tensor:
    """Sum what is before each place, exclusively."""
    return torch.cat([torch.zeros_like(probs[..., :1]), probs.cumsum(-1)[..., :-1]], -1)
