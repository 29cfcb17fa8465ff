"""One layer of growth on the CPU, and what texts hold, compiled; `reference_growth` specifies it.

`stree.kernels.growth_door` and `stree.kernels.growth_learning` call it.

numba keeps the machine code beside this file, which is imported with the first tree.
"""

# mypy: disable-error-code="untyped-decorator, no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from stree.kernels.growth_door import Appended, Chosen, Columns, Layout
from stree.kernels.reference_growth import NUM_SAID, Memory, Ratings, Table, Terms, Words

__all__ = ["append", "choose", "rate_by_table", "remember"]

Array = np.ndarray[Any, Any]
compiled = njit(cache=True, error_model="numpy")
inner = njit(error_model="numpy")

LEAST = 1e-6  # of what is left of a law, and of how often a sibling is refused
TINY = 1e-38  # of a value that others are compared with


def choose(value: Tensor, left: Tensor | None, below: Tensor | None, terms: Terms) -> tuple[Tensor, Tensor]:
    """Choose the best slots; see `stree.kernels.growth_door`."""
    batch, count = value.shape
    slots = torch.empty(batch, min(terms.width, count), dtype=torch.long)
    is_taken = torch.empty(slots.shape, dtype=torch.bool)
    kind = value.dtype
    _choose(
        value.contiguous().numpy(), (slots.new_empty(0) if left is None else left.long()).numpy(), left is not None,
        (value.new_empty(0) if below is None else below.to(kind)).numpy(), below is not None, terms.threshold,
        terms.layers_left, terms.in_order, slots.numpy(), is_taken.numpy(),
    )  # fmt: skip
    return slots, is_taken


def rate_by_table(
    table: Table,
    memory: Memory,
    words: Words | None,
    reach: Tensor,
    probs: Tensor,
    norms: Tensor,
    is_chosen: Tensor | None,
) -> Ratings:
    """Rate slots by what a table has counted; see `stree.kernels.growth_door`."""
    kind = torch.promote_types(probs.dtype, table.tests.dtype)
    priority, value = torch.empty(probs.shape, dtype=kind), torch.empty(probs.shape, dtype=kind)
    cells = torch.empty(*probs.shape, 2, dtype=torch.long)
    if words is None:
        cells[..., 1] = 0
    else:
        lead = words.tokens.new_empty(0) if words.lead is None else words.lead
        said = (memory.last, words.tokens, words.parents, lead, words.children)
        _say(memory.places.numpy(), *(part.contiguous().numpy() for part in said), words.first, cells[..., 1].numpy())
    _rate(
        table.passed.numpy(), table.tests.numpy(), table.sharpness.numpy(), table.confidence.numpy(), len(table.rank),
        *(part.to(kind).contiguous().numpy() for part in (reach, probs, norms)),
        np.empty((0, 0, 0), np.bool_) if is_chosen is None else is_chosen.contiguous().numpy(),
        priority.numpy(), value.numpy(), cells.numpy(),
    )  # fmt: skip
    return Ratings(priority, value, cells)


def remember(memory: Memory, tokens: Tensor, path: Tensor | None, lengths: Tensor) -> None:
    """Read how the texts go on; see `stree.kernels.growth_learning`."""
    entries = torch.arange(tokens.shape[1], dtype=torch.int32).expand(len(tokens), -1) if path is None else path
    _remember(*(part.numpy() for part in (memory.places, memory.last, tokens, entries, lengths)))


def append(columns: Columns, chosen: Chosen, left: Tensor, layout: Layout) -> Appended:
    """Append the nodes of a layer, without columns that would be padding in every row; see the door."""
    batch, count = chosen.slots.shape
    values = torch.empty(batch, count, dtype=chosen.value.dtype)
    column, tokens = torch.empty(batch, count, dtype=torch.long), torch.empty(batch, count, dtype=torch.long)
    is_chosen = torch.empty(0, 0, dtype=torch.bool) if chosen.is_chosen is None else chosen.is_chosen
    width = _append(
        *(part.numpy() for part in (columns.lead, columns.tokens, columns.parents, columns.depths, columns.mask)),
        *(part.numpy() for part in (columns.values, columns.kinds, left)),
        *(part.contiguous().numpy() for part in (chosen.slots, chosen.is_taken)),
        *(part.flatten(1).contiguous().numpy() for part in (chosen.value, chosen.tokens, is_chosen)),
        chosen.tokens.shape[-1], layout.width, layout.frontier, layout.size,
        -1 if layout.num_nodes is None else layout.num_nodes, layout.is_cut, *layout.kinds,
        values.numpy(), column.numpy(), tokens.numpy(),
    )  # fmt: skip
    return Appended(width, values, column, tokens)


