"""DySpec (arXiv 2410.11744): trees grown at the slots of the greatest draft probability."""

from __future__ import annotations

from dataclasses import dataclass

from stree.checks import check_numbers, check_one_of, check_sizes
from stree.growth.base import BaseGrowth
from stree.growth.plan import Layer, Plan

__all__ = ["DySpec"]

DEPTH = 6  # where none is given, but for the heap form
FORMS = ("layers", "threshold", "heap")


@dataclass(frozen=True)
class DySpec(BaseGrowth):
    """A tree grown at the slots of the greatest draft probability (DySpec, arXiv 2410.11744).

    A slot's priority is the path probability of its parent times the probability that its earlier siblings leave.  The
    "layers" form takes, at every depth, the slots of priority at least ``threshold``, best first, and where they are
    fewer than an equal share of the remaining budget, that share.  The "threshold" form, the paper's for large trees,
    takes no slot below ``threshold``: a tree may end early, and the budget is an upper bound.  Slots are taken before
    their tokens are drawn, and every drawn token stays.  The "heap" form draws one node per draft call, at the best
    slot of the whole tree.  At temperature 0 tokens are known beforehand: the layers form keeps the nodes of the
    greatest path probability, as OPT-Tree (arXiv 2406.17276) and EAGLE-2 do, the threshold form takes those of at least
    the threshold.

    Args:
        depth: most layers; None for 6, and for no bound in the heap form.
        width: most nodes of a layer, or None for the whole budget.
        ranks: most children of a node.
        threshold: least priority of a slot, or None for 1 / budget.
        form: "layers", "threshold" or "heap".

    Raises:
        TypeError: a size that is no integer.
        ValueError: a size below 1, a threshold outside [0, 1), or an unknown form.
    """

    depth: int | None = None
    width: int | None = None
    ranks: int = 4
    threshold: float | None = None
    form: str = "layers"

    def __post_init__(self) -> None:
        check_sizes(depth=self.depth, width=self.width, ranks=self.ranks)
        check_numbers(threshold=0 if self.threshold is None else self.threshold)
        if self.threshold is not None and not 0 <= self.threshold < 1:
            raise ValueError(f"threshold must be in [0, 1), got {self.threshold}")
        check_one_of("form", self.form, FORMS)

    def plan(self, budget: int) -> Plan:
        """Return the plan of the widest tree that the budget allows."""
        nodes = budget - 1
        threshold = 1 / budget if self.threshold is None else self.threshold
        if self.form == "heap":
            return Plan((), nodes, threshold, is_heap=True, max_depth=self.depth)
        width = nodes if self.width is None else min(self.width, nodes)
        layers: list[Layer] = []
        above = 1
        for _ in range((self.depth or DEPTH) if nodes else 0):
            above = min(width, above * self.ranks)
            layers.append(Layer(above, self.ranks, shares=self.form == "layers"))
        is_pruned = self.sampling.is_greedy and self.form == "layers"
        return Plan(tuple(layers), nodes, threshold, is_pruned=is_pruned)
