"""A tree of likely continuations as plain lists, and the union of two."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

__all__ = ["Continuations", "best_first", "merged"]

Place = TypeVar("Place")
Candidate = tuple[float, int, Place]  # value, token, and where its own continuations are looked up


class Continuations(NamedTuple):
    """Nodes below a root, best first, so that a prefix of the lists is the tree of a smaller budget.

    Attributes:
        tokens: of each node.
        parents: 0 for the root, i for the i-th node; every parent stands before its children.
        values: estimated probability of each node's path; never greater than its parent's.
    """

    tokens: list[int]
    parents: list[int]
    values: list[float]


def best_first(
    roots: Iterable[Candidate[Place]],
    expand: Callable[[float, Place], Iterable[Candidate[Place]]],
    max_nodes: int,
) -> Continuations:
    """Take the most probable nodes one after the other; ``expand`` lists the children of a node taken."""
    tokens: list[int] = []
    parents: list[int] = []
    values: list[float] = []
    heap: list[tuple[float, int, int, int, Place]] = []
    count = parent = 0  # the count breaks ties, so that places are never compared
    candidates = roots
    while len(tokens) < max_nodes:
        for value, token, place in candidates:
            heapq.heappush(heap, (-value, count, parent, token, place))
            count += 1
        if not heap:
            break
        negative, _, above, token, place = heapq.heappop(heap)
        tokens.append(token)
        parents.append(above)
        values.append(-negative)
        parent, candidates = len(tokens), expand(-negative, place)
    return Continuations(tokens, parents, values)


def merged(first: Continuations, second: Continuations, max_nodes: int) -> Continuations:
    """Unite two trees by longest prefix and keep the best ``max_nodes``; a node of both has the greater value."""
    nodes: list[list[tuple[int, int]]] = [[]]  # children of each united node: token, node
    parents, tokens, values = [-1], [-1], [2.0]
    for tree in (first, second):
        place = [0]
        for token, parent, value in zip(*tree, strict=True):
            above = place[parent]
            node = next((child for known, child in nodes[above] if known == token), None)
            if node is None:
                node = len(nodes)
                nodes[above].append((token, node))
                nodes.append([])
                parents.append(above)
                tokens.append(token)
                values.append(value)
            values[node] = max(values[node], value)
            place.append(node)
    # A parent is at least as probable as its children and was found before them: a stable order keeps it first.
    order = sorted(range(1, len(nodes)), key=lambda node: -values[node])[:max_nodes]
    number = {0: 0} | {node: place for place, node in enumerate(order, 1)}
    return Continuations(
        [tokens[node] for node in order], [number[parents[node]] for node in order], [values[node] for node in order]
    )
