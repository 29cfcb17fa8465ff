"""How the decode loop asks for the sizes of each step: one fixed budget, or a choice for each request."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from stree.budget.request_sizes import ActiveRequest, RequestSizes, StepHistory
from stree.growth import Growth

__all__ = ["AutoBudget", "BudgetPolicy", "EverySize"]


class BudgetPolicy:
    """The same growth and budget for every step.

    Args:
        growth: the shape of the trees, or None.
        max_nodes: most nodes of a step, root included.

    Attributes:
        row_sizes: most nodes of each row in the step that was asked for last; None: those of the step.
    """

    row_sizes: list[int] | None = None

    def __init__(self, growth: Growth | None, max_nodes: int) -> None:
        self.growth, self.max_nodes = growth, max_nodes

    @property
    def is_off(self) -> bool:
        """Whether the next step drafts nothing, so that a drafter need not be made ready."""
        return self.max_nodes == 1

    def next(self, rows: Sequence[ActiveRequest | None]) -> int:
        """Return the budget of the next step, whose rows hold these requests; None for a row that is free."""
        return self.max_nodes

    def observe(self, num_emitted: Sequence[int], seconds: float | None) -> None:
        """Record the oldest step not yet observed: tokens of every row, 0 where it was free, and its seconds.

        The seconds are None for a step that took time for what later steps of its size find done.
        """


class AutoBudget(BudgetPolicy):
    """A size for each request of every step, by goodput; on a device steps are observed after later ones were launched.

    Args:
        growth: the shape of the trees, or None.
        sizes: what is chosen from.
        history: of this kind of steps.
        rows: sequences at once.
        start: size of the first steps while nothing is known.
    """

    def __init__(
        self, growth: Growth | None, sizes: Sequence[int], history: StepHistory, rows: int, start: int
    ) -> None:
        super().__init__(growth, sizes[-1])
        self._request_sizes, self._rows = RequestSizes(sizes, history, start), rows
        self._launched: deque[tuple[list[int], list[ActiveRequest], list[int], int]] = deque()

    @property
    def is_off(self) -> bool:
        """Whether plain decoding is the best known size."""
        return self._request_sizes.is_plain(self._rows)

    def next(self, rows: Sequence[ActiveRequest | None]) -> int:
        """Choose sizes by what is known now."""
        active = [row for row, request in enumerate(rows) if request is not None]
        requests = [request for request in rows if request is not None]
        chosen = self._request_sizes.choose(requests, len(rows))
        self._launched.append((active, requests, chosen, len(rows)))
        sizes = dict(zip(active, chosen, strict=True))
        self.row_sizes = [sizes.get(row, 1) for row in range(len(rows))]
        return max(chosen, default=1)

    def observe(self, num_emitted: Sequence[int], seconds: float | None) -> None:
        """Record what the step has shown."""
        active, requests, chosen, rows = self._launched.popleft()
        self._request_sizes.observe(requests, chosen, [num_emitted[row] for row in active], seconds, rows)


class EverySize(BudgetPolicy):
    """Every size a number of times, the largest first, then plain decoding: captures all of them.

    Args:
        times: steps of each size.
    """

    is_off = False

    def __init__(self, times: int) -> None:
        super().__init__(None, 1)
        self._times = times
        self._left: list[int] | None = None  # the next one last

    def over(self, growth: Growth | None, sizes: Sequence[int]) -> EverySize:
        """Begin to go through sizes, or continue with them in another text."""
        self.growth, self.max_nodes = growth, sizes[-1]
        if self._left is None:
            self._left = [size for size in sizes for _ in range(self._times)]
        return self

    @property
    def is_done(self) -> bool:
        """Whether all steps were launched."""
        return self._left == []

    def next(self, rows: Sequence[ActiveRequest | None]) -> int:
        """Return the next size."""
        return self._left.pop() if self._left else 1
