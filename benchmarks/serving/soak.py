"""Mixed load on ``stree serve`` for a long time, with clients that are killed; prints one JSON line.

Run: nice python -m benchmarks.serving.soak [--minutes 30] [--out benchmarks/results/serving/soak.jsonl]

Processes of clients ask for completions, chats and responses, whole and as streams, greedy and sampled, and leave a
fifth of them before their end.  Every 20 seconds one process is killed by SIGKILL and another takes its place.  Every
finished text is compared with the one that ``stree.generate`` gives for the same prompt alone, and at the end none of
the server's rows may be in use.  The server's resident memory is read every second; its slope is that of a line through
the second half, and each half's slope is recorded, since memory grows at first as caches of all kinds fill.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import psutil

import stree
from benchmarks.report import command_line, finish
from benchmarks.serving.load import NODES, requests, served
from stree.bench.pair import Pair
from stree.bench.records import Record
from stree.sampling import Sampling

FORKED = multiprocessing.get_context("fork")
KILL_S, READ_S = 20.0, 1.0  # between kills of a process of clients, and between readings of memory
LEAVING = 0.2  # share of requests that a client leaves
KINDS = ("completions", "chat/completions", "responses")


def mixed() -> list[tuple[str, dict[str, Any]]]:
    """Make paths and bodies of requests of all kinds, each whole and as a stream."""
    bodies = []
    for number, body in enumerate(requests(0)):
        kind, prompt = KINDS[number % 3], body["prompt"]
        body = {**body, "stream": number // 3 % 2 == 0}
        if kind != "completions":
            del body["prompt"]
            body |= {"messages": [{"role": "user", "content": prompt}]} if "chat" in kind else {"input": prompt}
        if kind == "responses":
            body["max_output_tokens"] = body.pop("max_tokens")
        bodies.append((f"/v1/{kind}", body))
    return bodies


def expected_text(pair: Pair, body: dict[str, Any]) -> str:
    """Return the text of a request by ``stree.generate``."""
    prompt = body.get("prompt")
    if prompt is None:
        messages = body.get("messages") or [{"role": "user", "content": body["input"]}]
        prompt = pair.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = pair.tokenizer(prompt)["input_ids"]
    out = stree.generate(
        pair.target, [ids], pair.drafter, budget=NODES, seed=body["seed"],
        sampling=Sampling(body["temperature"], body.get("top_k"), body.get("top_p")),
        max_new_tokens=body.get("max_tokens") or body["max_output_tokens"],
    )  # fmt: skip
    whole: str = pair.tokenizer.decode(out.sequences[0], skip_special_tokens=True)
    return whole[len(pair.tokenizer.decode(ids)) :]


def text_of(answer: dict[str, Any]) -> str:
    """Return the text of a whole answer, of an event or of a chunk; that of a tool call is its name and arguments."""
    if "choices" in answer:
        choice = (answer["choices"] or [{}])[0]
        part = choice.get("message") or choice.get("delta") or {}
        calls = [call["function"] for call in part.get("tool_calls") or ()]
        return choice.get("text") or (part.get("content") or "") + "".join(f["name"] + f["arguments"] for f in calls)
    if "output" in answer:
        return "".join(part["text"] for item in answer["output"] for part in item.get("content", ()))
    return str(answer["delta"]) if answer.get("type") == "response.output_text.delta" else ""


async def received(client: httpx.AsyncClient, path: str, body: dict[str, Any], most: int) -> str | None:
    """Ask for a text; return it, or None after ``most`` lines of a stream, when the client leaves."""
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        if not body["stream"]:
            return text_of(json.loads(await response.aread()))
        pieces = list[str]()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                pieces.append(text_of(json.loads(line[6:])))
                if len(pieces) == most:
                    return None
        return "".join(pieces)


async def one_client(client: httpx.AsyncClient, expected: Sequence[str], chooser: random.Random, out: Any) -> None:
    """Ask for one text after the other, and write a line about each."""
    bodies = mixed()
    while True:
        await asyncio.sleep(chooser.expovariate(2.0))
        number, leaves = chooser.randrange(len(bodies)), chooser.random() < LEAVING
        path, body = bodies[number]
        try:
            limit = chooser.uniform(0.05, 1.0) if leaves and not body["stream"] else None
            async with asyncio.timeout(limit):
                text = await received(client, path, body, 2 if leaves else 1 << 30)
            said = "left" if text is None else "right" if text == expected[number] else f"different: request {number}"
        except TimeoutError:
            said = "left"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(said, file=out, flush=True)


def clients(url: str, count: int, expected: Sequence[str], seed: int, path: Path) -> None:
    """Run clients until this process is killed; what comes of their requests is appended to a file."""

    async def run() -> None:
        with path.open("a") as out:
            async with httpx.AsyncClient(base_url=url, timeout=300) as client:
                choosers = [random.Random(f"{seed} {number}") for number in range(count)]
                await asyncio.gather(*(one_client(client, expected, chooser, out) for chooser in choosers))

    asyncio.run(run())


def slope(values: Sequence[float]) -> float:
    """Return the megabytes an hour of a line through readings of bytes."""
    return float(np.polyfit(np.arange(len(values)) * READ_S / 3600, np.asarray(values) / 1e6, 1)[0])


def soak(minutes: float, processes: int, each: int, folder: Path) -> Record:
    """Count what comes of the texts, and measure how the server's memory grows."""
    pair = Pair.load(device="cpu")
    expected = [expected_text(pair, body) for _, body in mixed()]
    resident, num_killed, outcomes = list[float](), 0, folder / "outcomes.txt"
    flags = ("--budget", f"{NODES}", "--max-batch", "8", "--max-queue", "1000", "--cache-mb", "64")

    def started(url: str) -> Any:
        process = FORKED.Process(target=clients, args=(url, each, expected, random.randrange(1 << 30), outcomes))
        process.start()
        return process

    with served(*flags) as (url, server):
        running = [started(url) for _ in range(processes)]
        began = last_s = time.monotonic()
        while time.monotonic() < began + 60 * minutes:
            time.sleep(READ_S)
            resident.append(server.memory_info().rss)
            if time.monotonic() > last_s + KILL_S:
                last_s, num_killed = time.monotonic(), num_killed + 1
                killed = running.pop(0)
                killed.kill()
                killed.join()
                running.append(started(url))
        for process in running:
            process.kill()
            process.join()
        is_free = wait_until_free(url, server)
        requests_ended = requests_of(url)
    half = len(resident) // 2
    return {
        "minutes": minutes, "clients": processes * each, "processes_killed": num_killed,
        "texts": dict(Counter(outcomes.read_text().splitlines()).most_common(8)), "requests": requests_ended,
        "rows_free_at_end": is_free, "mb_per_hour": [slope(resident[:half]), slope(resident[half:])],
        "resident_mb": [round(float(np.median(part)) / 1e6, 1) for part in np.array_split(resident, 10)],
    }  # fmt: skip


def requests_of(url: str) -> dict[str, int]:
    """Return how many requests have ended, by their reasons, and how many run and wait, from the server's metrics."""
    found = {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("vllm:request_success_total"):
            found[name.partition('finished_reason="')[2].partition('"')[0]] = int(float(value))
        elif name.startswith("vllm:num_requests_"):
            found[name.partition("{")[0].removeprefix("vllm:num_requests_")] = int(float(value))
    return found


def wait_until_free(url: str, server: psutil.Process) -> bool:
    """Return whether no request runs or waits any more, 60 seconds after the last client was killed at most."""
    for _ in range(600):
        found = requests_of(url)
        if not found["running"] + found["waiting"]:
            return server.is_running()
        time.sleep(0.1)
    return False


def main() -> None:
    """Run it, and append the record to a file."""
    parser = command_line(__doc__, "file of JSON lines to which the record is appended")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--processes", type=int, default=4, help="of clients")
    parser.add_argument("--clients", type=int, default=8, help="of each process")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        found = soak(options.minutes, options.processes, options.clients, Path(folder))
    finish([{"bench": "serving-soak", **found}], options.out)


if __name__ == "__main__":
    main()