@compiled
def _append(
    lead: Array, all_tokens: Array, parents: Array, depths: Array, mask: Array, all_values: Array, kinds: Array,
    left: Array, slots: Array, is_taken: Array, value: Array, token: Array, is_chosen: Array, ranks: int, width: int,
    frontier: int, size: int, num_nodes: int, is_cut: bool, chosen_kind: int, other_kind: int, values: Array,
    column: Array, tokens: Array,
) -> int:  # fmt: skip
    """Do what ``append`` does; give the columns appended.  The columns, ``left`` and the last three are written."""
    batch, count = slots.shape
    most = 0
    for b in range(batch):
        for place in range(count):
            slot = slots[b, place]
            values[b, place] = value[b, slot] if is_taken[b, place] else 0
            column[b, place] = slot // ranks + frontier if frontier else lead[b]
            tokens[b, place] = token[b, slot]
        if num_nodes >= 0:
            _keep_best(all_values[b, : size - 1], values[b], num_nodes)
        taken = 0
        for place in range(count):
            is_kept = is_taken[b, place] and values[b, place] >= 0
            values[b, place] = max(values[b, place], 0)
            column[b, place] = column[b, place] if is_kept else -1 - column[b, place]
            left[b] -= is_kept
            taken += is_kept and place < width
        most = max(most, taken)
    if is_cut or not most:
        width = most
    for b in range(batch):
        for place in range(count):
            is_kept, at = column[b, place] >= 0, size + place
            above = column[b, place] if is_kept else -1 - column[b, place]
            column[b, place] = above
            if place < width:
                all_tokens[b, at] = tokens[b, place] if is_kept else 0
                parents[b, at] = above if is_kept else -1
                depths[b, at] = depths[b, above] + 1 if is_kept else 0
                for other in range(size):
                    mask[b, at, other] = is_kept and mask[b, above, other]
                all_values[b, at - 1] = values[b, place]
                if is_chosen.size:
                    kinds[b, at - 1] = chosen_kind if is_chosen[b, slots[b, place]] else other_kind
    return width


@inner
def _keep_best(known: Array, values: Array, num_nodes: int) -> None:
    """Make values -1 that are not among the best of a tree, its root counted."""
    both = np.empty(len(known) + len(values), values.dtype)
    for at in range(len(known)):
        both[at] = known[at]
    for at in range(len(values)):
        both[len(known) + at] = values[at]
    least = np.sort(both)[len(both) - num_nodes - 1]
    for at in range(len(values)):
        if values[at] < least:
            values[at] = -1


@compiled
def _choose(
    value: Array, left: Array, is_bounded: bool, below: Array, goes_by_size: bool, threshold: float, layers_left: int,
    in_order: bool, slots: Array, is_taken: Array,
) -> None:  # fmt: skip
    """Do what ``choose`` does; ``slots`` and ``is_taken`` are written."""
    batch, count = value.shape
    width, least = slots.shape[1], value.dtype.type(threshold)
    ordered = np.empty(width, value.dtype)
    free = np.empty(count, np.bool_)
    for b in range(batch):
        for slot in range(count):
            free[slot] = True
        goes_on = True
        for place in range(width):
            best = -1
            for slot in range(count):
                if free[slot] and (best < 0 or value[b, slot] > value[b, best]):
                    best = slot
            free[best], slots[b, place], ordered[place] = False, best, value[b, best]
            worth = ordered[place] > 0
            if worth and is_bounded:
                worth = place < left[b]
                if worth and goes_by_size:
                    worth = goes_on = goes_on and _size(ordered, place, below) <= left[b]
                elif worth:
                    worth = ordered[place] >= least or place < left[b] // layers_left
            is_taken[b, place] = worth
        if in_order:
            _sort_taken(slots[b], is_taken[b], count)


@inner
def _size(ordered: Array, place: int, below: Array) -> int:
    """Estimate how many nodes are worth as much as a slot: those before it and what typically grows below them."""
    size, tiny = place + 1, ordered.dtype.type(TINY)
    for other in range(place + 1):
        share = ordered[place] / max(ordered[other], tiny)
        low, high = 0, len(below)
        while low < high:
            middle = (low + high) // 2
            if below[middle] < share:
                low = middle + 1
            else:
                high = middle
        size += len(below) - low
    return size


@inner
def _sort_taken(slots: Array, is_taken: Array, count: int) -> None:
    """Sort slots that are taken by index; the others become the last slot."""
    taken = 0
    for place in range(len(slots)):
        if is_taken[place]:
            slot, at = slots[place], taken
            while at > 0 and slots[at - 1] > slot:
                slots[at] = slots[at - 1]
                at -= 1
            slots[at] = slot
            taken += 1
    for place in range(len(slots)):
        is_taken[place] = place < taken
        if place >= taken:
            slots[place] = count - 1


