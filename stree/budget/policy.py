"""How large each step's tree is: a fixed size, or what a controller chooses by goodput.

The loop asks before a step and reports after it.  Choosing reads what past steps drafted and accepted; all of it is
settled before the next token is drawn, so no text depends on it but through the sizes of trees.
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
MOST_FIXED = 1 << 20  # nodes of a fixed shape that is laid out; what kernels take is checked where they are known


class BudgetPolicy(Protocol):
    """Decides the size of every step.

    Attributes:
        growth: the shape that its steps are made of, or None.
        max_nodes: most nodes of a step.
        watches: whether a step's outcome must be observed before the next size is asked for.
        is_off: whether plain decoding goes on for now, so that a drafter need not be made ready.
    """

    growth: Growth | None
    max_nodes: int
    watches: bool

    @property
    def is_off(self) -> bool:
        """Tell whether the next step drafts nothing."""
        ...

    def next(self) -> tuple[Growth | None, int]:
        """Give growth and budget of the next step."""
        ...

    def observe(self, draft: Draft, acceptance: Acceptance) -> None:
        """Take note of a step."""
        ...


class FixedBudget:
    """The same growth and budget always."""

    watches = False

    def __init__(self, growth: Growth | None, budget: int) -> None:
        self.growth, self.max_nodes = growth, budget

    @property
    def is_off(self) -> bool:
        """Tell whether nothing is ever drafted."""
        return self.max_nodes == 1

    def next(self) -> tuple[Growth | None, int]:
        """Give them."""
        return self.growth, self.max_nodes

    def observe(self, draft: Draft, acceptance: Acceptance) -> None:
        """Learn nothing."""


@dataclass(frozen=True, eq=False)
class TreeSizes:
    """The sizes that a controller may choose from.

    Attributes:
        growth: the shape that their trees are made of, or None.
        choices: plain decoding first.
        is_cut: whether the growth is cut at a choice's depth, a draft call less a layer.
    """

    growth: Growth | None
    choices: Sequence[Choice]
    is_cut: bool = False

    @property
    def max_nodes(self) -> int:
        """Most nodes of a step."""
        return max(choice.nodes for choice in self.choices)

    def step(self, choice: Choice) -> tuple[Growth | None, int]:
        """Give growth and budget of a step."""
        if self.growth is None or not self.is_cut or choice == PLAIN:
            return self.growth, choice.nodes
        return Limited(self.growth, choice.depth), choice.nodes

    @classmethod
    def of(cls, growth: Growth | None, max_depth: int | None = None, *, has_model: bool, is_coarse: bool) -> TreeSizes:
        """List the sizes of a growth: of a fixed shape, and of one without a depth, all of it or nothing.

        Args:
            growth: the shape, bound to the sampling, or None.
            max_depth: deepest tree; None for the growth's own depth.
            has_model: whether trees are drafted by a model; else their depth costs nothing.
            is_coarse: whether to list a few only, for where each one is captured.

        Raises:
            ValueError: a shape that cannot be laid out.
        """
        if growth is None or not has_model:
            return cls(growth, flat_choices(MAX_NODES))
        try:
            plan = growth.plan(MAX_NODES)
        except ValueError:  # a fixed shape of more nodes, which then names its own size
            plan = growth.plan(MOST_FIXED)
        if plan.is_heap:  # a draft call a node
            return cls(growth, flat_choices(MAX_NODES))
        if plan.is_fixed or not hasattr(growth, "depth"):
            return cls(growth, [PLAIN, Choice(plan.num_nodes + 1, max(len(plan.layers), 1))])
        deepest = max_depth or max(len(plan.layers), 1)
        return cls(growth, layered_choices(MAX_NODES, deepest, is_coarse=is_coarse), is_cut=True)


class AutoBudget:
    """A controller over budgets, and over depths where a draft model grows layer by layer.

    It begins anew for every generation and reads no clock, so one that is repeated takes the same sizes.  Nodes whose
    drafter gives them no values are taken to be right with the chance 1 / (1 + depth).

    Args:
        sizes: what to choose from.
        step_ms: what steps take.
        experience: as for ``BudgetController``.
        is_padded: likewise.
        behind_ms: likewise.
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
        self._launched: deque[Choice] = deque()  # sizes that were given and not yet observed

    @property
    def is_off(self) -> bool:
        """Tell whether plain decoding is the best known size."""
        return self.controller.best == PLAIN

    def next(self) -> tuple[Growth | None, int]:
        """Ask the controller."""
        return self._launch(self.controller.choose())

    def _launch(self, choice: Choice) -> tuple[Growth | None, int]:
        """Give the step of a size, which will be observed."""
        self._launched.append(choice)
        return self._sizes.step(choice)

    def observe(self, draft: Draft, acceptance: Acceptance) -> None:
        """Report to the controller; of a step of plain decoding only that it was, so nothing is read."""
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
    """Every size a number of times, the largest first, then plain decoding: for who wants all of them captured.

    Args:
        times: steps of each size.
    """

    watches = False
    is_off = False

    def __init__(self, times: int) -> None:
        self._times = times
        self._left: list[Choice] | None = None  # the next one last

    def over(self, sizes: TreeSizes) -> EverySize:
        """Begin to go through sizes, or go on with them in another text."""
        self.max_nodes, self.growth, self._sizes = sizes.max_nodes, sizes.growth, sizes
        if self._left is None:
            self._left = [choice for choice in sizes.choices for _ in range(self._times)]
        return self

    @property
    def is_done(self) -> bool:
        """Tell whether all steps were launched."""
        return self._left == []

    def next(self) -> tuple[Growth | None, int]:
        """Give the next size."""
        return self._sizes.step(self._left.pop() if self._left else PLAIN)

    def observe(self, draft: Draft, acceptance: Acceptance) -> None:
        """Learn nothing."""


def _values(values: Tensor | None, depths: np.ndarray) -> np.ndarray:
    """Give float[batch, n] values of nodes, also where the drafter gave none."""
    return 1 / (1 + depths) if values is None else np.asarray(values.cpu().numpy())
