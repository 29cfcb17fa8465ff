"""Recursive speculative decoding (arXiv 2402.14160): constant branching (RSD-C) and stochastic beam search (RSD-S)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stree.checks import check_sizes, integers
from stree.growth.acceptance_model import AcceptanceModel, DraftProbability, PathProbability, Slots, spent_before
from stree.growth.base import BaseGrowth
from stree.growth.plan import Layer, Plan
from stree.growth.static import Static
from stree.sampling import MAX_RANKS, Random

__all__ = ["RSDC", "RSDS"]

LEAST_RATE = 1e-300  # keeps a waiting time finite where no probability is left


@dataclass(frozen=True)
class RSDC(BaseGrowth):
    """The same number of children for every node of a depth (RSD-C, arXiv 2402.14160; MCSD, arXiv 2401.06706).

    The papers keep the largest of Gumbel-perturbed log-probabilities; that is drawing without replacement, as
    ``Static`` draws.

    Args:
        widths: children of a node, by depth.

    Raises:
        TypeError: a width that is no integer.
        ValueError: no width, or one below 1.
    """

    widths: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", integers("widths", self.widths))
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"{type(self).__name__} needs widths of at least 1, got {list(self.widths)}")

    def plan(self, budget: int) -> Plan:
        """Return the plan of the tree, whose nodes are ordered by depth."""
        return Static(self.widths).plan(budget)


@dataclass(frozen=True)
class RSDS(BaseGrowth):
    """Every level keeps the nodes of the greatest perturbed path log-probability (RSD-S, arXiv 2402.14160).

    The paper perturbs log-probabilities by Gumbel noise, conditioned so that the best child has its parent's value, and
    keeps ``width`` of them per level.  With t = exp(-value) that is a race of arrival times: the first child of a node
    that arrived at t arrives at t as well, and each further one after an exponential waiting time, whose rate is the
    path probability of the tokens not yet drawn.  So children are drawn without replacement as in every growth, and
    arrival times need one random number per draw instead of one per vocabulary entry.  Siblings are ordered by arrival,
    and an arrival time is known before the token that arrives.

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
        """Return the plan of the levels.

        Raises:
            ValueError: more nodes than the budget.
        """
        nodes = self.width * self.depth
        if nodes + 1 > budget:
            raise ValueError(f"a tree of {nodes + 1} nodes (root included) exceeds the budget of {budget}")
        return Plan((Layer(self.width, self.width),) * self.depth, nodes, is_fixed=True)

    def acceptance_model(self, batch: int, device: torch.device) -> AcceptanceModel:
        """Return the race of paths; at temperature 0 the path probabilities."""
        return PathProbability() if self.sampling.is_greedy else ArrivalTimes(batch, device)


class ArrivalTimes(DraftProbability):
    """Priorities are inverse arrival times of the race; arrival times are at least 1, that of the root."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self._batch, self._device = batch, device

    def select(self, rows: Tensor) -> ArrivalTimes:
        """Return a model of as many sequences; nothing is learnt of any."""
        return ArrivalTimes(len(rows), self._device)

    def begin(self, plan: Plan, rng: Random) -> None:
        """Draw the waiting times of the whole tree."""
        widths = [1, *(layer.width for layer in plan.layers[:-1])]
        most = max(layer.ranks for layer in plan.layers)
        node = torch.arange(sum(widths), device=self._device)[:, None] * MAX_RANKS + MAX_RANKS // 2
        node = (node + torch.arange(most, device=self._device)).expand(self._batch, -1, -1)
        numbers = rng.uniform("draft", torch.zeros_like(node[..., :1]), node)
        self._waits = iter((-torch.log1p(-numbers)).split(widths, 1))  # for rate 1
        self._times = torch.ones_like(numbers[:, :1, 0])

    def rate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Return inverse arrival times as priorities, and path probabilities as values."""
        values, probs = slots.values[..., None], slots.probs
        above, ranks = probs.shape[1:]
        left = values.double() * (1 - spent_before(probs)).clamp(min=0)
        waits = next(self._waits)[:, :above, :ranks] / left.clamp(min=LEAST_RATE)
        waits[..., 0] = 0  # the first child arrives with its parent
        times = self._times[..., None] + waits.cumsum(-1)
        self._slot_times = times.flatten(1)
        return (probs > 0) * (values > 0) / times, values * probs

    def keep(self, slots: Tensor) -> None:
        """Keep the arrival times of the new nodes for the layer below."""
        self._times = self._slot_times.gather(1, slots)
