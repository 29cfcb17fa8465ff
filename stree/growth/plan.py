"""The plan of a draft tree, layer by layer, and the choice of the slots that become nodes.

Terms that the whole package uses:

* node: a token of the draft tree.  Node 0 is the root, the pending token; drafted nodes follow layer by layer.
* rank: number of a child among its siblings, from 0, in the order in which verification tests them.
* slot: a possible child of a node, given by its parent and its rank.  The slots below a layer are numbered parent's
  index in its layer x ranks + rank.
* value of a node: estimated probability that the target accepts it together with all its ancestors.
* priority of a slot: the same probability before the token is drawn, so it does not depend on that token.
* column: index in the arrays of the draft model's own tree, which begins with the last token before the root, as the
  draft model has not run that one yet.  Node i is column i + 1.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from stree.checks import check_counts, check_numbers, check_object, check_one_of
from stree.kernels.constants import constant
from stree.kernels.tree_growth.api import choose
from stree.kernels.tree_growth.operands import Terms

__all__ = ["Drawing", "Layer", "Plan", "checked_plan", "choose_slots"]

# How children are obtained when sampling: drawn without replacement, drawn with replacement, or the most probable
# tokens, taken without randomness (kind DELTA).  At temperature 0 every growth takes the most probable tokens.
Drawing = Literal["distinct", "independent", "top"]
NO_SHARE = 1 << 30  # layers among which no node is left for each


@dataclass(frozen=True, slots=True)
class Layer:
    """One depth of a plan.

    Attributes:
        width: nodes of the layer, padding included; 0 where a budget of 1 leaves none.
        ranks: slots below each node of the layer above.
        slots: the slots that become nodes, or None to choose them by priority.
        leaves: how many of the next best slots become nodes without children, which the draft model does not run.
        below: values, relative to a node of this layer, of the best nodes that typically grow below it, best first.
            A slot is taken if the budget also covers all nodes of at least its value that are expected below the
            slots before it.  None: choose by the plan's threshold.
        shares: whether slots below the plan's threshold are taken up to an equal share of the remaining nodes.

    Raises:
        TypeError: sizes that are no integers, or ``slots`` that are no tuple.
        ValueError: a width below 0 or ranks below 1, or another number of slots than ``width``.
    """

    width: int
    ranks: int
    slots: tuple[int, ...] | None = None
    leaves: int = 0
    below: tuple[float, ...] | None = None
    shares: bool = True

    def __post_init__(self) -> None:
        check_counts(ranks=self.ranks, width=self.width or 1)  # a width of 0 will do
        if self.slots is None:
            return
        if not isinstance(self.slots, tuple):
            raise TypeError(f"Layer.slots must be a tuple of integers or None, got {self.slots!r:.80}")
        if len(self.slots) != self.width:
            raise ValueError(f"Layer.width must be the number of slots, {len(self.slots)}, got {self.width}")


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a tree that is grown with one draft call per layer.

    Attributes:
        layers: from depth 1 down.
        num_nodes: most drafted nodes, the root not counted.
        threshold: least priority of a slot.  A layer that shares takes at least its equal share of the remaining nodes,
            best slots first, whatever their priority: the target verifies the whole budget in any case.
        is_pruned: grow every layer to its width, keep the best ``num_nodes`` at the end, as EAGLE-2 does.  Drawn
            children may not be dropped by what was drawn, so this needs ``drawing="top"`` where tokens are sampled.
        is_heap: one node per draft call, each at the slot of the greatest priority in the tree.
        drawing: how children are obtained when sampling: "distinct", drawn without replacement; "independent", with
            replacement; "top", the most probable tokens, taken without chance.  At temperature 0 always the last.
        is_fixed: the tree has these nodes whatever the budget.
        max_depth: of a heap's nodes, or None where nothing bounds it; other plans have no more layers than this.

    Raises:
        TypeError: a threshold that is no number.
        ValueError: one that is not finite, or another ``drawing``.
    """

    layers: tuple[Layer, ...]
    num_nodes: int
    threshold: float = 0.0
    is_pruned: bool = False
    is_heap: bool = False
    drawing: Drawing = "distinct"
    is_fixed: bool = False
    max_depth: int | None = None

    def __post_init__(self) -> None:
        check_one_of("Plan.drawing", self.drawing, get_args(Drawing))
        check_numbers(threshold=self.threshold)
        if not math.isfinite(self.threshold):
            raise ValueError(f"Plan.threshold must be finite, got {self.threshold}")


