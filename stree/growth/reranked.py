"""Trees of the most probable tokens: grown wide, the best nodes kept in the end; deterministic at any temperature."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stree.checks import check_sizes
from stree.growth.acceptance_model import Estimate, PathEstimate
from stree.growth.plan import Bound, Layer, Plan
from stree.sampling import Random

__all__ = ["Eagle2", "OptTree"]


@dataclass(frozen=True)
class OptTree(Bound):
    """The tree of the greatest expected acceptance under the draft's own probabilities (OPT-Tree, arXiv 2406.17276).

    A node's value is its path probability, and their sum the expected number of accepted nodes.  Every layer runs the
    best nodes of the layer above, as many as the budget has; growth stops when a layer adds too little to the sum.
    Children are chosen without chance, so MATCH verifies them at every temperature.

    Args:
        depth: most draft calls.
        least_gain: growth stops after a layer that adds no more accepted nodes than this; a draft call over a target
            step is about what a layer should add.

    Raises:
        TypeError: a depth that is no integer.
        ValueError: a depth below 1, or a gain that is negative.
    """

    depth: int = 10
    least_gain: float = 0.5

    def __post_init__(self) -> None:
        check_sizes(depth=self.depth)
        if not self.least_gain >= 0:
            raise ValueError(f"least_gain must not be negative, got {self.least_gain}")

    def plan(self, budget: int) -> Plan:
        """Lay out layers of the whole budget each."""
        nodes = budget - 1
        layers = (Layer(nodes, nodes),) * (self.depth if nodes else 0)
        return Plan(layers, nodes, is_pruned=True, drawing="top")

    def estimate(self, batch: int, device: torch.device) -> Estimate:
        """Rate by the draft's own probabilities, and stop by them."""
        return _Gain(self.least_gain)


@dataclass(frozen=True)
class Eagle2(Bound):
    """Beams of the most probable paths, then the best of all candidates (EAGLE-2, arXiv 2406.16858).

    Every draft call runs a beam; its nodes offer as many children as the beam is wide, the best of which are the next
    beam, and the best nodes of all layers become the tree.  A node's parent is never of less value and comes before
    it, so ties keep no child without its parent.  Children are chosen without chance, so MATCH verifies them at every
    temperature.

    Args:
        depth: most draft calls.
        beam: most nodes of a draft call, and most children of a node.

    Raises:
        TypeError: a size that is no integer.
        ValueError: a size below 1.
    """

    depth: int = 6
    beam: int = 10

    def __post_init__(self) -> None:
        check_sizes(depth=self.depth, beam=self.beam)

    def plan(self, budget: int) -> Plan:
        """Lay out the beams; candidates beyond them are leaves."""
        nodes = budget - 1
        layers: list[Layer] = []
        above = 1
        for _ in range(self.depth if nodes else 0):
            candidates = min(nodes, above * self.beam)  # more are never among the best
            above = min(self.beam, candidates)
            layers.append(Layer(above, self.beam, leaves=candidates - above))
        if layers:  # nothing is run below the last layer
            layers[-1] = Layer(layers[-1].width + layers[-1].leaves, self.beam)
        return Plan(tuple(layers), nodes, is_pruned=True, drawing="top")

    def estimate(self, batch: int, device: torch.device) -> Estimate:
        """Rate by the draft's own probabilities."""
        return PathEstimate()


class _Gain(PathEstimate):
    """Path probabilities, and what each layer adds to the sum of the best."""

    def __init__(self, least: float) -> None:
        self._least, self._num_nodes = least, 0
        self._best: Tensor | None = None  # values of the best nodes so far, as many as the budget has

    def begin(self, plan: Plan, rng: Random) -> None:
        """Begin with no nodes."""
        self._num_nodes, self._best = plan.num_nodes, None

    def goes_on(self, values: Tensor) -> Tensor:
        """Compare the sum of the best nodes with and without a layer."""
        known = values if self._best is None else torch.cat([self._best, values], 1)
        best = known.sort(1, descending=True).values[:, : self._num_nodes]
        # In float64 the sums do not depend on how many zeros are among the values.
        before = 0.0 if self._best is None else self._best.sum(1, dtype=torch.float64)
        self._best = best
        return best.sum(1, dtype=torch.float64) - before > self._least
