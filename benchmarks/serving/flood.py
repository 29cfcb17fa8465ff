"""Eight requests of 7 MB at once, which cannot fit, beside small ones, on ``stree serve``; prints one JSON line.

Run: python -m benchmarks.serving.flood [--rounds 5] [--out benchmarks/results/serving/flood.jsonl]

For each path: seconds until the last of the eight is refused by status 400, seconds of a request of two tokens that is
sent beside them, over those of the same request without them (medians over rounds), the growth of the server's resident
memory, and its seconds of CPU time for the eight.  The eight come from processes of their own, whose bodies are made
before.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil

from benchmarks.report import study
from benchmarks.serving.load import cpu_s, served
from stree.bench.records import Record

FORKED = multiprocessing.get_context("fork")
NUM_LARGE, LARGE = 8, 7_000_000  # requests, and characters of each
SMALL = {"model": "bundled", "prompt": "Question:", "max_tokens": 2, "ignore_eos": True}
TEXT = ("The number of apples that she told them about " * (LARGE // 40))[:LARGE]
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": TEXT}, "chat/completions": {"messages": [{"role": "user", "content": TEXT}]},
    "responses": {"input": TEXT},
}  # fmt: skip


def post(client: httpx.Client, path: str, body: bytes) -> tuple[int, float]:
    """Send a body; return status and seconds."""
    began = time.perf_counter()
    response = client.post(f"/v1/{path}", content=body, headers={"Content-Type": "application/json"})
    return response.status_code, time.perf_counter() - began


def flood(url: str, path: str, body: bytes, starts: Any, out: Any) -> None:
    """Send large requests at once when told, again and again; put their statuses and the seconds of the last one."""
    with ThreadPoolExecutor(NUM_LARGE) as pool, httpx.Client(base_url=url, timeout=300) as client:
        while starts.get():
            found = [*pool.map(lambda _: post(client, path, body), range(NUM_LARGE))]
            out.put(([status for status, _ in found], max(seconds for _, seconds in found)))


class Peak:
    """Context that reads a process's resident memory every 5 ms, and keeps the most."""

    def __init__(self, process: psutil.Process) -> None:
        self._process, self._is_over, self.bytes = process, threading.Event(), 0
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        while not self._is_over.wait(0.005):
            self.bytes = max(self.bytes, self._process.memory_info().rss)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def measure(url: str, server: psutil.Process, path: str, rounds: int) -> Record:
    """Measure one path; the first round warms up."""
    body, small = json.dumps({"model": "bundled", **BODIES[path]}).encode(), json.dumps(SMALL).encode()
    starts, out, client = FORKED.Queue(), FORKED.Queue(), httpx.Client(base_url=url, timeout=300)
    sender = FORKED.Process(target=flood, args=(url, path, body, starts, out))
    sender.start()
    rows = []
    for _ in range(rounds + 1):
        idle = [post(client, "completions", small)[1] for _ in range(5)]
        before, cpu_before, beside = server.memory_info().rss, cpu_s(server), list[float]()
        with Peak(server) as peak:
            starts.put(True)
            while out.empty():
                status, seconds = post(client, "completions", small)
                beside.append(seconds)
                if status != 200:
                    raise RuntimeError(f"a small request got status {status}")
            statuses, last_s = out.get()
        rows.append({
            "last_s": last_s, "cpu_s": cpu_s(server) - cpu_before, "growth_mb": (peak.bytes - before) / 1e6,
            "idle_s": statistics.median(idle), "beside_s": statistics.median(beside), "slowest_s": max(beside),
            "small": len(beside), "refused": statuses.count(400),
        })  # fmt: skip
    starts.put(False)
    sender.join()
    kept = rows[1:]
    found = {name: statistics.median(row[name] for row in kept) for name in kept[0]}
    ratios = {
        f"{name}_over_idle": statistics.median(row[f"{name}_s"] / row["idle_s"] for row in kept)
        for name in ("beside", "slowest")
    }
    return {"path": path, **found, **ratios, "first_growth_mb": rows[0]["growth_mb"], "rounds": kept}


def measure_all(rounds: int = 5) -> list[Record]:
    """Measure all paths, in one record.

    Args:
        rounds: behind one that warms up.
    """
    with served("--cache-mb", "0") as (url, server):
        return [{"bench": "serving-flood", "rows": [measure(url, server, path, rounds) for path in BODIES]}]


if __name__ == "__main__":
    study(measure_all)
