"""The vocabulary of growth: slots, layers of them, and the plan that a drafter fills.

A slot is a place for one more child under a node; it has a rank among its siblings and a value, the estimated
probability that verification gets as far as testing it (also called reach).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

from stree.growth.acceptance_model import DraftEstimate, Estimate, PathEstimate
from stree.kernels.tree_growth.api import choose
from stree.kernels.tree_growth.operands import Terms
from stree.sampling import Sampling

__all__ = ["Bound", "Drawing", "Growth", "Layer", "Limited", "Plan", "Wrapped", "choose_slots"]

# How children come about when sampling: drawn without replacement, drawn with it, or the most probable ones, which are
# chosen without chance (kind DELTA).  At temperature 0 every growth takes the most probable ones.
Drawing = Literal["distinct", "independent", "top"]


@dataclass(frozen=True, slots=True)
class Layer:
    """One depth of a plan.

    Attributes:
        width: nodes of the layer, padding included.
        ranks: children offered by each node of the layer above.
        slots: the chosen slots, parent's place in its layer x ranks + rank, or None to choose by value.
        leaves: the next best slots, which become nodes that get no children and are not run.
        below: values of the best nodes that typically grow below a node of this layer, relative to it, best first;
            slots are taken as far as the budget lasts if what is worth as much below them is taken, too.  None to go
            by a threshold.
    """

    width: int
    ranks: int
    slots: tuple[int, ...] | None = None
    leaves: int = 0
    below: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a drafter needs to grow a tree with fixed shapes: a draft call a layer.

    Attributes:
        layers: from depth 1 down.
        num_nodes: most drafted nodes, the root not counted.
        threshold: a slot chosen by value needs at least this one, but for a layer's equal share of the nodes still
            to come, which is taken whatever its value: the budget is paid for anyway.
        is_pruned: deterministic children only: grow every layer to its width, keep the best ``num_nodes`` in the end.
        is_heap: one node a draft call, always at the slot of the greatest value.
        drawing: how children come about when sampling.
        is_fixed: needs its nodes whatever the budget.
    """

    layers: tuple[Layer, ...]
    num_nodes: int
    threshold: float = 0.0
    is_pruned: bool = False
    is_heap: bool = False
    drawing: Drawing = "distinct"
    is_fixed: bool = False


class Growth(Protocol):
    """A policy for growing trees."""

    @property
    def sampling(self) -> Sampling:
        """What children are drawn with."""
        ...

    def bind(self, sampling: Sampling) -> Growth:
        """Give this policy for children drawn under ``sampling``.

        At temperature 0 children are the top-k, kind DELTA.
        """
        ...

    def plan(self, budget: int) -> Plan:
        """Lay out a tree of at most ``budget`` nodes, root included.

        Raises:
            ValueError: a fixed shape larger than the budget.
        """
        ...

    def estimate(self, batch: int, device: torch.device) -> Estimate:
        """Begin to rate the slots of one run's trees; what is learnt on the way stays in what is returned."""
        ...


@dataclass(frozen=True)
class Bound:
    """The sampling that a growth draws with."""

    sampling: Sampling = field(default=Sampling(), kw_only=True)

    def bind(self, sampling: Sampling) -> Self:
        """Give this policy for children drawn under ``sampling``."""
        return replace(self, sampling=sampling)

    def estimate(self, batch: int, device: torch.device) -> Estimate:
        """Rate by the draft's own probabilities."""
        return PathEstimate() if self.sampling.is_greedy else DraftEstimate()


@dataclass(frozen=True)
class Wrapped:
    """Another growth, changed.

    Args:
        base: the other.

    Raises:
        TypeError: a base that is none.
    """

    base: Growth

    def __post_init__(self) -> None:
        if isinstance(self.base, type) or not hasattr(self.base, "plan"):
            raise TypeError(f"base must be a growth such as Chain(4), got {self.base!r:.80}")

    @property
    def sampling(self) -> Sampling:
        """What children are drawn with."""
        return self.base.sampling

    def bind(self, sampling: Sampling) -> Self:
        """Give this policy for children drawn under ``sampling``."""
        return replace(self, base=self.base.bind(sampling))

    def plan(self, budget: int) -> Plan:
        """Lay out the other's tree."""
        return self.base.plan(budget)

    def estimate(self, batch: int, device: torch.device) -> Estimate:
        """Begin the other's estimate."""
        return self.base.estimate(batch, device)


@dataclass(frozen=True)
class Limited(Wrapped):
    """Another growth, cut at a depth; what it learns is the other's.

    Args:
        base: a growth that has a depth.
        depth: most layers.
    """

    depth: int

    def plan(self, budget: int) -> Plan:
        """Lay out the other's tree for this depth."""
        return _cut(self.base, self.depth).plan(budget)


def _cut(growth: Any, depth: int) -> Growth:
    """Give a growth, or the one inside it, another depth."""
    if isinstance(growth, Wrapped):
        return replace(growth, base=_cut(growth.base, depth))
    return replace(growth, depth=depth)  # type: ignore[no-any-return]


def choose_slots(
    layer: Layer, value: Tensor, left: Tensor | None, threshold: float, layers_left: int
) -> tuple[Tensor, Tensor]:
    """Choose the slots of a layer.

    Args:
        layer: the plan's layer.
        value: float[batch, above x ranks], value of each slot; 0 where there is none.  Of drawn siblings a later one
            never has the greater value, so an earlier one is never passed over.
        left: int64[batch], nodes that the budget still allows; None where the layer is grown to its width.
        threshold: least value, where the layer does not say what grows below it.
        layers_left: an equal share of what is left, for so many layers, is taken whatever its value.

    Returns:
        int64[batch, width + leaves] slots and bool[batch, width + leaves], whether each is taken.
    """
    if layer.slots is not None:
        index = _on_device(layer.slots, value.device).expand(value.shape[0], -1)
        return index, value.gather(1, index) > 0
    below = None if layer.below is None else _on_device(layer.below[::-1], value.device)
    return choose(value, left, below, Terms(layer.width + layer.leaves, threshold, layers_left))


@cache  # captured steps read them: none may be dropped
def _on_device(numbers: tuple[int, ...] | tuple[float, ...], device: torch.device) -> Tensor:
    """Put what a layer says on a device, once."""
    is_whole = bool(numbers) and isinstance(numbers[0], int)
    return torch.tensor(numbers, dtype=torch.long if is_whole else torch.float32, device=device)
