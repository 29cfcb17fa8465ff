"""Mixed load on ``stree serve`` for a long time, with clients that are killed; prints one JSON line.

Run: nice python -m benchmarks.serving.soak [--minutes 30] [--processes 4] [--out benchmarks/results/serving/soak.jsonl]

Processes of clients ask for completions of texts and of tokens, chats, responses, JSON and tool calls, whole and as
streams, greedy and sampled, and leave a fifth of them before their end.  Every 20 seconds one process is killed by
SIGKILL and another takes its place.  Every finished text is compared with the one that ``stree.generate`` gives for the
same request alone, under the same grammar, and at the end none of the server's rows may be in use.  The server's
resident memory is read every second; its slope is that of a line through the second half, and each half's slope is
recorded, since memory grows at first as caches of all kinds fill.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import psutil

import stree
from benchmarks.report import study
from benchmarks.serving.load import NODES, events, generated, read_metrics, requests, served
from stree.bench.pair import Pair
from stree.bench.records import Record
from stree.tool_calls import TOOL_FORMATS, calls_lark

FORKED = multiprocessing.get_context("fork")
KILL_S, READ_S = 20.0, 1.0  # between kills of a process of clients, and between readings of memory
LEAVING = 0.2  # share of requests that a client leaves
KINDS = {"completion": "completions", "tokens": "completions", "chat": "chat/completions", "response": "responses"}
KINDS |= {"json": "chat/completions", "tools": "chat/completions"}
CITY: dict[str, Any] = {
    "type": "object", "properties": {"city": {"enum": ["Oslo", "Bergen", "Bodø"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"], "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
TOOL_FIELDS = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
JSON_FIELDS = {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}}


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        kind: one of KINDS.
        body: of it.
        text: of its answer.
    """

    kind: str
    body: dict[str, Any]
    text: str


def save_tokenizer(pair: Pair, folder: Path) -> None:
    """Save the pair's tokenizer with a template that asks for tool calls; the pair's own gets it, too."""
    pair.tokenizer.chat_template = f"{pair.tokenizer.chat_template}{{# <tool_call> #}}"
    pair.tokenizer.save_pretrained(folder)


