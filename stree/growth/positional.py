"""Fixed trees: given widths, drawn without replacement or with it, or the best shape for measured acceptance."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from stree.checks import check_sizes
from stree.growth.acceptance_model import DraftEstimate, Estimate, PathEstimate, Slots
from stree.growth.fixed import Static
from stree.growth.plan import Bound, Plan

__all__ = ["RSDC", "Sequoia", "SpecInfer"]

# Of the bundled pair at temperature 0.8, trees of 32 and 64 nodes on prompts 33-48 of HumanEval, GSM8K and MT-Bench.
RATES = (0.62, 0.092, 0.057, 0.031, 0.021, 0.02, 0.018, 0.014, 0.009, 0.008, 0.006, 0.003)


@dataclass(frozen=True)
class RSDC(Bound):
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
        object.__setattr__(self, "widths", tuple(map(operator.index, self.widths)))
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"RSDC needs widths of at least 1, got {list(self.widths)}")

    def plan(self, budget: int) -> Plan:
        """Lay out the tree; its nodes are ordered by depth."""
        return Static(self.widths).plan(budget)


@dataclass(frozen=True)
class SpecInfer(Bound):
    """The same number of children for every node of a depth, drawn with replacement (SpecInfer, arXiv 2305.09781).

    Siblings may carry the same token; each is a node and is tested, as multi-step speculative sampling wants it.  A
    baseline: drawn without replacement (``RSDC``) as many nodes accept more.

    Args:
        widths: children of a node, by depth (the paper's expansion configuration).

    Raises:
        TypeError: a width that is no integer.
        ValueError: no width, or one below 1.
    """

    widths: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(map(operator.index, self.widths)))
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"SpecInfer needs widths of at least 1, got {list(self.widths)}")

    def plan(self, budget: int) -> Plan:
        """Lay out the tree; its nodes are ordered by depth."""
        return replace(Static(self.widths).plan(budget), drawing="independent")

    def estimate(self, batch: int, device: torch.device) -> Estimate:
        """Rate by the draft's own probabilities."""
        return PathEstimate() if self.sampling.is_greedy else _Repeated()


class _Repeated(DraftEstimate):
    """Children drawn with replacement: what the elder siblings drew takes nothing away."""

    def rate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Rate every slot alike: all of them are nodes."""
        reach, probs = slots.reach[..., None], slots.probs
        return reach * (probs > 0), reach * probs


@dataclass(frozen=True)
class Sequoia(Bound):
    """The fixed tree of a budget that accepts most if acceptance depends on sibling rank alone (arXiv 2402.12374).

    The paper finds it by dynamic programming; taking the node of the greatest value, the product of the rates on its
    path, one after the other gives the same tree, as rates do not grow with rank.

    Args:
        depth: most draft calls.
        rates: how often the child of each rank is the accepted one.

    Raises:
        TypeError: a depth that is no integer.
        ValueError: a depth below 1, or rates that are none, grow, leave (0, 1] or sum to more than 1.
    """

    depth: int = 6
    rates: Sequence[float] = RATES

    def __post_init__(self) -> None:
        rates = tuple(self.rates)
        object.__setattr__(self, "rates", rates)
        check_sizes(depth=self.depth)
        is_probs = bool(rates) and min(rates) > 0 and sum(rates) <= 1 + 1e-9  # False where one is NaN
        if not is_probs or list(rates) != sorted(rates, reverse=True):
            raise ValueError(f"rates must be positive, not growing, and sum to at most 1, got {list(rates)}")

    def plan(self, budget: int) -> Plan:
        """Lay out the best tree of the budget."""
        parents = best_parents(budget, self.depth, tuple(self.rates))
        return Static(parents).plan(budget)


@lru_cache(maxsize=256)
def best_parents(num_nodes: int, depth: int, rates: tuple[float, ...]) -> tuple[int, ...]:
    """List the parents of the best tree of so many nodes, root included, or of the whole tree if that is smaller."""
    parents: list[int] = []
    heap: list[tuple[float, int, int, int, float]] = [
        (-1.0, 0, -1, 0, 1.0)
    ]  # value, depth, parent, rank, parent's value
    while heap and len(parents) < num_nodes:
        negative, level, parent, rank, above = heapq.heappop(heap)
        node = len(parents)
        parents.append(parent)
        if level and rank + 1 < len(rates):
            heapq.heappush(heap, (-above * rates[rank + 1], level, parent, rank + 1, above))
        if level < depth:
            heapq.heappush(heap, (negative * rates[0], level + 1, node, 0, -negative))
    return tuple(parents)
