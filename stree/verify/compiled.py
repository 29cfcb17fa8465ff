"""Traversal verification on the CPU, compiled: one call tests all nodes of a tree, one walks down it.

numba keeps the machine code beside this file; `stree.verify.traversal` imports it with the first tree.  What is
computed is `stree.verify.traversal` and `stree.verify.trials`, in torch, node by node instead of wave by wave; sums
are taken in float64.
"""

# mypy: disable-error-code="untyped-decorator, no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from stree.verify.trials import NOTHING, TINY
from stree.verify.values import DELTA, INDEPENDENT

__all__ = ["hold", "walk"]

Array = np.ndarray[Any, Any]
compiled = njit(cache=True, error_model="numpy")
inner = njit(error_model="numpy", fastmath={"reassoc", "contract"})  # sums in any order: along many lines at once


@inner
def _sum(law: Array) -> float:
    """Sum a law in float64."""
    total = 0.0
    for token in range(len(law)):
        total += np.float64(law[token])
    return total


@inner
def _leave(before: Array, scale: float, law: Array, factor: float, begin: int, end: int, left: Array) -> float:
    """Write max(scale before - factor law, 0) of some tokens to ``left``; return its sum."""
    total = 0.0
    for token in range(begin, end):
        rest = max(scale * np.float64(before[token]) - factor * np.float64(law[token]), 0.0)
        left[token] = rest
        total += rest
    return total


@inner
def _scale(before: Array, scale: float, begin: int, end: int, left: Array) -> float:
    """Write scale before of some tokens to ``left``; return its sum."""
    total = 0.0
    for token in range(begin, end):
        rest = scale * np.float64(before[token])
        left[token] = rest
        total += rest
    return total


@inner
def _is_again(tokens: Array, parents: Array, kind: Array, node: int) -> bool:
    """Tell whether a node's law was drawn without its token, which an elder sibling has."""
    if kind[node] != INDEPENDENT:
        for elder in range(1, node):
            if parents[elder] == parents[node] and tokens[elder] == tokens[node]:
                return True
    return False


@inner
def _rest(tokens: Array, parents: Array, kind: Array, again: Array, node: int, law: Array, whole: float) -> float:
    """Sum what a node's elder siblings leave of the law that they were drawn from."""
    rest = whole
    if kind[node] != INDEPENDENT:
        for elder in range(1, node):
            if parents[elder] == parents[node] and not again[elder]:
                rest -= np.float64(law[tokens[elder]])
    return max(rest, TINY)


@compiled
def hold(
    tokens: Array, parents: Array, law: Array, probs: Array, row: Array, kind: Array, held: Array, ratio: Array
) -> None:
    """Test all nodes in the order of their indices: parents before children, elder siblings before younger ones.

    Args:
        tokens: int64[batch, n].
        parents: int32[batch, n], -1 for the root and padding.
        law: float[batch, n, vocab], the target's, normalised; written: what is left of it when all children failed.
        probs: float[batch, rows, vocab], laws that SAMPLED and INDEPENDENT nodes were drawn from.
        row: int32[batch, n], see ``DraftLaws``.
        kind: int8[batch, n], likewise.
        held: float64[batch, n], written: each node's coin, the root's among them.
        ratio: float[batch, n], written: min(1, p / q) at the token of each drafted node, else 0.
    """
    batch, n, vocab = law.shape
    rows = probs.shape[1]
    left, mass = np.empty(vocab, law.dtype), np.empty(n, np.float64)
    again, whole = np.empty(n, np.bool_), np.empty(rows, np.float64)
    for b in range(batch):
        for at in range(rows):
            whole[at] = -1.0
        for node in range(n):
            held[b, node], mass[node], ratio[b, node] = 1.0, 1.0, 0.0
            again[node] = _is_again(tokens[b], parents[b], kind[b], node)
        for node in range(1, n):
            parent, token = parents[b, node], tokens[b, node]
            if parent < 0:
                continue
            inverse, factor, own = 1.0, 0.0, 1.0  # 1 / q at the token, what makes the row q, and q besides the row
            at = min(max(row[b, node], 0), rows - 1)
            if kind[b, node] != DELTA:
                if whole[at] < 0:
                    whole[at] = _sum(probs[b, at])
                rest = _rest(tokens[b], parents[b], kind[b], again, node, probs[b, at], whole[at])
                drawn = 0.0 if again[node] else np.float64(probs[b, at, token])
                inverse, factor, own = rest / max(drawn, TINY), 1 / rest, 0.0
            before, chance = law[b, parent], held[b, parent]
            odds = np.float64(before[token]) / mass[parent] * inverse
            scale = chance / mass[parent]
            if factor > 0:
                total = _leave(before, scale, probs[b, at], factor, 0, token, left)
                total += _leave(before, scale, probs[b, at], factor, token + 1, vocab, left)
                own = factor * np.float64(probs[b, at, token])
            else:
                total = _scale(before, scale, 0, token, left) + _scale(before, scale, token + 1, vocab, left)
            left[token] = max(scale * np.float64(before[token]) - own, 0.0)
            total += np.float64(left[token])
            if total > NOTHING:  # else p is q but for rounding, and the child is accepted
                mass[parent] = total
                for at in range(vocab):
                    before[at] = left[at]
            held[b, node], ratio[b, node] = min(chance * odds, 1.0), min(odds, 1.0)
            held[b, parent] = total / max(total + (1 - chance), TINY)


@compiled
def walk(parents: Array, shown: Array, path: Array, lengths: Array, leaf: Array) -> None:
    """Walk down to the first node in post-order whose coin shows.

    Args:
        parents: int32[batch, n].
        shown: bool[batch, n]; of padding False; written.
        path: int32[batch, m], written: nodes from the root down, then -1.
        lengths: int32[batch], written: nodes on the path.
        leaf: int64[batch], written: the last of them.
    """
    batch, n = parents.shape
    for b in range(batch):
        for node in range(n - 1, 0, -1):
            if shown[b, node] and parents[b, node] > 0:
                shown[b, parents[b, node]] = True
        last, count = 0, 1
        for place in range(path.shape[1]):
            path[b, place] = -1
        path[b, 0] = 0
        for node in range(1, n):
            if parents[b, node] == last and shown[b, node]:
                last, path[b, count] = node, node
                count += 1
        lengths[b], leaf[b] = count, last
