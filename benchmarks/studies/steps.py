"""Measures what a step costs: verify of 1 to 64 nodes, a draft call, commit, and transformers' own one-token step.

    python -m benchmarks.studies.steps --threads 2 --out DIR

All cases run once a round, in an order drawn anew, so that ratios are taken within rounds and a machine's drift hits
all alike; the first rounds are not counted.  Records go to DIR/steps.jsonl, ratios and their bars to the last line.
`--profile CASE` prints the operators of one case instead.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm
from transformers import DynamicCache

import stree
from stree.bench import records
from stree.bench.pair import Pair
from stree.bench.peers import run_transformers
from stree.bench.prompts import read_suite
from stree.bench.records import Record
from stree.bench.steps import binary_tree
from stree.drafters import ModelDrafter, NoDrafter
from stree.growth import Chain, DySpec, Growth
from stree.sampling import Random
from stree.verify import Acceptance

NODES = (1, 2, 4, 8, 16, 32, 64)
PROMPT = 'def largest_prime_factor(n: int) -> int:\n    """Return the largest prime factor of n."""\n'
# Ratio -> numerator, denominator, bar.
RATIOS: Mapping[str, tuple[str, str, float | None]] = {
    "one node / transformers' forward of one token": ("verify 1", "transformers forward", None),
    "generate with budget 1 / transformers' generate": ("generate plain", "generate transformers", 1.05),
    "verify of 16 nodes / of one": ("verify 16", "verify 1", 2.0),
    "verify of 64 nodes / of one": ("verify 64", "verify 1", None),
    "draft forward of 16 nodes / of one": ("draft 16", "draft 1", None),
    "draft call of a chain / verify of one node": ("call of chain:4", "verify 1", None),
    "draft call of a 16-node DySpec tree / verify of one node": ("call of dyspec:16", "verify 1", None),
    "commit / verify of one node": ("commit", "verify 1", None),
}

Case = Callable[[], float]  # runs once, returns its seconds


def timed(clock: Callable[[], float], work: Callable[..., Any], *arguments: Any) -> Case:
    """Time a call."""

    def case() -> float:
        began = clock()
        work(*arguments)
        return clock() - began

    return case


def verify_cases(lm: stree.TreeLM, name: str, ids: Sequence[int], clock: Callable[[], float]) -> dict[str, Case]:
    """Score trees of every size on one state, which verification leaves as it is."""
    state = lm.new_state(1, len(ids), max(NODES))
    lm.prefill(state, torch.tensor([ids]))
    trees = {n: binary_tree(n, lm.vocab_size, lm.device) for n in NODES}
    return {f"{name} {n}": timed(clock, lm.verify, state, tree) for n, tree in trees.items()}


def commit_case(lm: stree.TreeLM, ids: Sequence[int], clock: Callable[[], float]) -> Case:
    """Commit a path of three nodes of a 16-node tree."""
    state = lm.new_state(1, len(ids) + 10_000, 16)
    lm.prefill(state, torch.tensor([ids]))
    tree = binary_tree(16, lm.vocab_size, lm.device)
    path, lengths = torch.tensor([[0, 1, 3]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)

    def case() -> float:
        lm.verify(state, tree)
        return timed(clock, lm.commit, state, path, lengths)()

    return case


def forward_case(model: Any, ids: Sequence[int], clock: Callable[[], float]) -> Case:
    """Run transformers' own forward of one token after the prompt, and cut what it appends off the cache again."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
    token, position = torch.tensor([[7]]), torch.tensor([[len(ids)]])

    @torch.no_grad()
    def case() -> float:
        began = clock()
        model(token, past_key_values=cache, use_cache=True, position_ids=position)
        seconds = clock() - began
        for layer in cache.layers:
            if getattr(layer, "keys", None) is not None:
                layer.keys, layer.values = layer.keys[:, :, : len(ids)], layer.values[:, :, : len(ids)]
        return seconds

    return case


def call_case(lm: stree.TreeLM, growth: Growth, budget: int, ids: Sequence[int], clock: Callable[[], float]) -> Case:
    """Propose a tree and observe that nothing was accepted; count the seconds of one of its draft calls."""
    rng = Random(0, torch.zeros(1, dtype=torch.long), torch.tensor([len(ids)]))
    pending = torch.tensor([7])
    nothing = Acceptance(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), pending)
    runner = ModelDrafter(lm).start(lm.vocab_size, [ids], rng)

    def case() -> float:
        began = clock()
        draft = runner.propose(pending, growth, budget)
        runner.observe(nothing)
        return (clock() - began) / draft.num_calls

    return case


