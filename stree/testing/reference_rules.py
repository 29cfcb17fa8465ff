"""Recursive rejection and traversal verification of one tree in plain Python: what is emitted, in closed form.

Nothing is drawn, and nothing is shared with ``stree.verify``: the checks of drafters and growths verify by these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stree.testing.enumeration import DraftedTrees
from stree.verify import DELTA, SAMPLED

__all__ = ["RULES", "PlainTree", "by_rejection", "by_traversal", "plain_trees", "traversal_ends"]

Probs = list[float]
Emitted = Iterator[tuple[tuple[int, ...], float]]  # strings of tokens, and their probabilities


@dataclass(frozen=True, slots=True)
class PlainTree:
    """A drafted tree without padding at its end.

    Attributes:
        tokens: of the nodes, the root first.
        parents: -1 for the root and for padding.
        kinds: SAMPLED, DELTA or INDEPENDENT.
        stated: the distribution from which each node is said to be drawn.
        weight: probability of the tree.
    """

    tokens: list[int]
    parents: list[int]
    kinds: list[int]
    stated: list[Probs]
    weight: float

    def children(self, node: int) -> list[int]:
        """Children of a node in draw order."""
        return [child for child, parent in enumerate(self.parents) if child and parent == node]

    def drawn_from(self, node: int) -> Probs:
        """Distribution of a node given its earlier siblings; all zeros where nothing of it is left."""
        probs = list(self.stated[node])
        if self.kinds[node] == DELTA:
            return [float(token == self.tokens[node]) for token in range(len(probs))]
        if self.kinds[node] == SAMPLED:
            for sibling in self.children(self.parents[node]):
                if sibling < node:
                    probs[self.tokens[sibling]] = 0.0
        return _normalised(probs)


def plain_trees(trees: DraftedTrees) -> Iterator[PlainTree]:
    """Return trees one by one."""
    row = trees.probs.row.long().clamp(min=0, max=trees.probs.probs.shape[1] - 1)
    stated = trees.probs.probs.take_along_dim(row[..., None], 1)
    parts = trees.tokens, trees.parents, trees.probs.kind, stated, trees.weight
    for fields in zip(*(part.tolist() for part in parts), strict=True):
        yield PlainTree(*fields)


def by_rejection(tree: PlainTree, target: list[Probs], node: int = 0) -> Emitted:
    """Test the children of a node in draw order, and go on below the first one that is accepted."""
    left, reached = target[tree.tokens[node]], 1.0
    for child in tree.children(node):
        drawn, token = tree.drawn_from(child), tree.tokens[child]
        passes = min(1.0, left[token] / drawn[token]) if drawn[token] else 1.0
        for text, prob in by_rejection(tree, target, child):
            yield (token, *text), reached * passes * prob
        reached *= 1 - passes
        left = _normalised([max(p - q, 0.0) for p, q in zip(left, drawn, strict=True)])
        if not reached:
            return
    yield from (((token,), reached * prob) for token, prob in enumerate(left))


def by_traversal(tree: PlainTree, target: list[Probs]) -> Emitted:
    """Accept the path to the first node in post-order that passes its test."""
    for path, prob, left in traversal_ends(tree, target):
        text = tuple(tree.tokens[node] for node in path[1:])
        yield from (((*text, token), prob * share) for token, share in enumerate(left))


def traversal_ends(tree: PlainTree, target: list[Probs]) -> Iterator[tuple[list[int], float, Probs]]:
    """Visit children first (arXiv 2505.12398): each path, the probability that it is accepted, and what is left."""
    missed = 1.0

    def visit(node: int, passes: float, above: list[int]) -> Iterator[tuple[list[int], float, Probs]]:
        nonlocal missed
        left, path = target[tree.tokens[node]], [*above, node]
        for child in tree.children(node):
            drawn, token = tree.drawn_from(child), tree.tokens[child]
            yield from visit(child, min(1.0, passes * left[token] / drawn[token]) if drawn[token] else 1.0, path)
            rest = [max(passes * p - q, 0.0) for p, q in zip(left, drawn, strict=True)]
            total = sum(rest)
            passes = total / (total + (1 - passes)) if total else 0.0
            left = [part / total for part in rest] if total else left
        prob = missed if node == 0 else missed * passes
        missed -= prob
        yield path, prob, left

    yield from visit(0, 1.0, [])


RULES = {"recursive rejection": by_rejection, "traversal": by_traversal}


def _normalised(probs: Probs) -> Probs:
    total = sum(probs)
    return [prob / total for prob in probs] if total else probs
