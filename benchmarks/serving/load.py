"""Load on ``stree serve`` with the bundled pair, over HTTP on this machine; prints one JSON line.

Run: python -m benchmarks.serving.load soak [--minutes 5] [--clients 64]
     python -m benchmarks.serving.load throughput [--rounds 9]

``soak``: clients that come at random, ask for texts of random kinds and leave in a fifth of all cases.  Every finished
text is compared with the text that ``stree.generate`` gives for the same request alone.  The gap between two chunks
of a stream is one step of the batch.  ``throughput``: tokens a second of one client and of eight, beside those of
plain decoding; and of one client beside ``stree.generate``, both with trees of a fixed size, so that what "auto"
chooses makes no difference.  Rounds are interleaved; a text before each clock brings back the pages of a process that
was idle, which some machines reclaim.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

import stree
from stree.bench.records import append, environment
from stree.inputs import load_tokenizer, locate
from stree.sampling import Sampling

NUM_REQUESTS = 48  # different ones
NODES = 12  # of a tree of fixed size
WORDS = "The number of apples that def class return Question Answer and she told them about a river"


@contextmanager
def served(*flags: str) -> Iterator[tuple[str, psutil.Process]]:
    """Run ``stree serve`` on a free port; give its address and process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = f"{sys.executable} -m stree.cli serve bundled --max-length 512 --port {port}".split()
    server = subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                httpx.get(f"{url}/health").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield url, psutil.Process(server.pid)
    finally:
        server.terminate()
        server.wait(60)


def requests(seed: int) -> list[dict[str, Any]]:
    """Make requests of different kinds."""
    chooser = random.Random(seed)
    made = []
    for number in range(NUM_REQUESTS):
        prompt = " ".join(chooser.choices(WORDS.split(), k=chooser.randint(2, 60)))
        body: dict[str, Any] = {
            "model": "bundled", "prompt": prompt, "seed": number,
            "max_tokens": chooser.randint(4, 96), "temperature": chooser.choice([0, 0, 0.7, 1.0]), "stream": True,
        }  # fmt: skip
        if body["temperature"] and chooser.random() < 0.3:
            body |= {"top_p": 0.9} if chooser.random() < 0.5 else {"top_k": 20}
        made.append(body)
    return made


@dataclass
class Seen:
    """What the clients have seen."""

    texts: list[tuple[int, str]] = field(default_factory=list)  # number of the request, and its text
    gaps: list[float] = field(default_factory=list)  # seconds between two chunks
    left: int = 0
    errors: list[str] = field(default_factory=list)


async def chunks(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncIterator[str]:
    """Yield the pieces of a stream."""
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])["choices"][0]["text"]


async def one_client(client: httpx.AsyncClient, url: str, bodies: list[dict[str, Any]], end: float, seen: Seen) -> None:
    """Ask for one text after the other until the end; leave some of them."""
    while time.monotonic() < end:
        await asyncio.sleep(random.expovariate(2.0))
        number, stays = random.randrange(len(bodies)), random.random() >= 0.2
        pieces, before, most = [], None, 1 << 30 if stays else random.randint(1, 4)
        try:
            async for piece in chunks(client, url, bodies[number]):
                now = time.perf_counter()
                if before is not None and piece:
                    seen.gaps.append(now - before)
                before = now
                pieces.append(piece)
                if len(pieces) >= most:
                    seen.left += 1
                    break
            else:
                seen.texts.append((number, "".join(pieces)))
        except Exception as error:
            seen.errors.append(f"{type(error).__name__}: {error}")


async def soak(url: str, process: psutil.Process, minutes: float, clients: int) -> tuple[Seen, list[int]]:
    """Run all clients; return what they saw, and the server's resident bytes every second."""
    bodies, seen, resident = requests(0), Seen(), list[int]()
    end = time.monotonic() + 60 * minutes
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        tasks = [asyncio.create_task(one_client(client, url, bodies, end, seen)) for _ in range(clients)]
        while time.monotonic() < end:
            await asyncio.sleep(1)
            resident.append(process.memory_info().rss)
        await asyncio.gather(*tasks)
    return seen, resident


def alone(bodies: list[dict[str, Any]]) -> list[str]:
    """Return the text of every request by ``stree.generate``."""
    lm = stree.TreeLM.from_pretrained(locate("bundled", "target"))
    drafter = stree.drafters.load(locate("bundled", "drafter"), lm)
    tokenizer, texts = load_tokenizer(locate("bundled", "target")), []
    for body in bodies:
        ids = tokenizer(body["prompt"])["input_ids"]
        sampling = Sampling(body["temperature"], body.get("top_k"), body.get("top_p"))
        out = stree.generate(
            lm, [ids], drafter, budget=12, sampling=sampling, seed=body["seed"], max_new_tokens=body["max_tokens"]
        )
        whole = tokenizer.decode(out.sequences[0], skip_special_tokens=True)
        texts.append(whole[len(tokenizer.decode(ids)) :])
    return texts


