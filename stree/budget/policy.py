"""How the decode loop asks for the size of each step: one fixed budget, or a controller's choice."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from stree.budget.controller import AcceptanceLevel, BudgetController, StepHistory
from stree.growth import Growth

__all__ = ["AutoBudget", "BudgetPolicy"]


class BudgetPolicy:
    """The same growth and budget for every step.

    Args:
        growth: the shape of the trees, or None.
        max_nodes: most nodes of a step, root included.
    """

    def __init__(self, growth: Growth | None, max_nodes: int) -> None:
        self.growth, self.max_nodes = growth, max_nodes

    @property
    def is_off(self) -> bool:
        """Whether the next step drafts nothing, so that a drafter need not be made ready."""
        return self.max_nodes == 1

    def next(self) -> int:
        """Return the budget of the next step."""
        return self.max_nodes

    def observe(self, num_emitted: Sequence[int], seconds: float | None) -> None:
        """Record the oldest step not yet observed: tokens of every active sequence, and its seconds.

        The seconds are None for a step that took time for what later steps of its size find done.
        """


class AutoBudget(BudgetPolicy):
    """A controller's choice for every step; on a device steps are observed after later ones were launched.

    Args:
        growth: the shape of the trees, or None.
        sizes: what the controller chooses from.
        history: of this kind of steps.
        start: size of the first steps while nothing is known.
        level: see ``BudgetController``.
    """

    def __init__(
        self, growth: Growth | None, sizes: Sequence[int], history: StepHistory, start: int,
        level: AcceptanceLevel | None = None,
    ) -> None:  # fmt: skip
        super().__init__(growth, sizes[-1])
        self._controller = BudgetController(sizes, history, start, level)
        self._launched: deque[int] = deque()

    @property
    def is_off(self) -> bool:
        """Whether plain decoding is the best known size."""
        return self._controller.current == 1

    def next(self) -> int:
        """Ask the controller."""
        self._launched.append(self._controller.choose())
        return self._launched[-1]

    def observe(self, num_emitted: Sequence[int], seconds: float | None) -> None:
        """Report to the controller."""
        self._controller.observe(self._launched.popleft(), num_emitted, seconds)
