"""Simulated open load on a server: latency of "auto" beside plain decoding and fixed tree sizes, by request rate.

Run: python -m benchmarks.studies.simulated_load [--rates 0.5,1,2,4,8] [--loads 24]

Goodput by request rate is SmartSpec's figure (arXiv 2406.14066).  Poisson arrivals, up to eight texts at once; the
sizes are chosen by the library's own controllers.  Simulated are the seconds of a step, which scatter, and how many
tokens it emits: a text's mean of accepted nodes differs from text to text, and grows with the size of a tree as the
controllers assume.  "cpu" is a formula for the bundled pair on two threads of an AMD processor with AVX-512, whose
batch has as many rows as texts; "gpu" one for predicted steps of Mamba-2 2.7B, whose batch always has eight.
Latency is the mean of a text's time from its arrival to its last token over its tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import mean

from benchmarks.report import study
from stree.bench.records import Record
from stree.budget.controller import GAIN, SIZES, START, AcceptanceLevel, StepHistory
from stree.budget.policy import AutoBudget, BudgetPolicy

__all__ = ["TITLES", "cells", "records", "simulate"]

BUDGETS = ("plain", "tree:8", "tree:16", "auto")
TITLES = ("machine", "requests/s", *(f"{budget}, ms a token" for budget in BUDGETS), "auto over the best")
ROWS = 8  # texts at once
TOKENS = 64  # of a text
REQUESTS = 144  # of a load
PREFILL_S = 0.026  # of a prompt
Policies = Callable[[int], BudgetPolicy]  # by the number of texts


@dataclass(slots=True)
class StepTimes:
    """Seconds of a step.

    Attributes:
        plain: of plain decoding.
        row: beside it for each text.
        tree: of a step with trees.
        node: beside it for each node of each text.
        unread: for each text whose prompt the draft model has not read before.
        missed: where it has missed tokens of any other text.
        is_padded: whether the batch always has ROWS rows.
    """

    plain: float
    row: float
    tree: float
    node: float
    unread: float
    missed: float
    is_padded: bool

    def seconds(self, rows: int, nodes: int) -> float:
        """Return the seconds of a step of steady decoding."""
        rows = ROWS if self.is_padded else rows
        return self.plain + self.row * rows if nodes == 1 else self.tree + self.node * rows * nodes


MACHINES = {
    "cpu": StepTimes(5.6e-3, 0.45e-3, 9.5e-3, 0.33e-3, 4.5e-3, 6e-3, is_padded=False),
    "gpu": StepTimes(2.4e-3, 0.05e-3, 4.0e-3, 0.006e-3, 4.5e-3, 4.5e-3, is_padded=True),
}


@dataclass(slots=True)
class Text:
    """A text: when it arrived, its mean of accepted nodes, tokens to come, and what the draft model has read of it."""

    arrival: float
    level: float
    left: int = TOKENS - 1
    is_read: bool = False
    has_missed: bool = False


def policies(budget: str) -> Policies:
    """Make what chooses the sizes of the steps of a server that has just been started."""
    if budget != "auto":
        return lambda _: BudgetPolicy(None, 1 if budget == "plain" else int(budget.removeprefix("tree:")))
    made, level = dict[int, BudgetPolicy](), AcceptanceLevel()

    def policy(rows: int) -> BudgetPolicy:
        if rows not in made:
            made[rows] = AutoBudget(None, SIZES, StepHistory(), START if rows == 1 else 1, level)
        return made[rows]

    return policy


def emitted(chooser: random.Random, level: float, nodes: int) -> int:
    """Draw the tokens of a step."""
    accepted, chance = 0, level * GAIN[nodes] / (1 + level * GAIN[nodes])
    while accepted < 12 and chooser.random() < chance:
        accepted += 1
    return 1 + accepted


def simulate(step_times: StepTimes, choose: Policies, arrivals: list[float], chooser: random.Random) -> list[float]:
    """Serve texts that arrive at these seconds; return the latencies a token."""
    now, waiting, running, latencies = 0.0, list(reversed(arrivals)), list[Text](), list[float]()
    while waiting or running:
        now = now if running else max(now, waiting[-1])
        while waiting and waiting[-1] <= now and len(running) < ROWS:
            now += PREFILL_S
            running.append(Text(waiting.pop(), max(0.3, chooser.gauss(1.95, 0.45))))
        policy = choose(ROWS if step_times.is_padded else len(running))
        nodes = policy.next()
        step_s = step_times.seconds(len(running), nodes) * math.exp(chooser.gauss(0, 0.08))
        step_s += chooser.uniform(0, 0.02) * (chooser.random() < 0.02)  # a rare slow one
        if nodes > 1:
            step_s += sum(step_times.unread for text in running if not text.is_read)
            step_s += step_times.missed * any(text.is_read and text.has_missed for text in running)
        counts = [emitted(chooser, text.level, nodes) for text in running]
        policy.observe(counts, step_s)
        now += step_s
        for text, count in zip(running, counts, strict=True):
            text.is_read, text.has_missed = text.is_read or nodes > 1, nodes == 1
            text.left -= count
        latencies += [(now - text.arrival) / TOKENS for text in running if text.left <= 0]
        running = [text for text in running if text.left > 0]
    return latencies


def load(step_times: StepTimes, budget: str, rate: float, seed: int) -> float:
    """Return the mean latency a token of one load, after a server has served one client and then eight."""
    chooser, times = random.Random(seed), [0.0]
    while len(times) < REQUESTS:
        times.append(times[-1] + chooser.expovariate(rate))
    served = partial(simulate, step_times, policies(budget), chooser=chooser)
    for texts in (1, 1, ROWS, ROWS):
        served([0.0] * texts)
    return mean(served(times))


def records(rates: str = "0.5,1,2,4,8", loads: int = 24) -> list[Record]:
    """Simulate every budget at every rate.

    Args:
        rates: requests a second.
        loads: that are averaged.
    """
    if loads < 1 or any(float(rate) <= 0 for rate in rates.split(",")):
        raise ValueError(f"rates must be positive and loads at least 1, got {rates} and {loads}")
    rows = []
    for name, step_times in MACHINES.items():
        for rate in map(float, rates.split(",")):
            latency_s = {
                budget: mean(load(step_times, budget, rate, seed) for seed in range(loads)) for budget in BUDGETS
            }
            over_best = latency_s["auto"] / min(latency_s[budget] for budget in BUDGETS if budget != "auto")
            rows.append({"machine": name, "rate": rate, "latency_s": latency_s, "auto_over_best": over_best})
    return [{"study": "simulated-load", "rows": rows}]


def cells(row: Record) -> list[object]:
    """Make a line of the table."""
    times = [f"{1e3 * time:.2f}" for time in row["latency_s"].values()]
    return [row["machine"], f"{row['rate']:g}", *times, f"{row['auto_over_best']:.3f}"]


if __name__ == "__main__":
    study(records, TITLES, cells)
