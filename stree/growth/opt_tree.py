"""OPT-Tree (arXiv 2406.17276): the tree of the greatest expected acceptance, without randomness."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stree.checks import check_numbers, check_sizes
from stree.growth.acceptance_model import AcceptanceModel, PathProbability
from stree.growth.base import BaseGrowth
from stree.growth.plan import Layer, Plan
from stree.sampling import Random

__all__ = ["OptTree"]


@dataclass(frozen=True)
class OptTree(BaseGrowth):
    """The tree of the greatest expected acceptance under the draft's own probabilities (OPT-Tree, arXiv 2406.17276).

    A node's value is its path probability, and their sum the expected number of accepted nodes.  Every layer runs the
    best nodes of the layer above, as many as the budget has; growth stops when a layer adds too little to the sum.
    Children are the most probable tokens at every temperature, so MATCH verifies them.

    Args:
        depth: most draft calls.
        least_gain: growth stops after a layer that adds no more accepted nodes than this; the cost of a draft call
            relative to that of a target step is a good choice.

    Raises:
        TypeError: a depth that is no integer.
        ValueError: a depth below 1, or a gain that is negative.
    """

    depth: int = 10
    least_gain: float = 0.5

    def __post_init__(self) -> None:
        check_sizes(depth=self.depth)
        check_numbers(least_gain=self.least_gain)
        if not self.least_gain >= 0:
            raise ValueError(f"least_gain must not be negative, got {self.least_gain}")

    def plan(self, budget: int) -> Plan:
        """Return a plan whose layers have the whole budget each."""
        nodes = budget - 1
        layers = (Layer(nodes, nodes),) * (self.depth if nodes else 0)
        return Plan(layers, nodes, is_pruned=True, drawing="top")

    def acceptance_model(self, batch: int, device: torch.device) -> AcceptanceModel:
        """Return the path probabilities, with the rule that stops by the gain of a layer."""
        return _ExpectedGain(self.least_gain)


class _ExpectedGain(PathProbability):
    """Path probabilities, and a stop where a layer adds too little to the sum of the best nodes."""

    def __init__(self, least: float) -> None:
        self._least, self._num_nodes = least, 0
        self._best: Tensor | None = None  # values of the best nodes so far, as many as the budget has

    def begin(self, plan: Plan, rng: Random) -> None:
        """Begin with no nodes."""
        self._num_nodes, self._best = plan.num_nodes, None

    def goes_on(self, values: Tensor) -> Tensor:
        """Compare the sums of the best nodes with and without the new layer: bool[batch]."""
        candidates = values if self._best is None else torch.cat([self._best, values], 1)
        best = candidates.sort(1, descending=True).values[:, : self._num_nodes]
        # In float64 the sums do not depend on how many zeros are among the values.
        before = 0.0 if self._best is None else self._best.sum(1, dtype=torch.float64)
        self._best = best
        return best.sum(1, dtype=torch.float64) - before > self._least
