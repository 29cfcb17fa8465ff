"""The default growth: trees grown by learnt acceptance probabilities."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache

import torch

from stree.checks import check_sizes
from stree.growth.acceptance_model import AcceptanceModel
from stree.growth.base import BaseGrowth
from stree.growth.learned_acceptance import GreedyAcceptance, SampledAcceptance
from stree.growth.plan import Layer, Plan

__all__ = ["Calibrated", "typical_rate", "typical_values"]

GREEDY_RANKS = 8
ROOT_RANKS = 12


@dataclass(frozen=True)
class Calibrated(BaseGrowth):
    """A tree grown by acceptance probabilities that are learnt while generating.

    A sampled child is accepted about equally often whatever its own draft probability, so trees grown by DySpec's
    estimate are too wide and too shallow.  Here a slot's priority is the probability that its child is accepted, from a
    table by sibling rank and sharpness of the draft distribution, which counts the verifier's own tests
    (``SampledAcceptance``).  Slots are taken layer by layer before their tokens are drawn, and every drawn token stays.
    A layer takes its best slots as far as the budget also covers what typically grows below them with at least the same
    value, so a tree whose first slots have high priorities grows deep, another one wide.

    At temperature 0 the nodes of the greatest value are kept: the product of the probabilities, by rank and draft
    probability, that the draft's tokens are the target's own, corrected by the text so far (``GreedyAcceptance``).

    Args:
        depth: most draft calls; None for 4, and 6 where the budget is above 16 (see docs/choosing.md).
        ranks: most children of a node.  None: 8 at temperature 0; when sampling 12 below the root, whose children are
            tested in every step, and below other nodes 4, or 6 where the budget is above 32.

    Raises:
        TypeError: a size that is no integer.
        ValueError: a size below 1.
    """

    depth: int | None = None
    ranks: int | None = None

    def __post_init__(self) -> None:
        check_sizes(depth=self.depth, ranks=self.ranks)

    def plan(self, budget: int) -> Plan:
        """Return the plan of the widest tree that the budget allows."""
        nodes = budget - 1
        is_greedy = self.sampling.is_greedy
        ranks = min(self.ranks or (GREEDY_RANKS if is_greedy else 6 if budget > 32 else 4), nodes)
        root_ranks = ranks if is_greedy or self.ranks else min(ROOT_RANKS, nodes)
        depth = self.depth or (6 if budget > 16 else 4)
        layers: list[Layer] = []
        width = 1
        for level in range(1, depth + 1 if nodes else 1):
            slots_each = root_ranks if level == 1 else ranks
            width = min(nodes, width * slots_each)
            below = None if is_greedy else typical_values(nodes, depth - level, ranks)
            layers.append(Layer(width, slots_each, below=below))
        return Plan(tuple(layers), nodes, is_pruned=is_greedy)

    def acceptance_model(self, batch: int, device: torch.device) -> AcceptanceModel:
        """Return a new model that has learnt nothing."""
        if self.sampling.is_greedy:
            return GreedyAcceptance(batch, self.ranks or GREEDY_RANKS, device)
        return SampledAcceptance(batch, self.ranks or ROOT_RANKS, device)


def typical_rate(rank: int) -> float:
    """Return how often a drawn child of a rank is accepted once its earlier siblings were rejected.

    Approximates the bundled pair at temperatures 0.6 to 1, 48 prompts: 0.6, 0.28, 0.18, 0.14, 0.12, 0.1.
    """
    return 0.6 / (1 + rank)


@lru_cache(maxsize=1024)
def typical_values(nodes: int, depth: int, ranks: int) -> tuple[float, ...]:
    """Return the values of the best nodes below a node of value 1 under typical acceptance rates, best first.

    Args:
        nodes: most values.
        depth: layers below the node.
        ranks: most children of a node.
    """
    # Negative value, depth, rank, probability that the node is tested.
    heap = [(-typical_rate(0), 1, 0, 1.0)] if depth else []
    values: list[float] = []
    while heap and len(values) < nodes:
        negative, level, rank, tested = heapq.heappop(heap)
        values.append(-negative)
        if level < depth:
            heapq.heappush(heap, (negative * typical_rate(0), level + 1, 0, -negative))
        if rank + 1 < ranks:
            left = tested * (1 - typical_rate(rank))
            heapq.heappush(heap, (-left * typical_rate(rank + 1), level, rank + 1, left))
    return tuple(values)
