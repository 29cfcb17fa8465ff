"""Counters of ``stree serve`` against what its clients have received, every second under many streams.

Run: python -m benchmarks.serving.counters [--streams 64] [--tokens 300]

All streams begin at once and ask for log probabilities, whose number is that of the tokens.  Every second
``vllm:generation_tokens_total`` is read, and then how many tokens the clients have: the difference is what is on its
way, as a share of the tokens so far.  At the end, sums of tokens and prompts must be equal.  Prints one JSON line.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import httpx

from benchmarks.report import study
from benchmarks.serving.load import events, read_metrics, requests, served
from stree.bench.records import Record

EMPTY = {"tokens": 0, "prompt_tokens": 0}


async def stream(client: httpx.AsyncClient, body: dict[str, Any], counts: dict[str, int]) -> None:
    """Read a stream, and count its tokens as they come, and those of its prompt."""
    async for chunk in events(client, "/v1/completions", body):
        for choice in chunk["choices"]:
            counts["tokens"] += len((choice["logprobs"] or {"tokens": ()})["tokens"])
        counts["prompt_tokens"] += (chunk.get("usage") or {}).get("prompt_tokens", 0)


async def scraped(client: httpx.AsyncClient) -> dict[str, float]:
    """Read the counters."""
    found = read_metrics((await client.get("/metrics")).text).items()
    named = {name.partition("{")[0]: value for name, value in found}
    return {"tokens": named["vllm:generation_tokens_total"], "prompt_tokens": named["vllm:prompt_tokens_total"]}


async def compare(url: str, streams: int, tokens: int) -> Record:
    """Return what the counters and the clients said every second."""
    counts, seconds = dict(EMPTY), list[tuple[float, float, int]]()
    options = {"max_tokens": tokens, "ignore_eos": True, "logprobs": 0, "stream_options": {"include_usage": True}}
    bodies = [{**body, **options, "prompt": body["prompt"][:60]} for body in (requests(0) * streams)[:streams]]
    limits = httpx.Limits(max_connections=streams)
    async with (
        httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client,
        httpx.AsyncClient(base_url=url, timeout=60) as monitor,
    ):
        running = asyncio.gather(*(stream(client, body, counts) for body in bodies))
        began = time.monotonic()
        while not running.done():
            await asyncio.sleep(1)
            found = await scraped(monitor)
            seconds.append((time.monotonic() - began, found["tokens"], counts["tokens"]))
        await running
        end = await scraped(monitor)
    shares = [(counter - received) / counter for _, counter, received in seconds if counter]
    return {
        "streams": streams, "tokens_of_each": tokens, "scrapes": len(seconds), "is_equal_at_end": end == counts,
        "largest_share": max(map(abs, shares)), "median_share": statistics.median(shares),
        "seconds_beyond_2_percent": sum(abs(share) > 0.02 for share in shares), "seconds": seconds,
    }  # fmt: skip


def measure(streams: int = 64, tokens: int = 300) -> list[Record]:
    """Run it, for one record.

    Args:
        streams: at once.
        tokens: of each stream.
    """
    with served("--max-batch", f"{streams}", "--cache-mb", "0") as (url, _):
        return [{"bench": "serving-counters", **asyncio.run(compare(url, streams, tokens))}]


if __name__ == "__main__":
    study(measure)
