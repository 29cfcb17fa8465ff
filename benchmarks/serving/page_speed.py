"""Compare the speeds that the served page shows with those of ``stree bench run``; prints one JSON line.

Run: OMP_NUM_THREADS=1 python -m benchmarks.serving.page_speed [--prompts 8] [--rounds 5]

``stree serve bundled --budget 16`` answers what the page asks of it, and ``stree.bench.execute`` runs the same prompts
in this process, with trees of 16 nodes and plainly, at temperature 0 and one thread each.  Both count tokens over
seconds from the prompt to the last token.  Texts that end before their last token are left out, as a bench uses no stop
tokens.  The two take turns, and a ratio is that of two texts in a row, so that a shared machine slows both.  Seconds of
the processor are those of both processes, too: on a shared machine they say more than the clock, which also waits for
the server's second thread, the one of HTTP.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import httpx
import torch

from benchmarks.report import study
from benchmarks.serving.load import served
from stree.bench.execute import Case, execute
from stree.bench.methods import parse_methods
from stree.bench.pair import Pair
from stree.bench.prompts import parse_suites, read_suite

NODES, TOKENS = 16, 96
METHODS = {"trees": f"calibrated:{NODES}", "plain": "plain"}


def page_speed(url: str, body: dict[str, Any]) -> tuple[list[int], float]:
    """Return the tokens of a text, and the tokens a second with prefill that the page shows for it."""
    answer = httpx.post(f"{url}/demo/stream", json=body, timeout=120).raise_for_status()
    events = [json.loads(part.removeprefix("data: ")) for part in answer.text.split("\n\n") if part]
    tokens = [token for one in events for token in one.get("ids", ())]
    return tokens, len(tokens) / (events[-1]["prefill_s"] + events[-1]["decode_s"])


def measured(prompts: int = 8, rounds: int = 5) -> list[dict[str, Any]]:
    """Return the quartiles of the page's speed over the bench's, and both medians, of trees and of plain decoding."""
    torch.set_num_threads(1)
    pair, methods = Pair.load(device="cpu"), {name: parse_methods(text)[0] for name, text in METHODS.items()}
    suites = [read_suite(name, path) for name, path in parse_suites("bundled").items()]
    texts = [prompt.turns[0] for row in zip(*suites, strict=False) for prompt in row][:prompts]
    ratios: dict[str, list[float]] = {name: [] for name in METHODS}
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
    costs: dict[str, list[float]] = {name: [] for name in METHODS}
    with served("--budget", f"{NODES}") as (url, server):
        for number in range(rounds + 1):  # the first one warms up
            for text in texts:
                case = Case((tuple(pair.tokenizer(text)["input_ids"]),), TOKENS, 0.0)
                for name, method in methods.items():
                    body = {"prompt": text, "max_tokens": TOKENS} | ({"budget": 1} if name == "plain" else {})
                    before = sum(server.cpu_times()[:2])
                    tokens, page = page_speed(url, body)
                    spent, began = sum(server.cpu_times()[:2]) - before, time.process_time()
                    run = execute(pair, method, case)
                    if number and tokens == run.tokens[0]:
                        costs[name].append(spent / (time.process_time() - began))
                        speeds[name].append((page, TOKENS / run.seconds))
                        ratios[name].append(page * run.seconds / TOKENS)
    found = {}
    for name, each in ratios.items():
        low, median, high = statistics.quantiles(each, n=4)
        medians = [statistics.median(column) for column in zip(*speeds[name], strict=True)]
        found[name] = {
            "page_over_bench": median, "quartiles": [low, high], "tokens_per_s": medians, "texts": len(each),
            "cpu_page_over_bench": statistics.median(costs[name]),
        }  # fmt: skip
    return [{"bench": "page-speed", "nodes": NODES, **found}]


if __name__ == "__main__":
    study(measured)
