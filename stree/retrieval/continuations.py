"""A tree of likely continuations, as arrays for compiled code and as plain lists."""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np

__all__ = ["Continuations", "Nodes"]


class Continuations(NamedTuple):
    """Nodes below a root, most probable first, so that a prefix of the lists is the tree of a smaller budget.

    Attributes:
        tokens: token of each node.
        parents: 0 for the root, i for the i-th node; every parent comes before its children.
        values: estimated probability of each node's path, at most its parent's.
    """

    tokens: list[int]
    parents: list[int]
    values: list[float]


class Nodes(NamedTuple):
    """Arrays of a tree, the root at index 0, padded to n nodes.

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
        """Allocate trees of a root and ``shape[-1]`` padding nodes; further dimensions come before."""
        size = (*shape[:-1], shape[-1] + 1)
        values = np.zeros(size)
        values[..., 0] = 1
        return cls(np.zeros(size, np.int64), np.full(size, -1, np.int32), values, np.zeros(size, np.int32))

    def row(self, index: int) -> Self:
        """Return a view of one row of a batch."""
        return type(self)(*(array[index] for array in self))

    def below_root(self, size: int) -> Continuations:
        """List the nodes below the root of a tree of ``size`` nodes."""
        return Continuations(*(array[1:size].tolist() for array in self[:3]))
