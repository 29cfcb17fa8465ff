"""Policies of tree sizes under load, simulated: mean latency and goodput by rate of requests.

Run with ``python -m benchmarks.studies.smartspec [--out FILE]``; it prints a table and one JSON line.

Requests arrive at random (Poisson), wait for a row of the batch, and ask for a fixed number of tokens.  A step takes
what a machine's formula says for the rows of the batch and its widest tree, with a tenth of scatter and rare slow
steps; a request accepts by a level of its own, drawn once.  Policies see times and accepted tokens, as in the engine.
The two formulas are made up after measured steps: "cpu", where nodes cost time (the bundled pair on one core), and
"gpu", where weights are read once for all of them.  So this compares policies, and says nothing of a real machine.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from benchmarks.report import command_line, finish
from stree.bench.records import Record
from stree.budget.request_sizes import GAIN, SIZES, ActiveRequest, RequestSizes, StepHistory

__all__ = ["MACHINES", "POLICIES", "RATES", "by_rate", "rows", "run"]

RATES = (0.5, 1.0, 2.0, 4.0, 8.0)  # requests a second


@dataclass(frozen=True, slots=True)
class Machine:
    """A batch's most rows, the tokens of a request, and milliseconds of a step.

    Attributes:
        max_batch: most rows.
        tokens: that a request asks for.
        step: milliseconds for rows, width (1 is plain decoding) and tokens of context.
    """

    max_batch: int
    tokens: int
    step: Callable[[int, int, int], float]


def _cpu(rows: int, width: int, context: int) -> float:
    drafts = (2.0 + 0.5 * rows) * (width > 1)
    return 3.5 + 0.7 * rows + 0.25 * rows * width + 0.0002 * context + drafts


def _gpu(rows: int, width: int, context: int) -> float:
    return 9.0 + 0.1 * rows + max(0.0, 0.012 * (rows * width - 64)) + 0.00005 * context + 2.0 * (width > 1)


MACHINES = {"cpu": Machine(8, 64, _cpu), "gpu": Machine(32, 128, _gpu)}


@dataclass(eq=False)
class Request:
    """A request: arrival, acceptance level, the tokens that it has, and when it ended, in seconds."""

    arrival: float
    level: float
    done: int = 0
    end: float = field(default=0.0)


class Fixed:
    """The same size for every step; the interface of ``RequestSizes``."""

    def __init__(self, size: int) -> None:
        self.size = size

    def choose(self, requests: Sequence[ActiveRequest]) -> list[int]:
        """Return the size for every request."""
        return [self.size] * len(requests)

    def observe(self, *_: Any) -> None:
        """Nothing is learnt."""


POLICIES: dict[str, Callable[[], Any]] = {
    "plain": lambda: Fixed(1),
    **{f"{size} nodes": lambda size=size: Fixed(size) for size in SIZES[1:4]},  # type: ignore[misc]
    "auto": lambda: RequestSizes(SIZES, StepHistory()),
}


def run(policy: Any, machine: Machine, rate: float, seed: int, count: int = 150) -> tuple[float, float]:
    """Serve requests; return the mean seconds from arrival to last token, and tokens a second."""
    chance, now = random.Random(seed), 0.0
    waiting, active, done = deque[Request](), list[Request](), list[Request]()
    arrival = 0.0
    for _ in range(count):
        arrival += chance.expovariate(rate)
        waiting.append(Request(arrival, min(chance.lognormvariate(0.4, 0.8), 8.0)))
    began = waiting[0].arrival
    while waiting or active:
        if not active:
            now = max(now, waiting[0].arrival)
        while waiting and waiting[0].arrival <= now and len(active) < machine.max_batch:
            active.append(waiting.popleft())
        requests = [ActiveRequest(request, 100 + request.done) for request in active]
        context = sum(request.length for request in requests)
        sizes = policy.choose(requests)
        slow = chance.uniform(0.9, 1.1) * (5 if chance.random() < 0.01 else 1)
        seconds = machine.step(len(active), max(sizes), context) / 1e3 * slow
        emitted = []
        for request, size in zip(active, sizes, strict=True):
            mean = request.level * GAIN[size]
            emitted.append(1 + (min(int(chance.expovariate(1 / mean) + 0.5), size - 1) if mean else 0))
        policy.observe(requests, sizes, emitted, seconds)
        now += seconds
        for request, tokens in zip(active, emitted, strict=True):
            request.done += tokens
            request.end = now
        done += [request for request in active if request.done >= machine.tokens]
        active = [request for request in active if request.done < machine.tokens]
    latency = fmean(request.end - request.arrival for request in done)
    return latency, machine.tokens * count / (now - began)


def rows(seeds: int) -> Iterator[Record]:
    """Run every policy on every machine at every rate; each seed is one load, the same for all policies."""
    for machine, sizes in MACHINES.items():
        for rate in RATES:
            for name, make in POLICIES.items():
                runs = [run(make(), sizes, rate, seed) for seed in range(seeds)]
                latency, goodput = (fmean(figures) for figures in zip(*runs, strict=True))
                at = {"machine": machine, "rate": rate, "policy": name}
                yield {**at, "latency_s": round(latency, 4), "tokens_per_s": round(goodput, 1)}


def by_rate(found: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Return titles and lines of a table: figures of plain decoding, and the others' latency over it."""
    lines = []
    for machine in MACHINES:
        for rate in RATES:
            at = {row["policy"]: row for row in found if (row["machine"], row["rate"]) == (machine, rate)}
            plain = at["plain"]["latency_s"]
            ratios = [f"{at[name]['latency_s'] / plain:.2f}" for name in POLICIES if name != "plain"]
            lines.append([machine, f"{rate:g}", f"{at['auto']['tokens_per_s']:.0f}", f"{plain:.2f}", *ratios])
    names = (name for name in POLICIES if name != "plain")
    return ["machine", "requests a second", "auto, tokens/s", "plain, s a request", *names], lines


def main() -> None:
    """Simulate and print."""
    parser = command_line(__doc__, "file of JSON lines that the record replaces")
    parser.add_argument("--seeds", type=int, default=4, help="loads at every rate")
    options = parser.parse_args()
    found = list(rows(options.seeds))
    record = {"bench": "smartspec", "seeds": options.seeds, "rows": found}
    finish([record], options.out, *by_rate(found), replaces=True)


if __name__ == "__main__":
    main()
