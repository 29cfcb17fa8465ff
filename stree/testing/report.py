"""What a check returns, and the error that it raises."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CheckFailed", "Report", "compared", "table_of"]

MOST_LINES = 6


class CheckFailed(AssertionError):
    """A check of ``stree.testing`` has found a fault; the message is the report."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was checked.

    Attributes:
        what: was checked.
        cases: that passed.
        worst: largest distance that rounding has left.
        notes: what was left out, and why.
    """

    what: str
    cases: int
    worst: float
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.what}: {self.cases} cases passed, largest distance {self.worst:.1e}", *self.notes]
        return "\n  ".join(lines)


def compared(found: Tensor, right: Tensor, vocab: int, names: tuple[str, str]) -> str:
    """Describe where two distributions of texts of equal length differ most: float64[vocab ** length] each."""
    length = next(size for size in range(64) if vocab**size >= found.numel())
    worst = (found - right).abs().argsort(descending=True)[:MOST_LINES].tolist()
    rows = []
    for number in worst:
        text = [number // vocab**place % vocab for place in reversed(range(length))]
        rows.append((" ".join(map(str, text)), float(found[number]), float(right[number])))
    return table_of("text", names, rows)


def table_of(first: str, names: tuple[str, str], rows: list[tuple[str, float, float]]) -> str:
    """Return lines of a name and two probabilities."""
    width = max(len(first), *(len(name) for name, *_ in rows))
    lines = [f"  {first:>{width}}  {names[0]:>10}  {names[1]:>10}"]
    return "\n".join(lines + [f"  {name:>{width}}  {left:10.6f}  {right:10.6f}" for name, left, right in rows])


def joint_of(strings: list[tuple[tuple[int, ...], float]], vocab: int, length: int) -> list[Tensor]:
    """Sum strings by their number of tokens: float64[vocab ** size] for every size up to ``length``."""
    sums = [torch.zeros(vocab**size, dtype=torch.float64) for size in range(length + 1)]
    for text, prob in strings:
        number = 0
        for token in text:
            number = number * vocab + token
        sums[len(text)][number] += prob
    return sums
