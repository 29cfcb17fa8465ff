"""Random numbers with fixed outcomes: every combination of outcomes is a row of one batch and collects its probability.

Summing over all rows integrates over the random numbers. Where rows cannot share a batch, ``explored`` runs outcomes
one after the other: every question narrows the interval where a uniform number of a key lies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import Tensor

from stree.sampling import Random


class MoreDraws(Exception):
    """A draft needs at least ``count`` draws, more than there are outcomes for."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} draws are asked for")
        self.count = count


@dataclass(slots=True, eq=False)
class Outcomes:
    """Replaces ``Random`` by fixed outcomes of all random choices, one combination per row.

    Attributes:
        coins: bool[batch, nodes], outcome of the test of each node.
        tokens: int64[batch, places], outcome of each target draw by its offset, or of the draft draws in order.
        weight: float64[batch], probability of the outcomes used so far.
    """

    coins: Tensor
    tokens: Tensor
    weight: Tensor = field(init=False)
    asked: Tensor = field(init=False)
    num_draft_draws: int = 0

    def __post_init__(self) -> None:
        self.weight = torch.ones(self.coins.shape[0], dtype=torch.float64)
        self.asked = torch.zeros_like(self.coins)

    @classmethod
    def all(cls, num_coins: int, num_places: int, vocab: int) -> Self:
        """Make every combination of coins and tokens."""
        falls = list(itertools.product((False, True), repeat=num_coins))
        coins = torch.tensor(falls, dtype=torch.bool).reshape(2**num_coins, num_coins)
        digits = itertools.product(range(vocab), repeat=num_places)
        tokens = torch.tensor(list(digits), dtype=torch.long).reshape(vocab**num_places, num_places)
        return cls(coins.repeat_interleave(len(tokens), 0), tokens.repeat(len(coins), 1))

    def at(self, positions: Tensor) -> Self:
        return self

    def bernoulli(self, purpose: str, probs: Tensor, offset: Tensor, node: Tensor) -> Tensor:
        """Return the tests' outcomes; a second test of a node with positive probability would reuse its number."""
        assert purpose == "accept"
        place = (node - 1).clamp(min=0)  # there may be padding before the first node
        coin = self.coins.gather(1, place)
        is_asked = probs > 0
        assert not (is_asked & self.asked.gather(1, place)).any(), "a node is tested twice"
        factor = torch.where(is_asked, torch.where(coin, probs, 1 - probs), 1.0)
        self.weight *= factor.prod(1)
        count = torch.zeros_like(self.asked, dtype=torch.long).scatter_add_(1, place, is_asked.long())
        assert not (count > 1).any(), "a node is tested twice"
        self.asked |= count > 0
        return coin & is_asked

    def choice(self, purpose: str, probs: Tensor, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        """Return the drawn tokens: the target's by offset (the root's is 0), the draft's in call order."""
        width = 1 if probs.dim() == 2 else probs.shape[1]
        if purpose == "draft":
            places = torch.arange(self.num_draft_draws, self.num_draft_draws + width).expand(len(probs), -1)
            self.num_draft_draws += width
            if self.num_draft_draws > self.tokens.shape[1]:
                raise MoreDraws(self.num_draft_draws)
        else:
            assert width == 1, "one draw per sequence"
            places = torch.zeros(len(probs), 1, dtype=torch.long)
        token = self.tokens.gather(1, places)
        probs_of_rows = probs.reshape(len(probs), width, -1)
        total = probs_of_rows.sum(-1)
        prob = probs_of_rows.gather(-1, token[..., None]).squeeze(-1) / total.clamp(min=1e-300)
        # A distribution without mass belongs to a missing node, whose token must not matter: one row counts.
        prob = torch.where(total > 0, prob, (token == 0).to(prob.dtype))
        self.weight *= prob.prod(1)
        return token.reshape(probs.shape[:-1])

    def finished_weight(self) -> Tensor:
        """Probability of each row; a test that never ran is in two rows with each of its outcomes."""
        return self.weight * 0.5 ** (~self.asked).sum(1)

    def repeat(self, copies: int) -> Outcomes:
        """Repeat all rows, unused."""
        return Outcomes(self.coins.repeat(copies, 1), self.tokens.repeat(copies, 1))


@dataclass(frozen=True, slots=True, eq=False)
class Cells(Random):
    """Uniform numbers by position for MATCH: in each cell (row) all draws from the given distributions are constant.

    Attributes:
        numbers: float64[batch, positions], middle of each cell.
        weight: float64[batch], volume of the cell.
    """

    numbers: Tensor
    weight: Tensor

    @classmethod
    def of(cls, distributions: Sequence[Tensor]) -> Self:
        """Make every combination of the cells of float64[distributions, vocab] at each position."""
        middles, sizes = [], []
        for probs in distributions:
            cuts = torch.cat([torch.zeros(1), (probs.cumsum(-1) / probs.sum(-1, keepdim=True)).flatten()]).unique()
            cuts = cuts[torch.cat([torch.tensor([True]), cuts.diff() > 1e-14])]
            cuts[-1] = 1.0
            middles.append((cuts[1:] + cuts[:-1]) / 2)
            sizes.append(cuts.diff())
        numbers = torch.cartesian_prod(*middles).reshape(-1, len(distributions))
        weight = torch.cartesian_prod(*sizes).reshape(-1, len(distributions)).prod(1)
        zero = torch.zeros(len(weight), dtype=torch.long)
        return cls(0, zero, zero, numbers, weight)

    def uniform(self, purpose: str, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        assert purpose == "target", "MATCH draws for the target only"
        flat = offset.reshape(len(offset), -1).long() - 1
        return self.numbers.gather(1, flat).reshape(offset.shape)

    def repeat(self, copies: int) -> Cells:
        """Repeat all rows."""
        numbers, weight = self.numbers.repeat(copies, 1), self.weight.repeat(copies)
        zero = torch.zeros(len(weight), dtype=torch.long)
        return Cells(0, zero, zero, numbers, weight)


def as_random(outcomes: Outcomes | Cells) -> Random:
    """Cast outcomes to the random numbers that they replace."""
    return cast(Random, outcomes)


def random_rows(batch: int, seed: int = 0) -> Random:
    """Random numbers of the first sequences, at position 0."""
    return Random(seed, torch.arange(batch), torch.zeros(batch, dtype=torch.long))


NOTHING = 1e-15  # an interval that is empty but for rounding


class _Numbers:
    """Numbers that answer by a script, and by the first possible answer behind its end."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.taken, self.options = script, list[int](), list[int]()
        self.intervals: dict[Any, tuple[float, float]] = {}
        self.weight = 1.0

    def answer(self, key: Any, probs: list[float]) -> int:
        """Say in which part of [0, 1), which parts of these sizes fill, a number lies."""
        low, high = self.intervals.get(key, (0.0, 1.0))
        parts, begin = [], 0.0
        for place, prob in enumerate(probs):
            part = max(low, begin), min(high, begin + prob)
            begin += prob
            if part[1] - part[0] > NOTHING:
                parts.append((place, part))
        turn = len(self.taken)
        taken = self.script[turn] if turn < len(self.script) else 0
        self.taken.append(taken)
        self.options.append(len(parts))
        place, part = parts[taken]
        self.weight *= (part[1] - part[0]) / (high - low)
        self.intervals[key] = part
        return place

    def following(self) -> list[int] | None:
        """Script of the next outcome, or None behind the last."""
        taken = list(self.taken)
        while taken and taken[-1] + 1 == self.options[len(taken) - 1]:
            taken.pop()
        return [*taken[:-1], taken[-1] + 1] if taken else None


class _Explored:
    """Takes the place of ``Random``."""

    def __init__(self, numbers: _Numbers, position: int = 0) -> None:
        self.numbers, self.position = numbers, position

    def at(self, positions: Tensor) -> _Explored:
        return _Explored(self.numbers, int(positions))

    def select(self, rows: Tensor) -> _Explored:
        return self

    def bernoulli(self, purpose: str, probs: Tensor, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        pairs = torch.stack([probs.clamp(0, 1), 1 - probs.clamp(0, 1)], -1)
        return self.choice(purpose, pairs, offset, node) == 0

    def choice(self, purpose: str, probs: Tensor, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        shape = probs.shape[:-1]
        places, nodes = (torch.as_tensor(part).expand(shape).flatten().tolist() for part in (offset, node))
        found = []
        for row, place, number in zip(probs.reshape(-1, probs.shape[-1]).double(), places, nodes, strict=True):
            total = float(row.sum())
            key = purpose, self.position + place, number
            found.append(self.numbers.answer(key, (row / total).tolist()) if total > 0 else 0)
        return torch.tensor(found, dtype=torch.long).view(shape)


def explored(run: Callable[[Random], Any]) -> Iterator[tuple[Any, float]]:
    """Call a function with random numbers, once for every outcome; yield results and probabilities."""
    script: list[int] | None = []
    while script is not None:
        numbers = _Numbers(script)
        yield run(cast(Random, _Explored(numbers))), numbers.weight
        script = numbers.following()
