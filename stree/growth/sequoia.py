"""Sequoia (arXiv 2402.12374): the best fixed tree for acceptance rates by sibling rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from stree.checks import check_sizes, real_numbers
from stree.growth.base import BaseGrowth
from stree.growth.plan import Plan
from stree.growth.static import Static

__all__ = ["SOURCE", "Sequoia", "best_parents"]

# Measured in trees of 32 and 64 nodes on prompts 33-48 of HumanEval, GSM8K and MT-Bench.
RATES = (0.62, 0.092, 0.057, 0.031, 0.021, 0.02, 0.018, 0.014, 0.009, 0.008, 0.006, 0.003)
SOURCE = "the bundled pair at temperature 0.8"


@dataclass(frozen=True)
class Sequoia(BaseGrowth):
    """The fixed tree of a budget that accepts most if acceptance depends on sibling rank alone (arXiv 2402.12374).

    The paper finds it by dynamic programming.  Taking the nodes in the order of their values, the product of the rates
    on their path, gives the same tree, because rates do not grow with rank.

    Args:
        depth: most draft calls.
        rates: how often the child of each rank is the accepted one, which depends on the pair and the temperature:
            ``stree bench fit-rates`` measures them.  None for those of the bundled pair at temperature 0.8.
        source: what the rates were measured on, for statistics and records.

    Raises:
        TypeError: a depth that is no integer.
        ValueError: a depth below 1, or rates that are none, grow, leave (0, 1] or sum to more than 1.
    """

    depth: int = 6
    rates: Sequence[float] | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            raise TypeError(f"source must be a string, got {self.source!r:.80}")
        is_own = self.rates is not None
        rates, source = (real_numbers("rates", self.rates), "the caller") if is_own else (RATES, SOURCE)
        object.__setattr__(self, "rates", rates)
        object.__setattr__(self, "source", self.source or source)
        check_sizes(depth=self.depth)
        is_probs = bool(rates) and min(rates) > 0 and sum(rates) <= 1 + 1e-9  # False where one is NaN
        if not is_probs or list(rates) != sorted(rates, reverse=True):
            raise ValueError(f"rates must be positive, not growing, and sum to at most 1, got {list(rates)}")

    def plan(self, budget: int) -> Plan:
        """Return the plan of the best tree of the budget."""
        parents = best_parents(budget, self.depth, tuple(self.rates or ()))
        return Static(parents).plan(budget)


@lru_cache(maxsize=256)
def best_parents(num_nodes: int, depth: int, rates: tuple[float, ...]) -> tuple[int, ...]:
    """Return the parents of the best tree of so many nodes, root included, or of the whole tree if that is smaller."""
    parents: list[int] = []
    # Negative value, depth, parent, rank, parent's value.
    heap: list[tuple[float, int, int, int, float]] = [(-1.0, 0, -1, 0, 1.0)]
    while heap and len(parents) < num_nodes:
        negative, level, parent, rank, above = heapq.heappop(heap)
        node = len(parents)
        parents.append(parent)
        if level and rank + 1 < len(rates):
            heapq.heappush(heap, (-above * rates[rank + 1], level, parent, rank + 1, above))
        if level < depth:
            heapq.heappush(heap, (negative * rates[0], level + 1, node, 0, -negative))
    return tuple(parents)