@inner
def _cell(edges: Array, number: float) -> int:
    """Find the interval of ascending edges that a number lies in, its upper edge counted."""
    cell = 0
    while cell < len(edges) and edges[cell] < number:
        cell += 1
    return cell


@inner
def _place(number: int, count: int) -> int:
    """Mix a number's bits, as ``reference_growth`` does."""
    return (number ^ (number >> 17)) & (count - 1)


@inner
def _pair(token: int, following: int) -> int:
    """Give a pair of tokens a number, as ``reference_growth`` does."""
    return token * 0x1E3779B1 + following * 0x05EBCA77


@inner
def _triple(before: int, pair: int) -> int:
    """Give a pair behind a token a number."""
    return before * 0x27D4EB2F + pair


@compiled
def _remember(places: Array, last: Array, tokens: Array, path: Array, lengths: Array) -> None:
    """Do what ``remember`` does along a path; the first two are written."""
    count = places.shape[1] // 2
    for b in range(len(tokens)):
        before, token = last[b, 0], last[b, 1]
        for entry in range(lengths[b]):
            following = tokens[b, max(path[b, entry], 0)]
            pair = _pair(token, following)
            if token >= 0:
                places[b, _place(pair, count)] = True
            if before >= 0:
                places[b, count + _place(_triple(before, pair), count)] = True
            before, token = token, following
        last[b, 0], last[b, 1] = before, token


@compiled
def _say(
    places: Array, last: Array, tokens: Array, parents: Array, lead: Array, children: Array, first: int, said: Array
) -> None:
    """Write into ``said`` what texts say already of children; see ``reference_growth``."""
    batch, above, ranks = children.shape
    count = places.shape[1] // 2
    for b in range(batch):
        for node in range(above):
            column = lead[b] if lead.size else first + node
            token, parent = tokens[b, column], parents[b, column]
            before = last[b, 1] if parent < 0 else tokens[b, parent]
            parent_said = int(before >= 0 and places[b, _place(_pair(before, token), count)])
            for rank in range(ranks):
                pair = _pair(token, children[b, node, rank])
                if before >= 0 and places[b, count + _place(_triple(before, pair), count)]:
                    said[b, node, rank] = 4
                else:
                    said[b, node, rank] = parent_said + 2 * int(token >= 0 and places[b, _place(pair, count)])


@compiled
def _rate(
    passed: Array, tests: Array, sharpness: Array, confidence: Array, ranks: int, reach: Array, probs: Array,
    norms: Array, is_chosen: Array, priority: Array, value: Array, cells: Array,
) -> None:  # fmt: skip
    """Do what ``rate_by_table`` does; the last three are written, where ``cells`` hold what is said of children."""
    batch, above, count = probs.shape
    has_kinds = is_chosen.size > 0
    kind = probs.dtype.type  # of all but what is summed and multiplied up, as in torch: in float64
    zero, one, least = kind(0), kind(1), kind(LEAST)
    behind = 2 * ranks * (len(sharpness) + 1)  # the first cell of those after a draw
    for b in range(batch):
        for node in range(above):
            favourite = zero
            for rank in range(count):
                if has_kinds and is_chosen[b, node, rank]:
                    favourite += probs[b, node, rank]
            sharp = _cell(sharpness, norms[b, node] * norms[b, node] + favourite * favourite)
            first = ranks if favourite > 0 else 0
            spent, untested = 0.0, np.float64(reach[b, node])
            eldest, lowest = one, kind(np.inf)
            for rank in range(count):
                prob, upper = probs[b, node, rank], kind(untested)
                chosen = has_kinds and is_chosen[b, node, rank]
                before = (first + rank) * (len(sharpness) + 1) + sharp
                share = prob if chosen else prob / max(one - (kind(spent) + favourite), least)
                after = before * (len(confidence) + 1) + _cell(confidence, share)
                after = behind + after * NUM_SAID + cells[b, node, rank, 1]
                cells[b, node, rank, 0], cells[b, node, rank, 1] = before, after
                expected, found = passed[b, before] / tests[b, before], passed[b, after] / tests[b, after]
                refused = one - found
                if rank == 0:
                    eldest = refused
                if chosen:
                    priority[b, node, rank] = value[b, node, rank] = reach[b, node] * found
                    refused = one - found / max(eldest, least)
                else:
                    spent += np.float64(prob)
                    lowest = min(lowest, upper * expected)
                    priority[b, node, rank], value[b, node, rank] = lowest, upper * found
                if prob <= 0:
                    priority[b, node, rank] = value[b, node, rank] = zero
                untested *= np.float64(max(refused, zero) if has_kinds else refused)
