"""Traversal verification on the CPU, compiled: one call tests all nodes of a tree, one walks down it.

This file is imported with the first tree.  `reference.py` is the specification; here nodes are tested one by one
instead of wave by wave, and sums are taken in float64.
"""

# mypy: disable-error-code="untyped-decorator, no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stree.kernels.cpu_jit import compiled, inner
from stree.kernels.traversal.operands import (
    DELTA,
    INDEPENDENT,
    NOTHING,
    TINY,
    DraftProbs,
    Held,
    Tree,
    Walked,
)

__all__ = ["hold", "walk"]

Array = np.ndarray[Any, Any]


def hold(tree: Tree, target_probs: Tensor, draft: DraftProbs | None, max_depth: int) -> Held:
    """Test all nodes; see `stree.kernels.traversal.api`."""
    batch, n = tree.tokens.shape
    left = target_probs.contiguous()
    if draft is None:
        probs, row = left.new_zeros(batch, 1, 1), torch.zeros_like(tree.parents)
        kind = torch.full((batch, n), DELTA, dtype=torch.int8)
    else:
        probs, row, kind = draft.probs, draft.row.to(torch.int32), draft.kind.to(torch.int8)
    accept_probs, ratios = left.new_empty(batch, n, dtype=torch.float64), left.new_empty(batch, n)
    given = (tree.tokens, tree.parents, left, probs, row, kind, accept_probs, ratios)
    _hold(*(part.contiguous().numpy() for part in given))
    return Held(accept_probs, ratios, left)


def walk(tree: Tree, is_passed: Tensor, max_depth: int) -> Walked:
    """Walk down to the first node in post-order that passes; see `stree.kernels.traversal.api`."""
    batch, n = tree.parents.shape
    path = tree.parents.new_empty(batch, min(n, max_depth + 1))
    lengths, leaf = path.new_empty(batch), tree.tokens.new_empty(batch)
    _walk(*(part.contiguous().numpy() for part in (tree.parents, is_passed, path, lengths, leaf)))
    return Walked(path, lengths, leaf)


summing = inner(fastmath={"reassoc", "contract"})  # sums in any order: along many lines at once


@summing
def _sum(dist: Array) -> float:
    """Sum a distribution in float64."""
    total = 0.0
    for token in range(len(dist)):
        total += np.float64(dist[token])
    return total


@summing
def _leave(before: Array, scale: float, dist: Array, factor: float, left: Array) -> float:
    """Write max(scale before - factor distribution, 0) to ``left``; return its sum."""
    total = 0.0
    for token in range(len(left)):
        rest = max(scale * np.float64(before[token]) - factor * np.float64(dist[token]), 0.0)
        left[token] = rest
        total += rest
    return total


@summing
def _is_again(tokens: Array, parents: Array, kind: Array, node: int) -> bool:
    """Whether a node's distribution was drawn without its token, which an elder sibling has."""
    if kind[node] != INDEPENDENT:
        for elder in range(1, node):
            if parents[elder] == parents[node] and tokens[elder] == tokens[node]:
                return True
    return False


@summing
def _rest(tokens: Array, parents: Array, kind: Array, again: Array, node: int, dist: Array, whole: float) -> float:
    """Sum what a node's elder siblings leave of the distribution that they were drawn from."""
    rest = whole
    if kind[node] != INDEPENDENT:
        for elder in range(1, node):
            if parents[elder] == parents[node] and not again[elder]:
                rest -= np.float64(dist[tokens[elder]])
    return max(rest, TINY)


@compiled
def _hold(
    tokens: Array, parents: Array, dist: Array, probs: Array, row: Array, kind: Array, held: Array, ratio: Array
) -> None:
    """Test all nodes in the order of their indices: parents before children, elder siblings before younger ones.

    Args:
        tokens: int64[batch, n].
        parents: int32[batch, n], -1 for the root and padding.
        dist: float[batch, n, vocab], the target's, normalised; written: what is left of it when all children failed.
        probs: float[batch, rows, vocab], distributions that SAMPLED and INDEPENDENT nodes were drawn from.
        row: int32[batch, n], see ``DraftProbs``.
        kind: int8[batch, n], likewise.
        held: float64[batch, n], written: each node's acceptance probability, the root's among them.
        ratio: float[batch, n], written: min(1, p / q) at the token of each drafted node, else 0.

    Raises:
        ValueError: a drafted node's token is beyond the vocabulary.
    """
    batch, n, vocab = dist.shape
    rows = probs.shape[1]
    left, mass = np.empty(vocab, dist.dtype), np.empty(n, np.float64)
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
            if token < 0 or token >= vocab:
                raise ValueError("a drafted token is not in the vocabulary")
            before, chance = dist[b, parent], held[b, parent]
            own = before[token]
            odds, scale = np.float64(own) / mass[parent], chance / mass[parent]
            if kind[b, node] == DELTA:
                before[token] = 0.0  # its distribution is one-hot: a rejection leaves all but it
                total = _leave(before, scale, before, 0.0, left)
                before[token] = own
            else:
                at = min(max(row[b, node], 0), rows - 1)
                if whole[at] < 0:
                    whole[at] = _sum(probs[b, at])
                rest = _rest(tokens[b], parents[b], kind[b], again, node, probs[b, at], whole[at])
                drawn = 0.0 if again[node] else np.float64(probs[b, at, token])
                odds *= rest / max(drawn, TINY)
                total = _leave(before, scale, probs[b, at], 1 / rest, left)
            if total > NOTHING:  # else p is q but for rounding, and the child is accepted
                mass[parent] = total
                for other in range(vocab):
                    before[other] = left[other]
            held[b, node], ratio[b, node] = min(chance * odds, 1.0), min(odds, 1.0)
            held[b, parent] = total / max(total + (1 - chance), TINY)


@compiled
def _walk(parents: Array, shown: Array, path: Array, lengths: Array, leaf: Array) -> None:
    """Walk down to the first node in post-order that passes its test.

    Args:
        parents: int32[batch, n].
        shown: bool[batch, n]; of padding False; written.
        path: int32[batch, m], written: nodes from the root down, then -1.
        lengths: int32[batch], written: nodes on the path.
        leaf: int64[batch], written: the last of them.

    Raises:
        ValueError: the path is longer than m.
    """
    batch, n = parents.shape
    for b in range(batch):
        for node in range(n - 1, 0, -1):
            if shown[b, node]:
                shown[b, parents[b, node]] = True
        last, count = 0, 1
        for place in range(path.shape[1]):
            path[b, place] = -1
        path[b, 0] = 0
        for node in range(1, n):
            if parents[b, node] == last and shown[b, node]:
                if count == path.shape[1]:
                    raise ValueError("a path is deeper than max_depth")
                last, path[b, count] = node, node
                count += 1
        lengths[b], leaf[b] = count, last
