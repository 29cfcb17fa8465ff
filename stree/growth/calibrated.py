"""Trees grown where the target is likely to follow."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache

import torch

from stree.checks import check_sizes
from stree.growth.acceptance_model import Calibration, Estimate, RankEstimate
from stree.growth.plan import Bound, Layer, Plan

__all__ = ["Calibrated"]

MOST_RANKS = 6
GREEDY_RANKS = 8
ROOT_RANKS = 12
MOST_DEPTH = 6
# Acceptance by sibling rank, the elder ones refused: the bundled pair at temperatures 0.6 to 1, 48 prompts.
TYPICAL = (0.6, 0.28, 0.18, 0.14, 0.12, 0.1)


@dataclass(frozen=True)
class Calibrated(Bound):
    """A tree grown where the target is likely to follow, by an estimate that is learnt while generating.

    A sampled child is accepted about as often whatever its own draft probability, so DySpec's estimate makes sampled
    trees too wide and too shallow.  Here a slot's value is the probability that its child is accepted, from a table by
    sibling rank and by how sharp the draft's distribution is, counted from the verifier's own log.  Slots are taken
    layer by layer before their tokens are drawn, and what is drawn stays.  A layer takes its best slots as far as the
    budget lasts if all that typically grows below them and is worth as much is taken, too: a tree whose first slots
    are good grows deep, another wide.  At temperature 0 the nodes of the greatest value are kept, the product of the
    chances that draft tokens of such ranks and probabilities are the target's own; how much surer a text is than texts
    at large is learnt from what it accepts, and what it says already, behind the same token or two, counts for more.

    Args:
        depth: most draft calls; None for 4, and 6 where the budget is above 16 (the README beside this file says why).
        ranks: most children of a node; None for 8 without chance; where they are drawn for 4, and 6 where the budget is
            above 32, but for the root: 12, as every step tests the root's first.

    Raises:
        TypeError: a size that is no integer.
        ValueError: a size below 1.
    """

    depth: int | None = None
    ranks: int | None = None

    def __post_init__(self) -> None:
        check_sizes(depth=self.depth, ranks=self.ranks)

    def plan(self, budget: int) -> Plan:
        """Lay out the widest tree that the budget allows."""
        nodes = budget - 1
        greedy = self.sampling.is_greedy
        ranks = min(self.ranks or (GREEDY_RANKS if greedy else MOST_RANKS if budget > 32 else 4), nodes)
        depth = self.depth or (MOST_DEPTH if budget > 16 else 4)
        offered = ranks if greedy or self.ranks else min(ROOT_RANKS, nodes)  # by the root, then by every other node
        layers: list[Layer] = []
        above = 1
        for level in range(1, depth + 1 if nodes else 1):
            above = min(nodes, above * offered)
            below = None if greedy else typical_values(nodes, depth - level, ranks)
            layers.append(Layer(above, offered, below=below))
            offered = ranks
        return Plan(tuple(layers), nodes, is_pruned=greedy)

    def estimate(self, batch: int, device: torch.device) -> Estimate:
        """Begin to learn."""
        if self.sampling.is_greedy:
            return RankEstimate(batch, self.ranks or GREEDY_RANKS, device)
        return Calibration(batch, self.ranks or ROOT_RANKS, device, self.sampling.temperature)


@lru_cache(maxsize=1024)
def typical_values(nodes: int, depth: int, ranks: int) -> tuple[float, ...]:
    """List the values of the best nodes below a node of value 1 under typical acceptance by rank, best first.

    Args:
        nodes: most values.
        depth: layers below the node.
        ranks: most children of a node.
    """
    chances = [TYPICAL[min(rank, len(TYPICAL) - 1)] for rank in range(ranks)]
    # Negative value, depth, rank, probability that its test is made.
    heap = [(-chances[0], 1, 0, 1.0)] if depth else []
    values: list[float] = []
    while heap and len(values) < nodes:
        negative, level, rank, tested = heapq.heappop(heap)
        values.append(-negative)
        if level < depth:
            heapq.heappush(heap, (negative * chances[0], level + 1, 0, -negative))
        if rank + 1 < ranks:
            left = tested * (1 - chances[rank])
            heapq.heappush(heap, (-left * chances[rank + 1], level, rank + 1, left))
    return tuple(values)
