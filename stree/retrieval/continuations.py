"""A tree of likely continuations, as arrays for compiled code."""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np

__all__ = ["Nodes"]


class Nodes(NamedTuple):
    """Arrays of a tree, the root at index 0, padded to n nodes.

    Nodes are most probable first, so that the first ones are the tree of a smaller budget, and parents come first.

    Attributes:
        tokens: int64[n]; 0 for padding.
        parents: int32[n]; -1 for the root and padding.
        values: float64[n], estimated probability of each node's path; 1 for the root, 0 for padding.
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
