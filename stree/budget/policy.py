"""Budget policies: a fixed tree size, or the size that a controller chooses by goodput.

The decode loop asks for a size before each step and reports the outcome after it. A choice depends on past steps only,
so it influences the text through nothing but the sizes of the trees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from stree.budget.controller import BudgetController
from stree.budget.goodput import Experience, StepMs
from stree.budget.tree_sizes import PLAIN, Choice, flat_choices, layered_choices
from stree.drafters import Draft
from stree.growth import Growth, Limited
from stree.verify import Acceptance

__all__ = ["AutoBudget", "BudgetPolicy", "EverySize", "FixedBudget", "TreeSizes"]

MAX_NODES, MAX_DEPTH = 64, 8
MOST_FIXED = 1 << 20  # largest fixed shape that is planned here; the limits of kernels are checked elsewhere


class BudgetPolicy(Protocol):
    """Decides the tree size of every step.

    Attributes:
        growth: the growth of its trees, or None.
        max_nodes: largest number of nodes of a step.
        watches: whether a step must be observed before the next size is chosen.
        is_off: whether the next step is plain decoding, so that the drafter need not be prepared.
    """

    growth: Growth | None
    max_nodes: int
    watches: bool

    @property
    def is_off(self) -> bool:
        """Whether the next step drafts nothing."""
        ...

    def next(self) -> tuple[Growth | None, int]:
        """Return growth and budget of the next step."""
        ...

    def observe(self, draft: Draft, acceptance: Acceptance) -> None:
        """Record a step."""
        ...


class FixedBudget:
    """The same growth and budget for every step."""

    watches = False

    def __init__(self, growth: Growth | None, budget: int) -> None:
        self.growth, self.max_nodes = growth, budget

    @property
    def is_off(self) -> bool:
        """Whether the budget is plain decoding."""
        return self.max_nodes == 1

    def next(self) -> tuple[Growth | None, int]:
        """Return the fixed growth and budget."""
        return self.growth, self.max_nodes

    def observe(self, draft: Draft, acceptance: Acceptance) -> None:
        """Ignore the step."""


@dataclass(frozen=True, eq=False)
class TreeSizes:
    """The sizes that a controller may choose from.

    Attributes:
        growth: the growth of the trees, or None.
        choices: plain decoding first.
        is_cut: whether the growth stops at the depth of a choice, which saves one draft call per level.
    """

    growth: Growth | None
    choices: Sequence[Choice]
    is_cut: bool = False

    @property
    def max_nodes(self) -> int:
        """Largest number of nodes of a step."""
        return max(choice.nodes for choice in self.choices)

    def step(self, choice: Choice) -> tuple[Growth | None, int]:
        """Return growth and budget of a step."""
        if self.growth is None or not self.is_cut or choice == PLAIN:
            return self.growth, choice.nodes
        return Limited(self.growth, choice.depth), choice.nodes

    @classmethod
    def of(cls, growth: Growth | None, max_depth: int | None = None, *, has_model: bool, is_coarse: bool) -> TreeSizes:
        """List the sizes of a growth; a fixed shape, or one without a depth, is drafted whole or not at all.

        Args:
            growth: the growth, bound to the sampling, or None.
            max_depth: deepest tree; None for the growth's own depth.
            has_model: whether trees are drafted by a model; else their depth costs nothing.
            is_coarse: whether to list a few only, because each one is captured as a CUDA graph.

        Raises:
            ValueError: the growth cannot be planned.
        """
        if growth is None or not has_model:
            return cls(growth, flat_choices(MAX_NODES))
        try:
            plan = growth.plan(MAX_NODES)
        except ValueError:  # a fixed shape of more nodes, which then names its own size
            plan = growth.plan(MOST_FIXED)
        if plan.is_heap:  # one draft call per node
            return cls(growth, flat_choices(MAX_NODES))
        if plan.is_fixed or not hasattr(growth, "depth"):
            return cls(growth, [PLAIN, Choice(plan.num_nodes + 1, max(len(plan.layers), 1))])
        deepest = max_depth or max(len(plan.layers), 1)
        return cls(growth, layered_choices(MAX_NODES, deepest, is_coarse=is_coarse), is_cut=True)


class AutoBudget:
    """Tree sizes chosen by a ``BudgetController``, with depths where a draft model grows layer by layer.

    It starts anew for every generation and reads no clock, so a repeated generation has the same sizes. A node whose
    drafter gives no values gets the value 1 / (1 + depth).

    Args:
        sizes: the sizes to choose from.
        step_ms: as for ``BudgetController``, like the next three.
        experience: see there.
        is_padded: see there.
        behind_ms: see there.
    """

    watches = True

    def __init__(
        self,
        sizes: TreeSizes,
        step_ms: StepMs,
        *,
        experience: Experience | None = None,
        is_padded: bool = False,
        behind_ms: float = 0.0,
    ) -> None:
        self.max_nodes, self.growth = sizes.max_nodes, sizes.growth
        self.controller = BudgetController(
            sizes.choices, step_ms, experience=experience, is_padded=is_padded, behind_ms=behind_ms
        )
        self._sizes = sizes
        self._launched: deque[Choice] = deque()  # sizes of steps that are not yet observed

    @property
    def is_off(self) -> bool:
        """Whether plain decoding is the best known size."""
        return self.controller.best == PLAIN

    def next(self) -> tuple[Growth | None, int]:
        """Return the step that the controller chooses."""
        return self._launch(self.controller.choose())

    def _launch(self, choice: Choice) -> tuple[Growth | None, int]:
        """Return the step of a size, and remember it until it is observed."""
        self._launched.append(choice)
        return self._sizes.step(choice)

    def observe(self, draft: Draft, acceptance: Acceptance) -> None:
        """Report a step to the controller; for plain decoding no tensor is read."""
        choice = self._launched.popleft()
        if choice == PLAIN:
            self.controller.observe_plain()
            return
        parents, depths = draft.tree.parents.cpu().numpy(), draft.tree.depths.cpu().numpy().copy()
        is_node = parents >= 0
        is_node[:, 0] = True
        values = is_node * _values(draft.values, depths)
        path, lengths = acceptance.path.cpu().numpy(), acceptance.path_lengths.cpu().numpy()
        row, place = np.nonzero(np.arange(path.shape[1]) < lengths[:, None])
        is_accepted = np.zeros(parents.shape, dtype=bool)
        is_accepted[row, path[row, place]] = True
        self.controller.observe(choice, values, depths, is_accepted)


class EverySize:
    """Runs every size a number of times, the largest first, then plain decoding, so that all sizes are captured.

    Args:
        times: steps per size.
    """

    watches = False
    is_off = False

    def __init__(self, times: int) -> None:
        self._times = times
        self._left: list[Choice] | None = None  # the next one last

    def over(self, sizes: TreeSizes) -> EverySize:
        """Set the sizes, or go on with them in another text."""
        self.max_nodes, self.growth, self._sizes = sizes.max_nodes, sizes.growth, sizes
        if self._left is None:
            self._left = [choice for choice in sizes.choices for _ in range(self._times)]
        return self

    @property
    def is_done(self) -> bool:
        """Whether all steps were launched."""
        return self._left == []

    def next(self) -> tuple[Growth | None, int]:
        """Return the step of the next size."""
        return self._sizes.step(self._left.pop() if self._left else PLAIN)

    def observe(self, draft: Draft, acceptance: Acceptance) -> None:
        """Ignore the step."""


def _values(values: Tensor | None, depths: np.ndarray) -> np.ndarray:
    """Return float[batch, n] values of the nodes, by depth if the drafter gave none."""
    return 1 / (1 + depths) if values is None else np.asarray(values.cpu().numpy())
