"""Random numbers of which every outcome is run, so that sums over outcomes are exact and nothing is sampled.

Each number, given by its key (purpose, position, node), is known to lie in an interval, and the middle of the interval
answers.  An answer that would differ within the interval cuts it: the row keeps the part around the middle, and is run
again once for every other part.  The lengths of the intervals multiply to the probability of a row.  A key that is
asked twice is one number, as it is of ``stree.Random``, so numbers that serve twice by mistake show in the sums.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor

from stree.sampling import Random
from stree.testing.report import CheckFailed

__all__ = ["NOTHING", "Numbers", "TooManyOutcomes", "all_outcomes"]

NOTHING = 1e-15  # an interval that is empty but for rounding
PURPOSES = ("target", "accept", "draft")
T = TypeVar("T")


class TooManyOutcomes(ValueError):
    """There are more outcomes than can be run."""


@dataclass(slots=True, eq=False)
class Intervals:
    """The intervals of the numbers of a batch of rows.

    Attributes:
        cases: int64[batch], which case each row runs.
        columns: column of each key.
        low: float64[batch, columns], where the interval of each number begins, and ``high`` where it ends.
        calls: for every question, in the order in which they were asked, columns and float64[batch, cuts] where answers
            change.
    """

    cases: Tensor
    columns: dict[int, int]
    low: Tensor
    high: Tensor
    calls: list[list[tuple[int, Tensor]]] = field(default_factory=list)

    @classmethod
    def unknown(cls, cases: int) -> Intervals:
        """Return the intervals before any question: one row for each case."""
        nothing = torch.zeros(cases, 0, dtype=torch.float64)
        return cls(torch.arange(cases), {}, nothing, nothing.clone())

    def column(self, key: int) -> int:
        """Return the column of a key; a new number may lie anywhere in [0, 1)."""
        if key not in self.columns:
            self.columns[key] = self.low.shape[1]
            zero = torch.zeros(len(self.cases), 1, dtype=torch.float64)
            self.low, self.high = torch.cat([self.low, zero], 1), torch.cat([self.high, zero + 1], 1)
        return self.columns[key]

    def rows(self, rows: Tensor) -> Intervals:
        """Return some rows, of which nothing was asked yet."""
        return Intervals(self.cases[rows], dict(self.columns), self.low[rows], self.high[rows])

    def split(self, most_rows: int) -> tuple[Tensor, Intervals]:
        """Narrow the intervals to what the answers of a run hold for.

        Returns:
            float64[batch], the probability of each row's answers; 0 where they hold for nothing; the other parts of the
            intervals, which have to be run.
        """
        middle, narrow = (self.low + self.high) / 2, self.rows(torch.arange(len(self.cases)))
        parts = [narrow.rows(torch.zeros(0, dtype=torch.long))]
        is_valid = torch.ones(len(self.cases), dtype=torch.bool)
        for call in self.calls:  # what was asked later may follow from these answers
            cuts = {column: torch.cat([cut for other, cut in call if other == column], 1) for column, _ in call}
            is_cut = torch.stack([narrow._is_inside(column, cut).any(1) for column, cut in cuts.items()]).any(0)
            rows = (is_valid & is_cut).nonzero()[:, 0]
            if not len(rows):
                continue
            cells, origin, is_own = narrow.rows(rows)._cells(
                {column: cut[rows] for column, cut in cuts.items()}, middle[rows], most_rows
            )
            parts.append(cells.rows((~is_own).nonzero()[:, 0]))
            kept = rows[origin[is_own]]
            is_valid[rows] = False
            is_valid[kept] = True
            narrow.low[kept], narrow.high[kept] = cells.low[is_own], cells.high[is_own]
        cases, low, high = (torch.cat([getattr(part, name) for part in parts]) for name in ("cases", "low", "high"))
        return (narrow.high - narrow.low).prod(1) * is_valid, Intervals(cases, dict(self.columns), low, high)

    def _is_inside(self, column: int, cuts: Tensor) -> Tensor:
        low, high = self.low[:, column, None], self.high[:, column, None]
        return (cuts > low + NOTHING) & (cuts < high - NOTHING)

    def _cells(self, cuts: dict[int, Tensor], middle: Tensor, most_rows: int) -> tuple[Intervals, Tensor, Tensor]:
        """Cut the intervals of some columns.

        Returns:
            The cells; the row that each comes from; whether it is the one around the middles.  Where there are too many
            the last columns stay whole, and no cell is.
        """
        cells, origin = self, torch.arange(len(self.cases))
        is_own = torch.ones_like(origin, dtype=torch.bool)
        for column, all_cuts in cuts.items():
            if len(origin) > most_rows:
                return cells, origin, torch.zeros_like(is_own)
            low, high = cells.low[:, column, None], cells.high[:, column, None]
            bounds = torch.cat([low, all_cuts[origin].clamp(low, high), high], 1).sort(1).values
            row, place = (bounds.diff(dim=1) > NOTHING).nonzero(as_tuple=True)
            cells, origin, is_own = cells.rows(row), origin[row], is_own[row]
            low, high, own = bounds[row, place], bounds[row, place + 1], middle[origin, column]
            cells.low[:, column], cells.high[:, column] = low, high
            is_own &= (low <= own) & (own < high)
        return cells, origin, is_own


class Numbers:
    """Takes the place of ``stree.Random`` in a batch whose rows are outcomes.

    Args:
        intervals: of the rows.
        seed: of the numbers that ``uniform`` returns.
        purposes: of the numbers that may be drawn.
    """

    def __init__(self, intervals: Intervals, seed: int = 0, purposes: Sequence[str] = PURPOSES) -> None:
        self._intervals, self._seed, self._purposes = intervals, seed, purposes
        self._rows = torch.arange(len(intervals.cases))
        self.positions = torch.zeros_like(self._rows)

    def at(self, positions: Tensor) -> Numbers:
        """Return the numbers of the step whose roots are at int[batch] positions."""
        other = copy.copy(self)
        other.positions = positions.long().clone()
        return other

    def select(self, rows: Tensor) -> Numbers:
        """Return the numbers of some rows, none of them twice."""
        other = copy.copy(self)
        other._rows, other.positions = self._rows[rows], self.positions[rows]
        return other

    def uniform(self, purpose: str, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        """Return fixed numbers by position and node, for growths whose priorities are drawn.

        Raises:
            CheckFailed: numbers for verification, of which every outcome has to be run.
        """
        if purpose != "draft":
            raise CheckFailed(f"{purpose} numbers must be drawn by rng.choice or rng.bernoulli to be enumerated")
        position, number = self._place(offset, node)
        word = (number + 31 * position + 1) * 2654435761 % 2**32
        return (word.double() / 2**32 + self._seed * 0.3819660113) % 1.0

    def bernoulli(self, purpose: str, probs: Tensor, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        """Return bool[batch, ...], True with probability ``probs``."""
        return self._number(purpose, offset, node, probs[..., None].double()) < probs

    def choice(self, purpose: str, probs: Tensor, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        """Return indices drawn from float[batch, ..., vocab] distributions: int64[batch, ...]."""
        cumulative = probs.detach().double().cumsum(-1)
        total = cumulative[..., -1:]
        cuts = cumulative[..., :-1] / total.clamp(min=1e-300)
        number = self._number(purpose, offset, node, cuts)
        return (cuts <= number[..., None]).sum(-1) * (total.squeeze(-1) > 0)

    def _place(self, offset: Tensor, node: Tensor | int) -> tuple[Tensor, Tensor]:
        positions = self.positions.view(-1, *[1] * (offset.dim() - 1)) + offset
        position, number = torch.broadcast_tensors(positions.long(), torch.as_tensor(node).long())
        return position, number

    def _number(self, purpose: str, offset: Tensor, node: Tensor | int, cuts: Tensor) -> Tensor:
        """Answer with the middles of intervals, float64[batch, ...], and note [batch, ..., c] where answers change."""
        if purpose not in self._purposes:
            known = " or ".join(map(repr, self._purposes))
            raise CheckFailed(f"numbers must be drawn for {known}, got {purpose!r}, which are numbers of another part")
        position, number = self._place(offset, node)
        keys = ((PURPOSES.index(purpose) << 20) + position << 40) + number
        keys, shape = keys.expand(cuts.shape[:-1]).flatten(1) if cuts.dim() > 2 else keys[:, None], cuts.shape[:-1]
        cuts = cuts.reshape(*keys.shape, cuts.shape[-1])
        found, asked = torch.zeros(keys.shape, dtype=torch.float64), []
        for place in range(keys.shape[1]):
            for key in keys[:, place].unique().tolist():
                column, is_asked = self._intervals.column(key), keys[:, place] == key
                low, high = self._intervals.low[self._rows, column], self._intervals.high[self._rows, column]
                found[:, place] = torch.where(is_asked, (low + high) / 2, found[:, place])
                all_cuts = torch.zeros(len(self._intervals.cases), cuts.shape[-1], dtype=torch.float64)
                all_cuts[self._rows] = cuts[:, place] * is_asked[:, None]
                asked.append((column, all_cuts))
        if asked:
            self._intervals.calls.append(asked)
        return found.view(shape)


def all_outcomes(
    run: Callable[[Random, Tensor], T],
    cases: int,
    *,
    rows: int = 8192,
    most: int = 4_000_000,
    seed: int = 0,
    purposes: Sequence[str] = PURPOSES,
) -> Iterator[tuple[T, Tensor, Tensor]]:
    """Run a function with every outcome of its random numbers.

    Args:
        run: takes the numbers of a batch and int64[batch], which case each row is; called for one batch after another.
        cases: number of cases.
        rows: most rows of a batch.
        most: rows after which the function is given up.
        seed: of the numbers that are not enumerated (``Numbers.uniform``).
        purposes: of the numbers that may be drawn.

    Yields:
        What the function returned, int64[batch] cases, and float64[batch] probabilities.

    Raises:
        TooManyOutcomes: a ValueError.
    """
    waiting, count = [Intervals.unknown(cases)], 0
    while waiting:
        batch = waiting.pop()
        if len(batch.cases) > rows:
            waiting += [batch.rows(part) for part in torch.arange(len(batch.cases)).split(rows)]
            continue
        count += len(batch.cases)
        if count + sum(len(other.cases) for other in waiting) > most:
            raise TooManyOutcomes(f"there are more than {most} outcomes: take a smaller budget, depth or vocabulary")
        result = run(cast(Random, Numbers(batch, seed, purposes)), batch.cases)
        weight, others = batch.split(rows)
        yield result, batch.cases, weight
        waiting += [others] if len(others.cases) else []
