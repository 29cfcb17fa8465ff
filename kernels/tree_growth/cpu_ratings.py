"""Ratings of slots and the memory of texts on the CPU, compiled with numba; `reference.py` is the specification."""

# mypy: disable-error-code="untyped-decorator, no-any-return"

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stree.kernels.cpu_jit import compiled, inner
from stree.kernels.tree_growth.cpu import Array
from stree.kernels.tree_growth.operands import Children, Level, Memory, RankFit, Ratings, Table
from stree.kernels.tree_growth.reference import LEAST_BLUNT, LEAST_PROB

__all__ = ["rate_by_rank", "rate_by_table", "remember"]

LEAST = 1e-6  # of what is left of a distribution, and of how often a sibling is refused
PAIR, TRIPLE = 1, 2  # what a text holds of a child


def rate_by_table(table: Table, given: Children) -> Ratings:
    """Rate slots by what a table has counted; see `stree.kernels.tree_growth.api`."""
    probs = given.probs
    kind = torch.promote_types(probs.dtype, table.tests.dtype)
    priority, value = torch.empty(probs.shape, dtype=kind), torch.empty(probs.shape, dtype=kind)
    cells = torch.empty(*probs.shape, 2, dtype=torch.long)
    _count(
        table.passed.numpy(), table.tests.numpy(), table.sharpness.numpy(), table.confidence.numpy(), len(table.rank),
        *(part.to(kind).contiguous().numpy() for part in (given.reach, probs, given.norms)),
        priority.numpy(), value.numpy(), cells.numpy(),
    )  # fmt: skip
    return Ratings(priority, value, cells)


def rate_by_rank(fit: RankFit, level: Level, memory: Memory, given: Children) -> Tensor:
    """Rate children that are not drawn; see `stree.kernels.tree_growth.api`."""
    kind = torch.promote_types(given.probs.dtype, fit.level.dtype)
    value = torch.empty(given.probs.shape, dtype=kind)
    fits = (fit.level, fit.by_confidence, fit.by_sharpness, fit.by_text, level.shift)
    dists = (given.reach, given.probs, given.norms)
    _rank(*(part.to(kind).contiguous().numpy() for part in (*fits, *dists)), _held(memory, given), value.numpy())
    return value


def remember(memory: Memory, tokens: Tensor, path: Tensor | None, lengths: Tensor) -> None:
    """Read how the texts go on; see `stree.kernels.tree_growth.api`."""
    entries = torch.arange(tokens.shape[1], dtype=torch.int32).expand(len(tokens), -1) if path is None else path
    _remember(*(part.numpy() for part in (memory.places, memory.last, tokens, entries, lengths)))


def _held(memory: Memory, given: Children) -> Array:
    """Mark the children whose pair or triple a text holds: int8[batch, above, ranks] of PAIR and TRIPLE together."""
    held, words = torch.zeros(given.probs.shape, dtype=torch.int8), given.words
    if words is not None:
        operands = (words.tokens, words.parents, words.children)
        _look_up(memory.places.numpy(), *(part.contiguous().numpy() for part in operands), words.first, held.numpy())
    return held.numpy()


@inner()
def _cell(edges: Array, number: float) -> int:
    """Find the interval of ascending edges that a number lies in, its upper edge counted."""
    cell = 0
    while cell < len(edges) and edges[cell] < number:
        cell += 1
    return cell


@inner()
def _place(number: int, count: int) -> int:
    """Mix a number's bits, as ``reference`` does."""
    return (number ^ (number >> 17)) & (count - 1)


@inner()
def _pair(token: int, following: int) -> int:
    """Number a pair of tokens, as `reference` does."""
    return token * 0x1E3779B1 + following * 0x05EBCA77


