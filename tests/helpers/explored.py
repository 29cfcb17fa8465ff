"""Random numbers whose outcomes are explored one after the other, with the probability of each; for a batch of one.

A number is a uniform one in [0, 1) with a key, as in ``Random``.  Every question narrows the interval where it lies, so
a number that is asked for twice gives answers that belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from stree.sampling import Random

__all__ = ["explored"]

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
