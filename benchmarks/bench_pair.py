"""Measures a target and its drafter on prompt suites: every way to draft beside plain decoding and transformers.

    python benchmarks/bench_pair.py --suite humaneval=FILE,gsm8k=FILE,mt_bench=FILE --limit 20 --out DIR

appends a record to DIR/results.jsonl for every suite, prompt, temperature and method, and goes on where an interrupted
run stopped.  Methods are interleaved: all of them run a prompt before the next begins, in an order that turns with
every repeat, so that a machine's drift hits all alike.  tokens/s counts the whole call, prefill included; no stop token
is used, so every run emits exactly --max-new-tokens.  Greedy outputs must be those of transformers' generate: this is
checked on the first prompts of every suite before anything is timed, which also warms up, and again on every prompt.
At a temperature the verifier is "auto": MATCH, whose text must be plain sampling's with the same seed, or rejection,
where draft laws exist.  `--markdown` prints the README's table from a results file and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_methods as methods
import bench_prompts as prompts
import bench_records as records
import bench_table as table
import torch
from bench_methods import Method, Pair, Run
from bench_records import Record
from rich.console import Console
from tqdm import tqdm

import stree

ASSETS = Path(stree.__file__).resolve().parent / "assets"
METHODS = (
    "plain,transformers,chain:2-8,static:2,2,1,static:3,2,1,static:stree,dyspec:8x3,dyspec:12x3,dyspec:16x3,dyspec:16x4,"
    "dyspec:8,dyspec:16,dyspec:32,suffix:8,suffix:16"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What must be equal for two records to stand in one table."""

    max_new_tokens: int
    repeats: int
    dtype: str
    threads: int


@dataclass(frozen=True, slots=True)
class Block:
    """One prompt at one temperature: the unit that is interleaved, written and resumed."""

    suite: str
    index: int
    temperature: float

    @property
    def params(self) -> Record:
        """Name the block in a record."""
        return {"suite": self.suite, "index": self.index, "temperature": self.temperature}