def checked_plan(growth: Any, budget: int) -> Plan:
    """Return a growth's plan; the message of an error names the class and the field.

    Raises:
        TypeError: what is returned is no plan of layers, or the growth cannot be hashed.
        ValueError: more nodes than the budget, slots that are not below the layer before, occur twice, or leave out an
            earlier sibling, or drawn trees that are pruned; also what ``plan`` itself raises.
    """
    if hasattr(growth, "bind") and not hasattr(growth, "plan"):
        raise TypeError(f"{type(growth).__name__} must implement plan(budget), which returns a stree.growth.Plan")
    check_object("growth", growth, "plan", "stree.growth.Chain(4)")
    check_counts(budget=budget)
    plan, name = growth.plan(operator.index(budget)), type(growth).__name__
    try:
        hash(growth)
    except TypeError as error:
        what = "hashable: tuples instead of lists, and rules that are frozen dataclasses"
        raise TypeError(f"the fields of {name} must be {what}: {error}") from error
    if not isinstance(plan, Plan):
        raise TypeError(f"{name}.plan must return a Plan, got {plan!r:.80}")
    if not isinstance(plan.layers, tuple) or not all(isinstance(layer, Layer) for layer in plan.layers):
        raise TypeError(f"{name}.plan must return a Plan whose layers are a tuple of Layer, got {plan.layers!r:.80}")
    if plan.is_pruned and plan.drawing != "top" and not growth.sampling.is_greedy:
        raise ValueError(
            f"{name}.plan({budget}) is pruned, and its children are drawn (drawing={plan.drawing!r}): what is kept "
            "would depend on what was drawn, which is not lossless; take drawing='top'"
        )
    least = max(plan.num_nodes, sum(layer.width for layer in plan.layers if layer.slots is not None))
    if least + 1 > budget:
        raise ValueError(
            f"{name}.plan({budget}) has {least + 1} nodes, root included; plan must raise ValueError for a budget that "
            "is too small for it"
        )
    above = 1
    for depth, layer in enumerate(plan.layers, 1):
        before = set[int]()
        for slot in layer.slots or ():
            rank = slot % layer.ranks
            if not 0 <= slot < above * layer.ranks:
                problem = f"must be below {above * layer.ranks}: {above} nodes above x {layer.ranks} ranks"
            elif slot in before:
                problem = "must not occur twice"
            elif rank and slot - 1 not in before:
                problem = f"is rank {rank} of its parent, so rank {rank - 1}, slot {slot - 1}, must come before it"
            else:
                before.add(slot)
                continue
            raise ValueError(f"{name}.plan({budget}): slot {slot} of layers[{depth - 1}].slots {problem}")
        above = min(layer.width, above * layer.ranks)
    return plan


def choose_slots(
    layer: Layer, priority: Tensor, left: Tensor | None, threshold: float, layers_left: int
) -> tuple[Tensor, Tensor]:
    """Choose the slots of a layer that become nodes.

    Args:
        layer: the plan's layer.
        priority: float[batch, above x ranks], 0 where there is no slot.  Of drawn siblings a later one never has the
            greater priority, so an earlier one is never skipped.
        left: int64[batch], nodes that the budget still allows; None where the layer is grown to its width.
        threshold: least priority, where ``layer.below`` is None.
        layers_left: layers that share ``left``, this one included; a layer that shares takes an equal share of it,
            whatever the priority.

    Returns:
        int64[batch, width + leaves] slots and bool[batch, width + leaves], whether each becomes a node.
    """
    if layer.slots is not None:
        index = _on_device(layer.slots, torch.long, priority.device).expand(priority.shape[0], -1)
        return index, priority.gather(1, index) > 0
    below = None if layer.below is None else _on_device(layer.below[::-1], torch.float32, priority.device)
    terms = Terms(layer.width + layer.leaves, threshold, layers_left if layer.shares else NO_SHARE)
    return choose(priority, left, below, terms)


@constant
def _on_device(numbers: tuple[int, ...] | tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers of a layer to a device, once for each dtype, as (0, 1) and (0.0, 1.0) are one key, and device."""
    return torch.tensor(numbers, dtype=dtype, device=device)
