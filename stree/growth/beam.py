"""Stochastic beam search: the most fortunate paths of every level, in the order in which they arrive."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stree.checks import check_sizes
from stree.growth.acceptance_model import DraftEstimate, Estimate, PathEstimate, Slots, spent_before
from stree.growth.plan import Bound, Layer, Plan
from stree.sampling import MAX_RANKS, Random

__all__ = ["RSDS"]

LEAST_RATE = 1e-300  # keeps a waiting time finite where nothing is left to arrive


@dataclass(frozen=True)
class RSDS(Bound):
    """Every level keeps the nodes of the greatest perturbed path log-probability (RSD-S, arXiv 2402.14160).

    The paper perturbs log-probabilities by Gumbel noise, conditioned so that the best child has its parent's value, and
    keeps ``width`` of them a level.  With t = exp(-value) this is a race: the children of a node that arrived at t
    arrive one after the other from t on, each time one of those left, with the waiting time of a rate that is the path
    probability of all that are left.  So children are drawn without replacement like everyone's, and arrival times
    need a number a draw instead of one a vocabulary entry.  Siblings are in the order of their arrival, and a time
    is known before the token that arrives.

    Args:
        width: nodes of a level.
        depth: levels, and draft calls.

    Raises:
        TypeError: a size that is no integer.
        ValueError: a size below 1.
    """

    width: int
    depth: int

    def __post_init__(self) -> None:
        check_sizes(width=self.width, depth=self.depth)

    def plan(self, budget: int) -> Plan:
        """Lay out the levels.

        Raises:
            ValueError: more nodes than the budget.
        """
        nodes = self.width * self.depth
        if nodes + 1 > budget:
            raise ValueError(f"a tree of {nodes + 1} nodes (root included) exceeds the budget of {budget}")
        return Plan((Layer(self.width, self.width),) * self.depth, nodes, is_fixed=True)

    def estimate(self, batch: int, device: torch.device) -> Estimate:
        """Let paths race; at temperature 0 they are rated by their probability."""
        return PathEstimate() if self.sampling.is_greedy else _Race(batch, device)


class _Race(DraftEstimate):
    """Priority is the inverse of the arrival time, which is at least 1."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self._batch, self._device = batch, device

    def begin(self, plan: Plan, rng: Random) -> None:
        """Draw the waiting times; the root arrives at 1."""
        widths = [1, *(layer.width for layer in plan.layers[:-1])]
        most = max(layer.ranks for layer in plan.layers)
        node = torch.arange(sum(widths), device=self._device)[:, None] * MAX_RANKS + MAX_RANKS // 2
        node = (node + torch.arange(most, device=self._device)).expand(self._batch, -1, -1)
        numbers = rng.uniform("draft", torch.zeros_like(node[..., :1]), node)
        self._waits = iter((-torch.log1p(-numbers)).split(widths, 1))  # for rate 1
        self._times = torch.ones_like(numbers[:, :1, 0])

    def rate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Rate a slot by when its child arrives, whatever its token."""
        reach, probs = slots.reach[..., None], slots.probs
        above, ranks = probs.shape[1:]
        left = reach.double() * (1 - spent_before(probs)).clamp(min=0)
        waits = next(self._waits)[:, :above, :ranks] / left.clamp(min=LEAST_RATE)
        waits[..., 0] = 0  # the eldest arrives with its parent
        times = self._times[..., None] + waits.cumsum(-1)
        self._offered = times.flatten(1)
        return (probs > 0) * (reach > 0) / times, reach * probs

    def note(self, slots: Tensor) -> None:
        """Remember when the new nodes arrived."""
        self._times = self._offered.gather(1, slots)