def distinct_4grams(tokens: Sequence[int]) -> float:
    """Share of a text's 4-grams that are distinct; 1 for a text too short to have any."""
    grams = list(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0


def pending_blocks(blocks: Sequence[Block], names: Sequence[str], done: Sequence[Record]) -> list[Block]:
    """List the blocks in which a method still has to run; such a block runs whole, or it would not be interleaved."""
    timed = [r for r in done if r["metric"] == "tokens_per_s"]
    found = {(Block(**{name: r["params"][name] for name in Block.__slots__}), r["provider"]) for r in timed}
    failed = table.failures(done)
    return [b for b in blocks if any((b, n) not in found and (b.suite, n) not in failed for n in names)]


def check_settings(done: Sequence[Record], settings: Settings) -> None:
    """Refuse to add to results of other settings.

    Raises:
        ValueError: they differ; the message names the first difference.
    """
    for record in done:
        for name in Settings.__slots__:
            known = record["dtype"] if name == "dtype" else record["params"].get(name)
            if known is not None and known != getattr(settings, name):
                raise ValueError(
                    f"the results have {name}={known}, this run {getattr(settings, name)}; choose another --out"
                )


def make_record(
    block: Block, method: Method, runs: Sequence[Run], losslessness: Record, settings: Settings, env: Record
) -> Record:
    """Write one method's runs of one prompt down."""
    stats = [run.stats for run in runs]
    steps = [int(s["steps"]) for s in stats]
    total = sum(steps)
    record: Record = {
        "bench": "pair",
        "provider": method.name,
        "params": {
            **block.params,
            "budget": method.budget,
            "max_new_tokens": settings.max_new_tokens,
            "repeats": settings.repeats,
            "threads": settings.threads,
        },
        "dtype": settings.dtype,
        "metric": "tokens_per_s",
        "unit": "tokens/s",
        **records.quantiles([len(run.tokens) / run.seconds for run in runs]),
        "tau": sum(s["tau"] * n for s, n in zip(stats, steps, strict=True)) / max(total, 1),
        "steps": total,
        "draft_calls": sum(s.get("draft_calls", 0) for s in stats),
        "nodes": sum(s["nodes_per_step"] * n for s, n in zip(stats, steps, strict=True)),
        "reached": _reached(stats),
        "distinct_4grams": sum(distinct_4grams(run.tokens) for run in runs) / len(runs),
        "verifier": method.verifier(block.temperature),
        **losslessness,
    }
    for part in (*table.PARTS, "prefill"):
        record[f"{part}_s"] = sum(s.get(f"{part}_s", 0.0) for s in stats)
    return {**record, "env": env}


def _reached(stats: Sequence[Record]) -> list[int]:
    """Count the steps that accepted at least 0, 1, 2, ... drafted nodes, over all runs."""
    total: list[int] = []
    for s in stats:
        counts = [float(s["steps"])]
        for share in s.get("acceptance_by_depth", ()):
            counts.append(counts[-1] * share)
        total += [0] * (len(counts) - len(total))
        total = [old + round(new) for old, new in zip(total, counts + [0.0] * (len(total) - len(counts)), strict=True)]
    return total


class Bench:
    """A pair under measurement."""

    def __init__(self, pair: Pair, chosen: list[Method], settings: Settings, out: Path) -> None:
        self.pair, self.chosen, self.settings, self.out = pair, chosen, settings, out
        self.methods = chosen
        self.env = records.environment()
        self.reference = methods.parse_methods("transformers")[0]

    def check(self, suite: str, texts: Sequence[list[int]]) -> None:
        """Compare greedy outputs before timing, write down how it went, and leave out what fails; it warms up too."""
        self.methods = list(self.chosen)
        for method in self.chosen:
            verdict: Record = {"lossless": True, "identical": True}
            for text in texts:
                wanted = self._run(self.reference, text, 0.0, 0).tokens
                verdict = methods.compare(self.pair, text, self._run(method, text, 0.0, 0).tokens, wanted)
                if not verdict["lossless"]:
                    tqdm.write(f"{method.name} fails on {suite} and is not timed: {verdict}")
                    self.methods.remove(method)
                    break
            params = {"suite": suite, "max_new_tokens": self.settings.max_new_tokens}
            record = {"bench": "pair", "provider": method.name, "params": params, "dtype": self.settings.dtype}
            records.append(self.out, [{**record, "metric": "lossless", **verdict, "env": self.env}])

    def measure(self, block: Block, text: list[int], turn: int, bar: Any) -> None:
        """Run all methods on one prompt, interleaved, and append their records."""
        runs: dict[str, list[Run]] = {method.name: [] for method in self.methods}
        for repeat in range(self.settings.repeats):
            start = (turn + repeat) % len(self.methods)
            for method in self.methods[start:] + self.methods[:start]:
                runs[method.name].append(self._run(method, text, block.temperature, repeat))
                bar.update()
        verdicts = {method.name: self._verdict(block, method, text, runs) for method in self.methods}
        records.append(
            self.out,
            [
                make_record(block, method, runs[method.name], verdicts[method.name], self.settings, self.env)
                for method in self.methods
            ],
        )

    def _run(self, method: Method, text: list[int], temperature: float, seed: int) -> Run:
        """Generate once."""
        return methods.run(self.pair, method, text, self.settings.max_new_tokens, temperature, seed)

    def _verdict(self, block: Block, method: Method, text: list[int], runs: dict[str, list[Run]]) -> Record:
        """Check what can be checked token for token: greedy and MATCH."""
        verifier = method.verifier(block.temperature)
        first = runs[method.name][0].tokens
        if verifier == "greedy":
            known = runs.get("transformers")
            wanted = known[0].tokens if known else self._run(self.reference, text, 0.0, 0).tokens
            return methods.compare(self.pair, text, first, wanted)
        if verifier == "match" and "plain" in runs:
            same = all(a.tokens == b.tokens for a, b in zip(runs[method.name], runs["plain"], strict=True))
            return {"lossless": same, "identical": same}
        return {"lossless": None}


def run_all(args: argparse.Namespace) -> None:
    """Check, warm up and measure everything that the results file does not hold yet."""
    if args.threads:
        torch.set_num_threads(args.threads)
    suites = {name: prompts.read_prompts(path, args.limit) for name, path in prompts.parse_suites(args.suite).items()}
    pair = Pair.load(args.target, args.drafter)
    dtype = str(pair.target.dtype).removeprefix("torch.")
    settings = Settings(args.max_new_tokens, args.repeats, dtype, torch.get_num_threads())
    path = args.out / "results.jsonl"
    done = records.read(path)
    check_settings(done, settings)
    bench = Bench(pair, methods.parse_methods(args.methods), settings, path)
    names = [method.name for method in bench.chosen]
    temperatures = [float(t) for t in args.temperatures.split(",")]
    blocks = [Block(s, i, t) for s, texts in suites.items() for i in range(len(texts)) for t in temperatures]
    todo = pending_blocks(blocks, names, done)
    tokens = {(b.suite, b.index): pair.tokenizer(suites[b.suite][b.index])["input_ids"] for b in todo}
    suite = None
    with tqdm(total=len(todo) * len(names) * args.repeats, unit="run", mininterval=1.0) as bar:
        for turn, block in enumerate(todo):
            if block.suite != suite:
                suite = block.suite
                bar.set_postfix_str(f"checking {suite}")
                bench.check(suite, [text for (name, _), text in tokens.items() if name == suite][: args.check])
            bar.set_postfix_str(f"{block.suite}/{block.index} T={block.temperature:g}", refresh=False)
            bench.measure(block, tokens[block.suite, block.index], turn, bar)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Measure a target and its drafter on prompt suites.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--suite", help="NAME=FILE,...: HumanEval, GSM8K, MT-Bench, Spec-Bench, JSON lines or text")
    parser.add_argument("--limit", type=int, default=20, help="prompts of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens of each run")
    parser.add_argument("--temperatures", default="0,0.8", help="0 is greedy")
    parser.add_argument("--methods", default=METHODS, help="see bench_methods.parse_methods")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each prompt and method; seeds 0, 1, ...")
    parser.add_argument("--check", type=int, default=2, help="prompts of each suite compared before timing")
    parser.add_argument("--target", default=ASSETS / "target", help="folder or hub id")
    parser.add_argument("--drafter", default=ASSETS / "drafter", help="folder or hub id")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--out", type=Path, default=records.ROOT / "benchmarks/results/cpu", help="folder of results")
    parser.add_argument("--markdown", action="store_true", help="only print the README's table of --out")
    args = parser.parse_args(arguments)
    if not args.markdown and not args.suite:
        parser.error("--suite is needed")
    return args


def report(args: argparse.Namespace) -> Iterator[str]:
    """Print the tables; give the last line, one JSON document."""
    done = records.read(args.out / "results.jsonl")
    rows = table.summarise(done)
    if args.markdown:
        yield table.markdown(rows)
        return
    console = Console(width=max(Console().width, 200))
    for one in table.rich_tables(rows):
        console.print(one)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    env = done[-1]["env"] if done else records.environment()
    yield json.dumps({"bench": "pair", "rows": rows, "bars": table.bars(rows), "peak_rss_mib": peak, "env": env})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and report."""
    args = parse_arguments(arguments)
    if not args.markdown:
        run_all(args)
    for line in report(args):
        print(line)


if __name__ == "__main__":
    main()
