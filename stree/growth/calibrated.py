"""Trees grown where the target is likely to follow."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache

import torch

from stree.growth.estimates import Calibration, Estimate, PathEstimate
from stree.growth.plan import Bound, Layer, Plan

__all__ = ["Calibrated"]

MOST_RANKS = 6
TYPICAL = (0.58, 0.25, 0.22, 0.12)  # acceptance by sibling rank on the bundled pair, temperature 0.8


@dataclass(frozen=True)
class Calibrated(Bound):
    """A tree grown where the target is likely to follow, by an estimate that is learnt while generating.

    A sampled child is accepted about as often whatever its own draft probability, so DySpec's estimate makes sampled
    trees too wide and too shallow.  Here a slot's value is the probability that its child is accepted, from a table by
    sibling rank and by how sharp the draft's law is, counted from the verifier's own log.  Slots are taken layer by
    layer before their tokens are drawn, and what is drawn stays.  At temperature 0 it is DySpec's tree: the nodes of
    the greatest path probability.

    Args:
        depth: most draft calls.
        ranks: most children of a node; None for 4, and 6 where the budget is above 32.
        threshold: least value of a slot; None for the value of the last node of the best tree of this budget and depth
            under typical acceptance.  A layer's equal share of the nodes still to come is taken whatever its value.

    Raises:
        ValueError: a size below 1, or a threshold outside [0, 1).
    """

    depth: int = 4
    ranks: int | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        for name, size in (("depth", self.depth), ("ranks", self.ranks)):
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if self.threshold is not None and not 0 <= self.threshold < 1:
            raise ValueError(f"threshold must be in [0, 1), got {self.threshold}")

    def plan(self, budget: int) -> Plan:
        """Lay out the widest tree that the budget allows."""
        nodes = budget - 1
        threshold = least_value(nodes, self.depth) if self.threshold is None else self.threshold
        ranks = self.ranks or (MOST_RANKS if budget > 32 else 4)
        layers: list[Layer] = []
        above = 1
        for _ in range(self.depth if nodes else 0):
            above = min(nodes, above * ranks)
            layers.append(Layer(above, ranks))
        return Plan(tuple(layers), nodes, threshold, is_pruned=self.sampling.is_greedy)

    def estimate(self, batch: int, device: torch.device) -> Estimate:
        """Begin to learn."""
        return PathEstimate() if self.sampling.is_greedy else Calibration(batch, self.ranks or MOST_RANKS, device)


@lru_cache(maxsize=256)
def least_value(nodes: int, depth: int) -> float:
    """Give the value of the last node of the best tree of so many nodes under typical acceptance by rank."""
    heap, value = [(-TYPICAL[0], 1, 0, 1.0)], 0.0  # negative value, depth, rank, probability that its test is made
    for _ in range(nodes):
        if not heap:
            return 0.0
        negative, level, rank, tested = heapq.heappop(heap)
        value = -negative
        if level < depth:
            heapq.heappush(heap, (-value * TYPICAL[0], level + 1, 0, value))
        if rank + 1 < len(TYPICAL):
            left = tested * (1 - TYPICAL[rank])
            heapq.heappush(heap, (-left * TYPICAL[rank + 1], level, rank + 1, left))
    return value
