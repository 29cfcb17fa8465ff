"""A tree of likely continuations: as the arrays that compiled code writes, and as plain lists."""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np

__all__ = ["Continuations", "Nodes", "merged", "unite"]


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


class Nodes(NamedTuple):
    """Room for a tree, its root at place 0, and the tree once it is laid out; places beyond it are padding.

    Attributes:
        tokens: int64[n]; 0 for padding.
        parents: int32[n]; -1 for the root and padding.
        values: float64[n]; 1 for the root, 0 for padding.
        depths: int32[n]; 0 for the root and padding.
    """

    tokens: np.ndarray
    parents: np.ndarray
    values: np.ndarray
    depths: np.ndarray

    @classmethod
    def empty(cls, *shape: int) -> Self:
        """Make room for trees of ``shape[-1]`` nodes below their roots; further dimensions come before."""
        size = (*shape[:-1], shape[-1] + 1)
        values = np.zeros(size)
        values[..., 0] = 1
        return cls(np.zeros(size, np.int64), np.full(size, -1, np.int32), values, np.zeros(size, np.int32))

    def row(self, index: int) -> Self:
        """Give the tree of a batch's row, which shares its memory."""
        return type(self)(*(array[index] for array in self))

    def below_root(self, size: int) -> Continuations:
        """List what was laid out, ``size`` nodes with the root."""
        return Continuations(*(array[1:size].tolist() for array in self[:3]))


def merged(first: Continuations, second: Continuations, max_nodes: int) -> Continuations:
    """Unite two trees by longest prefix and keep the best ``max_nodes``; a node of both has the greater value."""
    nodes = Nodes.empty(max_nodes)
    both = [_as_nodes(first), _as_nodes(second)]
    return nodes.below_root(unite(both[0], len(both[0].tokens), both[1], len(both[1].tokens), nodes))


def unite(first: Nodes, first_size: int, second: Nodes, second_size: int, out: Nodes) -> int:
    """Write the union of two trees of some sizes, as ``merged`` gives it; return its size, the root included."""
    from stree.retrieval import compiled  # imports numba

    return int(compiled.merge(*first[:3], first_size, *second[:3], second_size, *out))


def _as_nodes(found: Continuations) -> Nodes:
    """Write lists into arrays."""
    nodes = Nodes.empty(len(found.tokens))
    nodes.tokens[1:], nodes.parents[1:], nodes.values[1:] = found
    return nodes
