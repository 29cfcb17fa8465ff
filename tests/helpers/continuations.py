"""Trees of continuations as lists."""

from __future__ import annotations

from typing import Any, NamedTuple

from stree.retrieval import Nodes


class Continuations(NamedTuple):
    """Nodes below a root: parents are 0 for the root, i for the i-th node."""

    tokens: list[int]
    parents: list[int]
    values: list[float]

    @classmethod
    def of(cls, nodes: Nodes, size: int) -> Continuations:
        return cls(*(array[1:size].tolist() for array in nodes[:3]))


def tree_of(source: Any, max_nodes: int, *context: list[int], **options: int) -> Continuations:
    """Draft from an automaton, or from a datastore with a context."""
    nodes = Nodes.empty(max_nodes)
    return Continuations.of(nodes, source.lay_out(*context, nodes, **options))
