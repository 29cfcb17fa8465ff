"""Budget "auto" on the clocks of steps: most of the goodput of the best fixed size after 500 steps."""

from __future__ import annotations

import random
from collections import deque

import pytest

from stree.budget.controller import GAIN, SIZES, BudgetController, StepHistory

GPU = {1: 2.8, 8: 4.4, 16: 4.9, 32: 5.6, 64: 7.0}  # predicted ms of replayed steps, Mamba-2 2.7B (docs/gpu.md)
LAUNCHED = {1: 18.0, 8: 44.0, 16: 44.0, 32: 56.0, 64: 56.0}  # before a capture
CPU = {1: 7.0, 8: 11.5, 16: 15.0, 32: 22.0, 64: 36.0}  # compiled
STEPS, SEEDS = 500, 10


def one_time_ms(clock: str, size: int, number: int) -> float | None:
    """Return what the first steps of a size take beside their own time, or None for a step that is timed alone."""
    if clock == "captured" and number <= 3:  # built and launched, launched, captured
        return [8000 + LAUNCHED[size], LAUNCHED[size], 400.0][number - 1]
    return 0.5 * CPU[size] if clock == "compiled" and number == 1 else None


class Texts:
    """Steps of given times whose accepted nodes scatter around ``level`` times the gain of their size."""

    def __init__(self, times: dict[int, float], level: float, clock: str, seed: int, *, tells: bool = True) -> None:
        self.times, self.level, self.clock, self.random, self.tells = times, level, clock, random.Random(seed), tells

    def tokens(self, size: int) -> int:
        mean = self.level * GAIN[size]
        return 1 + min(int(self.random.expovariate(1 / mean) + 0.5), 12) if mean else 1

    def goodput(self, start: int) -> float:
        """Let a controller choose; return tokens by ms, what is paid once left out."""
        controller, runs = BudgetController(SIZES, StepHistory(), start), dict.fromkeys(SIZES, 0)
        waiting, tokens, spent = deque[tuple[int, list[int], float | None]](), 0, 0.0
        for _ in range(STEPS):
            size = controller.choose()
            runs[size] += 1
            count, extra = self.tokens(size), one_time_ms(self.clock, size, runs[size])
            tokens, spent = tokens + count, spent + self.times[size]
            time_ms = self.times[size] * self.random.uniform(0.97, 1.03) + (extra or 0.0)
            if self.clock == "stalls" and self.random.random() < 0.05:
                time_ms += self.random.uniform(40, 80)
            is_steady = self.clock != "captured" or extra is None or not self.tells
            waiting.append((size, [count], time_ms / 1e3 if is_steady else None))
            if len(waiting) > (self.clock == "captured"):  # the host runs a step ahead of a device
                controller.observe(*waiting.popleft())
        return tokens / spent

    def best(self) -> float:
        """Return the goodput of the best fixed size."""
        return max(sum(self.tokens(size) for _ in range(4000)) / 4000 / time for size, time in self.times.items())


def share(times: dict[int, float], level: float, clock: str, start: int, *, tells: bool = True) -> float:
    """Return the mean goodput over that of the best fixed size."""
    best = Texts(times, level, clock, 99).best()
    return sum(Texts(times, level, clock, seed, tells=tells).goodput(start) for seed in range(SEEDS)) / SEEDS / best


@pytest.mark.parametrize("start", [1, 16])
@pytest.mark.parametrize("level", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("clock", ["clean", "captured", "compiled", "stalls"])
def test_auto_reaches_most_of_the_best_fixed_size(clock: str, level: float, start: int) -> None:
    assert share(CPU if clock == "compiled" else GPU, level, clock, start) >= 0.9


def test_times_of_builds_and_captures_would_keep_it_from_trees() -> None:
    assert share(GPU, 3.0, "captured", 1, tells=False) < 0.6