def mixed(pair: Pair) -> list[Asked]:
    """Make requests of all kinds, each whole and as a stream, with the texts that ``stree.generate`` gives for them."""
    return [
        asked(pair, [*KINDS][number % len(KINDS)], {**body, "stream": number // len(KINDS) % 2 == 0})
        for number, body in enumerate(requests(0))
    ]


def asked(pair: Pair, kind: str, body: dict[str, Any]) -> Asked:
    """Make a request of a kind from one for a completion."""
    words, grammar = body.pop("prompt"), None
    messages, ids = [{"role": "user", "content": words}], pair.tokenizer(words)["input_ids"]
    if kind not in ("completion", "tokens"):
        ids = pair.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    if kind == "json":
        grammar = stree.Grammar.json_schema(CITY)
    if kind == "tools":
        grammar = stree.Grammar.lark(calls_lark(TOOL_FORMATS["hermes"], {"weather": CITY}, (), is_one=True))
    if grammar is not None:
        body["max_tokens"] = 120  # so that every document ends
    text = generated(pair, body, ids, grammar=grammar, tokenizer=pair.tokenizer)
    if kind == "tools":
        call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        text = call["name"] + json.dumps(call["arguments"], ensure_ascii=False)
    if kind == "response":
        body["max_output_tokens"] = body.pop("max_tokens")
    fields: dict[str, dict[str, Any]] = {
        "completion": {"prompt": words}, "tokens": {"prompt": ids}, "response": {"input": words},
        "json": {"messages": messages, **JSON_FIELDS}, "tools": {"messages": messages, **TOOL_FIELDS},
    }  # fmt: skip
    return Asked(kind, body | fields.get(kind, {"messages": messages}), text)


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


async def received(client: httpx.AsyncClient, one: Asked, most: int) -> str | None:
    """Ask for a text; return it, or None after ``most`` lines of a stream, when the client leaves."""
    path = f"/v1/{KINDS[one.kind]}"
    if not one.body["stream"]:
        response = await client.post(path, json=one.body)
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {response.text}")
        return text_of(response.json())
    pieces = list[str]()
    async with aclosing(events(client, path, one.body)) as stream:
        async for piece in stream:
            pieces.append(text_of(piece))
            if len(pieces) == most:
                return None
    return "".join(pieces)


async def one_client(client: httpx.AsyncClient, all_asked: Sequence[Asked], chooser: random.Random, out: Any) -> None:
    """Ask for one text after the other, and write a line about each."""
    while True:
        await asyncio.sleep(chooser.expovariate(2.0))
        one, leaves = chooser.choice(all_asked), chooser.random() < LEAVING
        try:
            limit = chooser.uniform(0.05, 1.0) if leaves and not one.body["stream"] else None
            async with asyncio.timeout(limit):
                text = await received(client, one, 2 if leaves else 1 << 30)
            said = "left" if text is None else "right" if text == one.text else f"different, seed {one.body['seed']}"
        except TimeoutError:
            said = "left"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(f"{one.kind}: {said}", file=out, flush=True)


def clients(url: str, count: int, all_asked: Sequence[Asked], seed: int, path: Path) -> None:
    """Run clients until this process is killed; what comes of their requests is appended to a file."""

    async def run() -> None:
        with path.open("a") as out:
            async with httpx.AsyncClient(base_url=url, timeout=600) as client:
                choosers = [random.Random(f"{seed} {number}") for number in range(count)]
                await asyncio.gather(*(one_client(client, all_asked, chooser, out) for chooser in choosers))

    asyncio.run(run())


def slope(values: Sequence[float]) -> float:
    """Return the megabytes an hour of a line through readings of bytes."""
    return float(np.polyfit(np.arange(len(values)) * READ_S / 3600, np.asarray(values) / 1e6, 1)[0])


def soak(minutes: float, processes: int, each: int, folder: Path) -> Record:
    """Count what comes of the texts, and measure how the server's memory grows."""
    pair = Pair.load(device="cpu")
    save_tokenizer(pair, folder)
    all_asked = mixed(pair)
    resident, num_killed, outcomes = list[float](), 0, folder / "outcomes.txt"
    flags = {"budget": NODES, "max-batch": 8, "max-queue": 1000, "cache-mb": 64, "tokenizer": folder}

    def started(url: str) -> Any:
        process = FORKED.Process(target=clients, args=(url, each, all_asked, random.randrange(1 << 30), outcomes))
        process.start()
        return process

    with served(*(part for name, value in flags.items() for part in (f"--{name}", f"{value}"))) as (url, server):
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
        "texts": dict(sorted(Counter(outcomes.read_text().splitlines()).items())[:40]), "requests": requests_ended,
        "rows_free_at_end": is_free, "mb_per_hour": [slope(resident[:half]), slope(resident[half:])],
        "resident_mb": [round(float(np.median(part)) / 1e6, 1) for part in np.array_split(resident, 10)],
    }  # fmt: skip


def requests_of(url: str) -> dict[str, int]:
    """Return how many requests have ended, by their reasons, and how many run and wait, from the server's metrics."""
    found = {}
    for name, value in read_metrics(httpx.get(f"{url}/metrics").text).items():
        if name.startswith("vllm:request_success_total"):
            found[name.partition('finished_reason="')[2].partition('"')[0]] = int(value)
        elif name.startswith("vllm:num_requests_"):
            found[name.partition("{")[0].removeprefix("vllm:num_requests_")] = int(value)
    return found


def wait_until_free(url: str, server: psutil.Process) -> bool:
    """Return whether no request runs or waits any more, 60 seconds after the last client was killed at most."""
    for _ in range(600):
        found = requests_of(url)
        if not found["running"] + found["waiting"]:
            return server.is_running()
        time.sleep(0.1)
    return False


def measure(minutes: float = 30.0, processes: int = 4, clients: int = 8) -> list[Record]:
    """Run it, for one record.

    Args:
        minutes: of load.
        processes: of clients.
        clients: of each process.
    """
    with TemporaryDirectory() as folder:
        return [{"bench": "serving-soak", **soak(minutes, processes, clients, Path(folder))}]


if __name__ == "__main__":
    study(measure)
