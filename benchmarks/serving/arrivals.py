"""Open load on ``stree serve`` with the bundled pair: Poisson arrivals at fixed rates; prints one JSON line.

Run: python -m benchmarks.serving.arrivals [--rates 1,2,4,8] [--requests 24] [--rounds 3]

In an open load, a request is sent at its arrival time whether or not earlier ones are finished, as with
``--request-rate`` of vLLM's benchmark.  Every request asks for 64 tokens at temperature 0.8.  In a round at a rate, all
budgets serve the same requests at the same times, one budget after the other; the next round has other times, and
begins with the next budget, as a machine's speed drifts.  Times are counted from a request's arrival and include its
time in the queue.  Latency is the time to the last token over the number of tokens.  Tokens a second are those of all
requests over the rounds' times from the first arrival to the last token: below capacity, about the offered load.
The 95 % intervals of ratios to plain decoding are a paired bootstrap over requests; requests of one load share batches
and a queue, so they are not independent, and the intervals are too narrow.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import accumulate, product
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap

from benchmarks.report import study
from benchmarks.serving import load
from benchmarks.serving.load import chunks, served, speed

BUDGETS = {
    "plain": ("--budget", "1"),
    "chain:4": ("--growth", "chain:4", "--budget", "5"),  # the root and 4 drafted tokens
    "tree:8": ("--budget", "8"),
    "tree:16": ("--budget", "16"),
    "auto": ("--budget", "auto"),
}

Array = NDArray[Any]


def arrival_times(rate: float, count: int, seed: int) -> list[float]:
    """Draw the times of a Poisson process in seconds; the first request arrives at 0."""
    chooser = random.Random(seed)
    return [0.0, *accumulate(chooser.expovariate(rate) for _ in range(count - 1))]


def bodies(count: int, tokens: int, seed: int) -> list[dict[str, Any]]:
    """Make sampled requests of one length of output; prompts repeat after ``NUM_REQUESTS``."""
    prompts = [body["prompt"] for body in load.requests(seed)]
    options = {"model": "bundled", "max_tokens": tokens, "temperature": 0.8, "ignore_eos": True, "stream": True}
    return [{**options, "prompt": prompts[number % len(prompts)], "seed": number} for number in range(count)]


async def send_all(url: str, sent: Sequence[dict[str, Any]], arrivals: Sequence[float]) -> Array:
    """Send every request at its arrival time.

    Returns:
        times: [2, requests], seconds from each request's arrival to its first and to its last token.
    """
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=len(sent))) as client:

        async def one(body: dict[str, Any], arrival: float) -> tuple[float, float]:
            await asyncio.sleep(arrival - time.perf_counter())
            pieces = [(time.perf_counter(), piece) async for piece in chunks(client, url, body)]
            first = next((at for at, piece in pieces if piece), pieces[-1][0])
            return first - arrival, pieces[-1][0] - arrival

        async for _ in chunks(client, url, sent[0]):  # brings back the pages of a process that was idle
            pass
        now = time.perf_counter()
        times = await asyncio.gather(*(one(body, now + arrival) for body, arrival in zip(sent, arrivals, strict=True)))
    return np.array(times).T


def figures(times: Array, seconds: float, tokens: int) -> dict[str, float]:
    """Return the figures of one budget at one rate; times as ``send_all`` returns them, seconds those of all rounds."""
    first, last = times
    return {
        "tokens_per_s": tokens * len(last) / seconds,
        "ttft_median_s": float(np.median(first)),
        "ttft_p99_s": float(np.quantile(first, 0.99)),
        "latency_median_s": float(np.median(last) / tokens),
    }


def ratios(row: dict[str, float], plain: dict[str, float], times: Array, plain_times: Array) -> dict[str, Any]:
    """Return the ratio of every figure to plain decoding's, those of medians with an interval."""

    def median_ratio(own: Array, base: Array, axis: int) -> Array:
        return np.asarray(np.median(own, axis) / np.median(base, axis))

    names = "ttft_median_s", "latency_median_s"
    medians = {}
    for name, own, base in zip(names, times, plain_times, strict=True):
        found = bootstrap((own, base), median_ratio, paired=True, method="percentile", rng=0).confidence_interval
        medians[name] = float(median_ratio(own, base, -1)), float(found.low), float(found.high)
    return {name: row[name] / plain[name] for name in row} | medians


def run(
    rates: str = "1,2,4,8", requests: int = 24, tokens: int = 64, rounds: int = 1,
    budgets: str = "chain:4,tree:16,auto",
) -> list[dict[str, Any]]:  # fmt: skip
    """Measure plain decoding and other budgets at every rate, in one record.

    Args:
        rates: requests a second.
        requests: number at each rate in a round.
        tokens: of each request.
        rounds: at each rate, other rates in between.
        budgets: compared with plain.
    """
    per_second, names = [float(rate) for rate in rates.split(",")], ["plain", *budgets.split(",")]
    if min(per_second) <= 0 or not BUDGETS.keys() >= {*names}:
        raise ValueError(f"rates must be positive, budgets of {', '.join(BUDGETS)}; got {rates}, {budgets}")
    if min(requests, tokens, rounds) < 1:
        what = f"{requests}, {tokens} and {rounds}"
        raise ValueError(f"--requests, --tokens and --rounds must be at least 1, got {what}")
    sent = bodies(requests, tokens, 0)
    times: dict[tuple[float, str], list[Array]] = defaultdict(list)
    seconds: Counter[tuple[float, str]] = Counter()
    with ExitStack() as servers:
        urls = {name: servers.enter_context(served("--cache-mb", "0", *BUDGETS[name]))[0] for name in names}
        for url in urls.values():
            asyncio.run(speed(url, 8, 0))
        for place, (number, rate) in product(range(rounds), enumerate(per_second)):
            arrivals = arrival_times(rate, requests, number + place * len(per_second))
            for name in names[place % len(names) :] + names[: place % len(names)]:
                found = asyncio.run(send_all(urls[name], sent, arrivals))
                times[rate, name].append(found)
                seconds[rate, name] += (found[1] + arrivals).max()
    rows = []
    for rate in per_second:
        whole = {name: np.concatenate(times[rate, name], axis=1) for name in names}
        each = {name: figures(whole[name], seconds[rate, name], tokens) for name in names}
        for name in names:
            over_plain = ratios(each[name], each["plain"], whole[name], whole["plain"])
            rows.append({"rate": rate, "budget": name, **each[name], "over_plain": over_plain})
    return [{"bench": "serving-arrivals", "requests": requests, "tokens": tokens, "rounds": rounds, "rows": rows}]


if __name__ == "__main__":
    study(run)