def run_soak(minutes: float, clients: int) -> dict[str, Any]:
    """Measure a soak."""
    with served("--budget", "12", "--max-batch", "8", "--max-queue", "1000", "--cache-mb", "64") as (url, process):
        seen, resident = asyncio.run(soak(url, process, minutes, clients))
        expected = alone(requests(0))
        wrong = [(number, text) for number, text in seen.texts if text != expected[number]]
        stats = httpx.get(f"{url}/metrics").text
    second = resident[len(resident) // 2 :]
    growth = statistics.mean(second[-30:]) / statistics.mean(second[:30]) - 1
    running = next(line for line in stats.splitlines() if line.startswith("vllm:num_requests_running{"))
    gaps = np.quantile(seen.gaps, [0.5, 0.99])
    return {
        "finished": len(seen.texts), "left": seen.left, "errors": seen.errors[:5], "num_errors": len(seen.errors),
        "different": len(wrong), "different_texts": wrong[:3], "gap_median_s": gaps[0], "gap_p99_s": gaps[1],
        "gap_p99_over_median": gaps[1] / gaps[0], "resident_growth_second_half": growth,
        "resident_mb": [round(value / 1e6) for value in (resident[0], second[0], resident[-1])], "at_the_end": running,
    }  # fmt: skip


async def speed(url: str, clients: int, seed: int) -> float:
    """Return the tokens a second of clients that ask for two sampled texts of 64 tokens each."""
    bodies = [{**body, "max_tokens": 64, "temperature": 0.8, "ignore_eos": True} for body in requests(seed)]
    async with httpx.AsyncClient(timeout=300) as client:

        async def one(number: int) -> None:
            for place in range(2):
                async for _ in chunks(client, url, bodies[(2 * number + place) % len(bodies)]):
                    pass

        await one(clients)
        began = time.perf_counter()
        await asyncio.gather(*map(one, range(clients)))
    return clients * 2 * 64 / (time.perf_counter() - began)


def generate_speed(lm: stree.TreeLM, drafter: Any, tokenizer: Any, seed: int) -> float:
    """Return the tokens a second of ``stree.generate`` for what the first client asks."""
    began = 0.0
    for number, body in enumerate([*requests(seed)[2:4], *requests(seed)[:2]]):
        if number == 2:
            began = time.perf_counter()
        ids = tokenizer(body["prompt"])["input_ids"]
        options: dict[str, Any] = {"sampling": Sampling(0.8), "seed": body["seed"], "max_new_tokens": 64}
        stree.generate(lm, [ids], drafter, budget=NODES, ignore_eos=True, **options)
    return 128 / (time.perf_counter() - began)


def run_throughput(rounds: int) -> dict[str, Any]:
    """Measure in interleaved rounds; the first one warms up."""
    lm = stree.TreeLM.from_pretrained(locate("bundled", "target"))
    drafter = stree.drafters.load(locate("bundled", "drafter"), lm)
    tokenizer = load_tokenizer(locate("bundled", "target"))
    names = "one", "eight", "plain_eight", "fixed_one", "generate"
    found: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as servers:
        budgets = "auto", "1", f"{NODES}"
        url, plain, fixed = (servers.enter_context(served("--cache-mb", "0", "--budget", one))[0] for one in budgets)
        for seed in range(rounds + 1):
            found["eight"].append(asyncio.run(speed(url, 8, seed)))
            found["plain_eight"].append(asyncio.run(speed(plain, 8, seed)))
            found["one"].append(asyncio.run(speed(url, 1, seed)))
            found["fixed_one"].append(asyncio.run(speed(fixed, 1, seed)))
            found["generate"].append(generate_speed(lm, drafter, tokenizer, seed))
    kept = {name: values[1:] for name, values in found.items()}
    ratios = {
        f"{first}_over_{second}": statistics.median(a / b for a, b in zip(kept[first], kept[second], strict=True))
        for first, second in (("eight", "one"), ("eight", "plain_eight"), ("fixed_one", "generate"))
    }
    medians = {name: statistics.median(values) for name, values in kept.items()}
    return {"tokens_per_s": medians, **ratios, "rounds": kept}


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("soak", "throughput"))
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="file of JSON lines to which the record is appended")
    options = parser.parse_args()
    soaks = options.what == "soak"
    found = run_soak(options.minutes, options.clients) if soaks else run_throughput(options.rounds)
    record = {"bench": f"serving-{options.what}", "env": environment(), **found}
    if options.out is not None:
        append(options.out, [record])
    print(json.dumps(record))


if __name__ == "__main__":
    main()