@inner()
def _triple(before: int, pair: int) -> int:
    """Number a pair after a token."""
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
def _look_up(places: Array, tokens: Array, parents: Array, children: Array, first: int, held: Array) -> None:
    """Add to ``held`` what texts hold: the pair and the triple that a child makes."""
    batch, above, ranks = children.shape
    count = places.shape[1] // 2
    for b in range(batch):
        for node in range(above):
            token, before = tokens[b, first + node], tokens[b, max(parents[b, first + node], 0)]
            for rank in range(ranks):
                pair = _pair(token, children[b, node, rank])
                held[b, node, rank] = PAIR * int(places[b, _place(pair, count)])
                held[b, node, rank] += TRIPLE * int(places[b, count + _place(_triple(before, pair), count)])


@compiled
def _rank(
    level: Array, by_confidence: Array, by_sharpness: Array, by_text: Array, shift: Array, reach: Array, probs: Array,
    norms: Array, held: Array, value: Array,
) -> None:  # fmt: skip
    """Do what ``rate_by_rank`` does; the last one is written, and holds log-odds on the way."""
    batch, above, ranks = probs.shape
    kind = probs.dtype.type
    zero, one = kind(0), kind(1)
    for b in range(batch):
        for node in range(above):
            pairs = triples = 0
            for rank in range(ranks):
                if probs[b, node, rank] > 0:
                    pairs += int(held[b, node, rank] & PAIR > 0)
                    triples += int(held[b, node, rank] & TRIPLE > 0)
            blunt = -np.log(max(one - norms[b, node] * norms[b, node], kind(LEAST_BLUNT)))
            best, place = kind(-np.inf), 0
            for rank in range(ranks):
                prob = probs[b, node, rank]
                value[b, node, rank] = kind(-np.inf)
                if prob <= 0:
                    continue
                pair, triple = held[b, node, rank] & PAIR > 0, held[b, node, rank] & TRIPLE > 0
                odds = level[rank] + by_confidence[rank] * np.log(max(prob, kind(LEAST_PROB)))
                odds += by_sharpness[rank] * blunt + pair * by_text[0, rank] + triple * by_text[1, rank]
                odds += (pairs > pair) * by_text[2, rank] + (triples > triple) * by_text[3, rank]
                value[b, node, rank] = odds
                if odds > best:
                    best, place = odds, rank
            shifted = best + shift[b]
            left, most = (one + np.exp(best)) / (one + np.exp(shifted)), one / (one + np.exp(-shifted))
            for rank in range(ranks):
                chance = most if rank == place else min(left / (one + np.exp(-value[b, node, rank])), most)
                value[b, node, rank] = reach[b, node] * chance if probs[b, node, rank] > 0 else zero


@compiled
def _count(
    passed: Array, tests: Array, sharpness: Array, confidence: Array, ranks: int, reach: Array, probs: Array,
    norms: Array, priority: Array, value: Array, cells: Array,
) -> None:  # fmt: skip
    """Do what ``rate_by_table`` does; the last three are written."""
    batch, above, count = probs.shape
    kind = probs.dtype.type  # of all but what is summed and multiplied up, as in torch: in float64
    zero, one, least = kind(0), kind(1), kind(LEAST)
    behind = ranks * (len(sharpness) + 1)  # the first cell of those after a draw
    for b in range(batch):
        for node in range(above):
            sharp = _cell(sharpness, norms[b, node] * norms[b, node])
            spent, untested, lowest = 0.0, np.float64(reach[b, node]), kind(np.inf)
            for rank in range(count):
                prob, upper = probs[b, node, rank], kind(untested)
                before = rank * (len(sharpness) + 1) + sharp
                share = prob / max(one - kind(spent), least)
                after = behind + before * (len(confidence) + 1) + _cell(confidence, share)
                cells[b, node, rank, 0], cells[b, node, rank, 1] = before, after
                expected, found = passed[b, before] / tests[b, before], passed[b, after] / tests[b, after]
                lowest = min(lowest, upper * expected)
                priority[b, node, rank], value[b, node, rank] = lowest, upper * found
                if prob <= 0:
                    priority[b, node, rank] = value[b, node, rank] = zero
                spent += np.float64(prob)
                untested *= np.float64(one - found)
