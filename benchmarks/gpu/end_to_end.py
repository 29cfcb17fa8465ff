"""Whole generations on a GPU: (a) the bundled pair for real; (b) composite, its trees at step times of large shapes.

Run: python -m benchmarks.gpu.end_to_end --suite humaneval=FILE,gsm8k=FILE,mt_bench=FILE --out DIR [--steps FILE]
Without a GPU: python -m benchmarks.gpu.end_to_end --smoke --out DIR, which runs everything at tiny sizes.

(a) is ``stree bench run`` at every batch size (batch-N in DIR holds the run, which goes on where it stopped), with all
suites pooled: tokens/s, and ratios with 95 % intervals over prompts.  The pair is so small that
launching kernels costs more than running them, which is not so at billions of parameters.
(b) takes from (a), batch 1, the steps that every prompt needed, and from `steps.py` what a step of a 2.7 and an 8
billion parameter shape takes and of a drafter a twentieth of their size; time outside the forwards is added as measured
in (a).  It is no measurement of such a pair, and every row says "composite".

The rows of (a) are written before (b) begins.  What fails is reported and left out, and the command then exits with 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import models as gpu_models
from benchmarks.gpu import steps as gpu_steps
from benchmarks.gpu.composite import StepTimes, composite_rows, overhead_s, pooled, ratios, tau
from benchmarks.gpu.run import Run, begin, command_line
from benchmarks.gpu.supervise import is_wrong
from stree.bench.device_clock import time_graph
from stree.bench.pair import Pair
from stree.bench.records import Record, read, read_lines, write
from stree.bench.summary import sum_ratio
from stree.bench.tables import ratio_text, table
from stree.cli import main as run_stree
from stree.models.tree_lm import TreeLM

METHODS = "plain,chain:2,chain:4,chain:6,calibrated:16x4,calibrated:64x6,auto"
SMOKE_METHODS = "plain,chain:2,static:2,1,auto"
TITLES = {"a": "(a) measured, all suites", "b": "(b) composite: measured tokens a step x step times of the shape"}
INTERRUPTED = 130  # status of stree after Ctrl-C
CONTEXT = 256  # tokens of context of the step times
SMOKE_TEXT = "def add(a, b):\n\nThe sea was calm."


def main() -> int:
    """Run (a), then (b), and print both tables; the last line of standard output holds all rows as JSON."""
    options, run = _options()
    pair = Pair.load(options.target, options.drafter, str(run.device), options.dtype)
    rows: list[Record] = []
    for part, measure in (("a", _measured), ("b", _composite)):
        with run.part(bench=f"part ({part})", adds=False):
            for row in measure(pair, options, run):
                rows.append({"bench": "end_to_end", "metric": "speed", "part": part, **row, "env": run.env})
        write(options.out / options.file, rows)
        print(f"\n{TITLES[part]}\n")
        print(table(["where", "method", "speed", "tau", "over plain", "over best chain"], _rows(rows, part)))
    for record in run.records:
        print(f"{record['bench']}: {record['problem']}", file=sys.stderr)
    print(json.dumps(rows))
    return int(run.failures > 0)


def _measured(pair: Pair, options: argparse.Namespace, run: Run) -> Iterator[Record]:
    """Run every batch size, and give the rows of (a)."""
    for batch in options.batch:
        with run.part(bench=f"batch {batch}", adds=False):
            arguments = [*_arguments(options, batch, run.device), "--out", str(options.out / f"batch-{batch}")]
            if status := run_stree(["bench", "run", *arguments]):
                if status == INTERRUPTED:
                    raise SystemExit(status)
                raise RuntimeError(f"stree bench run ended with {status}")
            for temperature in options.temperature:
                yield from _real(pooled(_run_of(options, batch), temperature), batch, temperature, options)


def _composite(pair: Pair, options: argparse.Namespace, run: Run) -> Iterator[Record]:
    """Time steps of large shapes, and give the rows of (b)."""
    batch = options.batch[0]
    runs = _run_of(options, batch)
    own = [_own_times(lm, batch) for lm in (pair.target, pair.drafter)]
    for target, draft, times in _shapes(options, run):
        for temperature in options.temperature:
            methods = pooled(runs, temperature)
            extra = {name: overhead_s(blocks, options.max_new_tokens, *own) for name, blocks in methods.items()}
            params = {"target": target, "drafter": draft, "batch": batch, "temperature": temperature}
            for row in composite_rows(methods, extra, *times):
                yield {"label": "composite", "params": params, **row}


def _run_of(options: argparse.Namespace, batch: int) -> list[Record]:
    """Read what was run at a batch size."""
    return read(options.out / f"batch-{batch}" / "results.jsonl")


def _options() -> tuple[argparse.Namespace, Run]:
    """Read the command line, and begin a run, whose records are of failures alone."""
    parser = command_line(__doc__, "end_to_end.jsonl", minutes=5.0)
    parser.add_argument("--suite", help="NAME=FILE,... as of stree bench run")
    parser.add_argument("--steps", type=Path, help="JSON lines of benchmarks.gpu.steps; measured here if not given")
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each suite")
    parser.add_argument("--batch", type=_numbers, default=[1], help="sizes, as 1,4")
    parser.add_argument("--temperature", type=_numbers, default=[0, 1], help="as 0,1")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--methods", default=METHODS)
    options, run = begin(parser)
    run.file = None
    if options.out is None:
        parser.error("--out is needed")
    if options.smoke:
        options.out.mkdir(parents=True, exist_ok=True)
        file = options.out / "smoke.txt"
        file.write_text(SMOKE_TEXT, encoding="utf-8")
        options.suite = options.suite or f"smoke={file}"
        options.batch, options.temperature, options.limit, options.max_new_tokens = [1, 2], [1], 2, 12
        options.methods = SMOKE_METHODS
    if not options.suite:
        parser.error("--suite is needed")
    return options, run


def _numbers(text: str) -> list[Any]:
    return [json.loads(part) for part in text.split(",")]


def _arguments(options: argparse.Namespace, batch: int, device: torch.device) -> list[str]:
    """Arguments of ``stree bench run``."""
    found = {
        "suite": options.suite, "target": options.target, "device": device, "dtype": options.dtype,
        "limit": options.limit, "batch-size": batch, "max-new-tokens": options.max_new_tokens,
        "temperature": ",".join(f"{value:g}" for value in options.temperature), "methods": options.methods,
    } | ({} if options.drafter is None else {"drafter": options.drafter})  # fmt: skip
    return [part for name, value in found.items() for part in (f"--{name}", str(value))]


def _own_times(lm: TreeLM | None, batch: int) -> StepTimes:
    """Time steps of a model of the measured pair, as `steps.py` does."""
    if lm is None:
        raise ValueError("this bench needs a draft model; give one with --drafter")
    state, nodes = gpu_steps.state_for(lm, batch, CONTEXT), sorted(gpu_steps.NODES)
    times = (time_graph(gpu_steps.step_of(lm, state, n, CONTEXT), lm.device)["p50"] for n in nodes)
    return StepTimes(tuple(nodes), tuple(1e-6 * each for each in times))


def _real(
    methods: dict[str, dict[Any, Record]], batch: int, temperature: float, options: argparse.Namespace
) -> Iterator[Record]:
    """Rows of one batch size and temperature."""
    keys = sorted(methods["plain"])
    tokens = [len(methods["plain"][key]["params"]["prompts"]) * options.max_new_tokens for key in keys]
    seconds = {
        name: [count / blocks[key]["p50"] for key, count in zip(keys, tokens, strict=True)]
        for name, blocks in methods.items()
    }
    params = {"batch": batch, "temperature": temperature, "prompts": sum(tokens) // options.max_new_tokens}
    for name, blocks in methods.items():
        speeds = {"tokens_per_s": sum_ratio(tokens, seconds[name]), "tau": tau(blocks)}
        yield {"params": params, "method": name, **speeds, **ratios(seconds, name)}


def _shapes(options: argparse.Namespace, run: Run) -> Iterator[tuple[str, str, tuple[StepTimes, StepTimes]]]:
    """Targets and drafters that have step times, with these."""
    if options.steps:
        records = [record for record in read_lines(options.steps) if record.get("bench") == "step"]
    else:
        steps = Run(run.device, options.minutes, options.out / "gpu_steps.jsonl")
        models = {*gpu_models.DRAFTERS, *gpu_models.DRAFTERS.values()}
        gpu_steps.measure(steps, options.smoke, models, [(1, CONTEXT)])
        records = [record for record in steps.records if record["bench"] == "step"]
        for record in filter(is_wrong, records):
            run.add(record | {"bench": record["params"]["model"]})
    provider, context = ("eager", 8) if options.smoke else ("graph", CONTEXT)
    times = StepTimes.by_model(records, provider, 1, context)
    pairs = [pair for pair in gpu_models.DRAFTERS.items() if times.keys() >= {*pair}]
    if not pairs:
        raise ValueError(f"no target and its drafter have step times by {provider} at batch 1, context {context}")
    for target, draft in pairs:
        yield target, draft, (times[target], times[draft])


def _rows(rows: Sequence[Record], part: str) -> Iterator[list[str]]:
    """Lines of the table of a part."""
    for row in rows:
        if row["part"] == part:
            where = " ".join(f"{name}={value}" for name, value in row["params"].items() if name != "prompts")
            speed = ratio_text(row["tokens_per_s"]) if part == "a" else f"{row['step_ms']:.3f} ms"
            over = [ratio_text(row[name]) if name in row else "" for name in ("over_plain", "over_chain")]
            yield [where, row["method"], speed, ratio_text(row["tau"]), *over]


if __name__ == "__main__":
    sys.exit(main())
