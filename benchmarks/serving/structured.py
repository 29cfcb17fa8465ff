"""Completions, chats, JSON and tool calls in one batch of ``stree serve`` with the bundled pair; prints one JSON line.

Run: python -m benchmarks.serving.structured [--minutes 5] [--clients 64] [--out FILE]

Clients come at random, stream texts of random kinds and leave a fifth of them.  Every finished text is compared with
the one that ``stree.generate`` gives for the same request alone, under the same grammar.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

import stree
from benchmarks.report import command_line, finish
from benchmarks.serving.load import NODES, WORDS, served
from benchmarks.serving.soak import received
from stree.bench.pair import Pair
from stree.bench.records import Record
from stree.sampling import Sampling
from stree.tool_calls import TOOL_FORMATS, calls_lark

NUM_REQUESTS = 40  # different ones, in turn of each kind
KINDS = ("completion", "tokens", "chat", "json", "tools")
CITY: dict[str, Any] = {
    "type": "object", "properties": {"city": {"enum": ["Oslo", "Bergen", "Bodø"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"], "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


@dataclass(frozen=True)
class Asked:
    """A streamed request.

    Attributes:
        kind: one of KINDS.
        path: that it is posted to.
        body: of it.
        text: that its pieces must make.
    """

    kind: str
    path: str
    body: dict[str, Any]
    text: str


def save_tokenizer(pair: Pair, folder: Path) -> None:
    """Save the pair's tokenizer with a template that asks for tool calls; the pair's own gets it, too."""
    pair.tokenizer.chat_template = f"{pair.tokenizer.chat_template}{{# <tool_call> #}}"
    pair.tokenizer.save_pretrained(folder)


def asked_of(pair: Pair, kind: str, number: int, chooser: random.Random) -> Asked:
    """Make a request of a kind, with the text that ``stree.generate`` gives for it."""
    words = " ".join(chooser.choices(WORDS.split(), k=chooser.randint(2, 60)))
    body: dict[str, Any] = {
        "model": "bundled", "seed": number, "max_tokens": chooser.randint(4, 96), "stream": True,
        "temperature": chooser.choice([0, 0, 0.7, 1.0]),
    }  # fmt: skip
    if body["temperature"] and chooser.random() < 0.3:
        body |= {"top_p": 0.9} if chooser.random() < 0.5 else {"top_k": 20}
    ids, grammar = pair.tokenizer(words)["input_ids"], None
    if kind in ("completion", "tokens"):
        asked = {"prompt": words if kind == "completion" else ids}
    else:
        asked = {"messages": [{"role": "user", "content": words}]}
        turns = pair.tokenizer.apply_chat_template(asked["messages"], add_generation_prompt=True, return_dict=True)
        ids = turns["input_ids"]
    if kind == "json":
        asked["response_format"] = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
        grammar = stree.Grammar.json_schema(CITY)
    if kind == "tools":
        asked |= {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
        grammar = stree.Grammar.lark(calls_lark(TOOL_FORMATS["hermes"], {"weather": CITY}, (), is_one=True))
    if grammar is not None:
        body["max_tokens"] = 120  # so that every document ends
    out = stree.generate(
        pair.target, [ids], pair.drafter, budget=NODES, seed=number, max_new_tokens=body["max_tokens"],
        sampling=Sampling(body["temperature"], body.get("top_k"), body.get("top_p")), grammar=grammar,
        tokenizer=pair.tokenizer,
    )  # fmt: skip
    text = "".join(shown(pair, kind, ids, out.sequences[0]))
    return Asked(kind, "/v1/completions" if "prompt" in asked else "/v1/chat/completions", body | asked, text)


def shown(pair: Pair, kind: str, ids: list[int], tokens: list[int]) -> Iterator[str]:
    """Yield the parts of a text as a client gets them."""
    text = pair.tokenizer.decode(tokens, skip_special_tokens=True)[len(pair.tokenizer.decode(ids)) :]
    if kind != "tools":
        yield text
        return
    call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    yield call["name"]
    yield json.dumps(call["arguments"], ensure_ascii=False)


async def one_client(client: httpx.AsyncClient, all_asked: list[Asked], end: float, seen: Counter[str]) -> None:
    """Ask for one text after the other until the end, and count what comes of them."""
    while time.monotonic() < end:
        await asyncio.sleep(random.expovariate(2.0))
        asked, most = random.choice(all_asked), random.choice([2, *[1 << 30] * 4])
        try:
            text = await received(client, asked.path, asked.body, most)
            said = "left" if text is None else "right" if text == asked.text else f"different, {asked.body['seed']}"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        seen[f"{asked.kind}: {said}"] += 1


def measured(minutes: float, num_clients: int, folder: Path) -> Record:
    """Count what comes of the texts that many clients ask for."""
    pair, chooser, seen = Pair.load(device="cpu"), random.Random(0), Counter[str]()
    save_tokenizer(pair, folder)
    all_asked = [asked_of(pair, KINDS[number % len(KINDS)], number, chooser) for number in range(NUM_REQUESTS)]

    async def run(url: str) -> None:
        end = time.monotonic() + 60 * minutes
        limits = httpx.Limits(max_connections=num_clients)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
            await asyncio.gather(*(one_client(client, all_asked, end, seen) for _ in range(num_clients)))

    flags = {"budget": NODES, "max-batch": 8, "max-queue": 1000, "cache-mb": 64, "tokenizer": folder}
    with served(*(part for name, value in flags.items() for part in (f"--{name}", f"{value}"))) as (url, _):
        asyncio.run(run(url))
    return {"minutes": minutes, "clients": num_clients, "texts": dict(sorted(seen.items()))}


def main() -> None:
    """Run the clients and print; append the record to a file."""
    parser = command_line(__doc__, "file of JSON lines to which the record is appended")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=64)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        found = measured(options.minutes, options.clients, Path(folder))
    finish([{"bench": "serving-structured", **found}], options.out)


if __name__ == "__main__":
    main()