def make_cases(pair: Pair, ids: list[int], new_tokens: int, clock: Callable[[], float]) -> dict[str, Case]:
    """List everything that is measured."""
    drafter = pair.drafter
    if drafter is None:
        raise ValueError("step costs need a drafter; give one with --drafter")
    cases = {
        **verify_cases(pair.target, "verify", ids, clock),
        **verify_cases(drafter, "draft", ids, clock),
        "transformers forward": forward_case(pair.plain, ids, clock),
        "commit": commit_case(pair.target, ids, clock),
        "call of chain:4": call_case(drafter, Chain(4), 5, ids, clock),
        "call of dyspec:16": call_case(drafter, DySpec(), 16, ids, clock),
        "call of dyspec:32": call_case(drafter, DySpec(), 32, ids, clock),
    }
    plain = partial(stree.generate, pair.target, [ids], NoDrafter(), budget=1, max_new_tokens=new_tokens)
    cases["generate plain"] = timed(clock, plain)
    cases["generate transformers"] = timed(clock, run_transformers, pair, [ids], new_tokens, 0.0, 0)
    return cases


def measure(cases: Mapping[str, Case], rounds: int, warmup: int) -> dict[str, list[float]]:
    """Run every case once a round, in an order drawn anew."""
    order, rng = list(cases), random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in tqdm(range(warmup + rounds), unit="round", mininterval=1.0):
        rng.shuffle(order)
        for name in order:
            value = cases[name]()
            if turn >= warmup:
                seconds[name].append(value)
    return seconds


def make_records(seconds: Mapping[str, Sequence[float]], params: Record, dtype: str) -> list[Record]:
    """Write cases, in microseconds, and ratios of one round, down."""
    env = records.environment()
    out: list[Record] = []
    for name, values in seconds.items():
        scaled = records.quantiles([1e6 * value for value in values])
        line = {"bench": "step", "provider": name, "params": params, "dtype": dtype, "metric": "latency", "unit": "us"}
        out.append({**line, **scaled, "env": env})
    for name, (top, bottom, bar) in RATIOS.items():
        ratios = [a / b for a, b in zip(seconds[top], seconds[bottom], strict=True)]
        line = {"bench": "step", "provider": name, "params": params, "dtype": dtype, "metric": "ratio", "unit": "1"}
        out.append({**line, **records.quantiles(ratios), "bar": bar, "env": env})
    return out


def show_profile(case: Case, repeats: int = 20) -> str:
    """Make torch.profiler's table of the operators of one case, per call."""
    for _ in range(3):
        case()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(repeats):
            case()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    count, total = (sum(getattr(e, name) for e in events) / repeats for name in ("count", "self_cpu_time_total"))
    lines = [f"{count:.0f} operators, {total:.0f} us"]
    lines += [f"{e.key:44s} {e.count / repeats:7.1f} {e.self_cpu_time_total / repeats:9.1f} us" for e in events[:30]]
    return "\n".join(lines)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Measure what a step costs.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, help="file whose first prompt is the context; a short one if left out")
    parser.add_argument("--new-tokens", type=int, default=32, help="of the two generate cases")
    parser.add_argument("--rounds", type=int, default=60, help="counted rounds")
    parser.add_argument("--warmup", type=int, default=5, help="rounds before them")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: one thread, on a busy machine")
    parser.add_argument("--target", default="bundled", help="'bundled', a folder, or a hub id")
    parser.add_argument("--drafter", default="bundled", help="'bundled', a folder, or a hub id")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--out", type=Path, default=records.ROOT / "benchmarks/results/cpu", help="folder of results")
    parser.add_argument("--profile", metavar="CASE", help="only print the operators of this case")
    args = parser.parse_args(arguments)
    if args.clock == "cpu" and args.threads != 1:
        parser.error("--clock cpu needs --threads 1: waiting threads spend processor time too")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    args = parse_arguments(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    pair = Pair.load(args.target, args.drafter)
    ids = pair.encode(read_suite("prompts", args.prompts, 1)[0].turns[:1] if args.prompts else (PROMPT,))
    cases = make_cases(pair, ids, args.new_tokens, time.thread_time if args.clock == "cpu" else time.perf_counter)
    if args.profile:
        print(show_profile(cases[args.profile]))
        return
    params = {"prompt_tokens": len(ids), "new_tokens": args.new_tokens, "clock": args.clock}
    params["threads"] = torch.get_num_threads()
    made = make_records(measure(cases, args.rounds, args.warmup), params, pair.dtype)
    records.append(args.out / "steps.jsonl", made)
    table = Table("case", "p20", "p50", "p80", "unit", "bar", title=f"{len(ids)} prompt tokens")
    for r in made:
        numbers = [f"{r[q]:.3f}" if r["unit"] == "1" else f"{r[q]:.0f}" for q in ("p20", "p50", "p80")]
        table.add_row(r["provider"], *numbers, r["unit"], f"<= {r['bar']}" if r.get("bar") else "")
    Console(width=110).print(table)
    ratios = {r["provider"]: {"p50": r["p50"], "bar": r["bar"]} for r in made if r["metric"] == "ratio"}
    print(json.dumps({"bench": "step", "params": params, "ratios": ratios, "env": made[0]["env"]}))


if __name__ == "__main__":
    main()
