"""Static trees: a shape that is given beforehand."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from stree.checks import integers
from stree.growth.base import BaseGrowth
from stree.growth.plan import Layer, Plan

__all__ = ["Static"]


@dataclass(frozen=True)
class Static(BaseGrowth):
    """A fixed tree.

    ``Static([3, 2])`` gives the root 3 children and each of them 2; ``Static([-1, 0, 0, 1])``, a list that starts with
    -1, names the parent of every node (SpecInfer and STree call it a token tree configuration).

    Args:
        shape: widths by depth, or parents.

    Raises:
        TypeError: an entry that is no integer.
        ValueError: an empty shape, a width below 1, or parents that are no tree in topological order.
    """

    shape: Sequence[int]

    def __post_init__(self) -> None:
        shape = integers("shape", self.shape)
        object.__setattr__(self, "shape", shape)
        if not shape:
            raise ValueError("Static needs widths or parents, got an empty list")
        if shape[0] != -1:
            if min(shape) < 1:
                raise ValueError(f"every width must be at least 1, got {list(shape)}")
        elif any(not 0 <= parent < node for node, parent in enumerate(shape[1:], 1)):
            raise ValueError(f"parents must name an earlier node each, got {list(shape)}")

    @classmethod
    def stree(cls) -> Static:
        """Return the 12-node, depth-4 tree of the STree paper's headline runs (arXiv 2505.14969)."""
        return cls([-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 7])

    def plan(self, budget: int) -> Plan:
        """Return the plan of the tree, whose nodes are ordered by depth."""
        layers = self._layers()
        nodes = sum(layer.width for layer in layers)
        if nodes + 1 > budget:
            raise ValueError(f"a tree of {nodes + 1} nodes (root included) exceeds the budget of {budget}")
        return Plan(tuple(layers), nodes, is_fixed=True)

    def _layers(self) -> list[Layer]:
        """Order the nodes by depth and number their slots."""
        if self.shape[0] != -1:
            sizes = list(accumulate(self.shape, operator.mul))
            return [Layer(size, ranks, tuple(range(size))) for size, ranks in zip(sizes, self.shape, strict=True)]
        above, layers = [0], []
        while above:
            children = [[node for node, parent in enumerate(self.shape) if parent == upper] for upper in above]
            ranks = max(map(len, children))
            slots = tuple(index * ranks + rank for index, nodes in enumerate(children) for rank in range(len(nodes)))
            above = [node for nodes in children for node in nodes]
            if above:
                layers.append(Layer(len(slots), ranks, slots))
        return layers
