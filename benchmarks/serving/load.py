"""Closed load on ``stree serve`` with the bundled pair, over HTTP on this machine; prints one JSON line.

Run: python -m benchmarks.serving.load {throughput,prefix} [--rounds 9]

``throughput``: tokens a second of one client and of eight, beside those of plain decoding; and of one client beside
``stree.generate``, both with trees of a fixed size, so that what "auto" chooses makes no difference.  Rounds are
interleaved; a text before each clock brings back the pages of a process that was idle, which some machines reclaim.

``prefix``: seconds to the first token, and the server's seconds of CPU time until then, of a second chat with the same
system prompt of 800 tokens over those of the first.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal

import httpx
import psutil

import stree
from benchmarks.report import study
from stree.bench.pair import Pair
from stree.bench.records import Record
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
            with suppress(httpx.HTTPError):
                httpx.get(f"{url}/health").raise_for_status()
                break
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


async def events(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
    """Yield the events of a stream."""
    async with client.stream("POST", url, json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


async def chunks(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncIterator[str]:
    """Yield the pieces of a streamed completion."""
    async for event in events(client, f"{url}/v1/completions", body):
        yield event["choices"][0]["text"]


def read_metrics(text: str) -> dict[str, float]:
    """Return the values of a server's own metrics by name and labels."""
    parts = (line.rpartition(" ") for line in text.splitlines() if line.startswith("vllm:"))
    return {name: float(value) for name, _, value in parts}


def generated(pair: Pair, body: dict[str, Any], ids: list[int] | None = None, **options: Any) -> str:
    """Return the text of a request by ``stree.generate``; ``ids`` are its prompt where it is no completion."""
    ids = pair.tokenizer(body["prompt"])["input_ids"] if ids is None else ids
    sampling = Sampling(body["temperature"], body.get("top_k"), body.get("top_p"))
    options |= {"budget": NODES, "sampling": sampling, "seed": body["seed"], "max_new_tokens": body["max_tokens"]}
    out = stree.generate(pair.target, [ids], pair.drafter, **options)
    whole: str = pair.tokenizer.decode(out.sequences[0], skip_special_tokens=True)
    return whole[len(pair.tokenizer.decode(ids)) :]


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


def generate_speed(pair: Pair, seed: int) -> float:
    """Return the tokens a second of ``stree.generate`` for what the first client asks."""
    began, bodies = 0.0, requests(seed)
    for number, body in enumerate([*bodies[2:4], *bodies[:2]]):
        if number == 2:
            began = time.perf_counter()
        generated(pair, {**body, "max_tokens": 64, "temperature": 0.8}, ignore_eos=True)
    return 128 / (time.perf_counter() - began)


def throughput(rounds: int) -> Record:
    """Measure in interleaved rounds; the first one warms up."""
    pair = Pair.load(device="cpu")
    with ExitStack() as servers:
        budgets = "auto", "1", f"{NODES}"
        url, plain, fixed = (servers.enter_context(served("--cache-mb", "0", "--budget", one))[0] for one in budgets)
        found = [
            {
                "eight": asyncio.run(speed(url, 8, seed)),
                "plain_eight": asyncio.run(speed(plain, 8, seed)),
                "one": asyncio.run(speed(url, 1, seed)),
                "fixed_one": asyncio.run(speed(fixed, 1, seed)),
                "generate": generate_speed(pair, seed),
            }
            for seed in range(rounds + 1)
        ]
    kept = {name: [each[name] for each in found[1:]] for name in found[0]}
    ratios = {
        f"{first}_over_{second}": statistics.median(a / b for a, b in zip(kept[first], kept[second], strict=True))
        for first, second in (("eight", "one"), ("eight", "plain_eight"), ("fixed_one", "generate"))
    }
    return {"tokens_per_s": {name: statistics.median(each) for name, each in kept.items()}, **ratios, "rounds": kept}


async def first_piece(url: str, server: psutil.Process, system: str, user: str) -> dict[str, float]:
    """Return the seconds of a chat until its first text, the server's of CPU time, and its prompt's tokens."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    body = {"model": "bundled", "messages": messages, "max_tokens": 4, "temperature": 0, "stream": True}
    found: dict[str, float] = {}
    began, cpu_before = time.perf_counter(), cpu_s(server)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        options = {"stream_options": {"include_usage": True}, "ignore_eos": True}
        async for event in events(client, "/v1/chat/completions", body | options):
            if not found and event["choices"] and event["choices"][0]["delta"].get("content"):
                found = {"first_s": time.perf_counter() - began, "cpu_s": cpu_s(server) - cpu_before}
            if (usage := event.get("usage")) is not None:
                found["prompt_tokens"] = usage["prompt_tokens"]
                found["cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]
    return found


def prefix(rounds: int) -> Record:
    """Measure the first and the second chat of a system prompt, another one in each round; the first round warms up."""
    found = []
    with served("--max-length", "2048", "--budget", f"{NODES}", "--cache-mb", "256") as (url, server):
        for number in range(rounds + 1):
            words = random.Random(number).choices(WORDS.split(), k=1200)
            count = next(k for k in range(400, 1200, 4) if num_tokens(url, words[:k]) >= 800)
            users = "And what did she say about it?", "The river has a name. Which?"
            found.append([asyncio.run(first_piece(url, server, " ".join(words[:count]), user)) for user in users])
    ratios = {
        name: [second[name] / max(first[name], 1e-3) for first, second in found[1:]] for name in ("first_s", "cpu_s")
    }
    medians = {f"{name}_second_over_first": statistics.median(each) for name, each in ratios.items()}
    return {**medians, "rounds": found[1:]}


def num_tokens(url: str, words: list[str]) -> int:
    """Return the tokens of a text."""
    count: int = httpx.post(f"{url}/tokenize", json={"prompt": " ".join(words)}).json()["count"]
    return count


def cpu_s(process: psutil.Process) -> float:
    """Return the seconds of CPU time of a process."""
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(what: Literal["throughput", "prefix"], rounds: int = 9) -> list[Record]:
    """Measure one of both, for one record.

    Args:
        what: tokens a second of clients, or chats with a system prompt that is kept.
        rounds: behind one that warms up.
    """
    return [{"bench": f"serving-{what}", **{"throughput": throughput, "prefix": prefix}[what](rounds)}]


if __name__ == "__main__":
    study(measure, by_place="what")
