"""Whole generations on a GPU: (a) the bundled pair for real; (b) composite, its trees at step times of large shapes.

Run: python -m benchmarks.gpu.end_to_end --suite humaneval=FILE,gsm8k=FILE,mt_bench=FILE --out DIR [--steps FILE]
Without a GPU: python -m benchmarks.gpu.end_to_end --smoke --out DIR, which runs everything at tiny sizes.

(a) is ``stree bench run`` at every batch size (batch-N in DIR holds the run, which goes on where it stopped), with all
suites pooled: tokens/s, and ratios with 95 % intervals of a paired bootstrap over prompts.  Each figure has the ratio
of a step to the time of its bytes at the bandwidth of a copy; above 3 it is called launch-bound: the pair is so small
that launching kernels costs more than running them, which is not so at billions of parameters.
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
from benchmarks.gpu.composite import StepTimes, composite_rows, overhead_s, pooled
from benchmarks.gpu.run import Run, command_line, device_for
from benchmarks.report import interval_text, table
from stree.bench.pair import Pair
from stree.bench.profile import bytes_moved, copy_bandwidth
from stree.bench.records import Record, read, read_lines, write
from stree.bench.summary import mean_tau, sum_ratio
from stree.cli import main as run_stree
from stree.models.tree_lm import TreeLM

METHODS = "plain,chain:2,chain:4,chain:6,calibrated:16x4,calibrated:64x6,auto"
SMOKE_METHODS = "plain,chain:2,static:2,1,auto"
TITLES = {"a": "(a) measured, all suites", "b": "(b) composite: measured tokens a step x step times of the shape"}
LAUNCH_BOUND = 3.0
INTERRUPTED = 130  # status of stree after Ctrl-C
CONTEXT = 256  # tokens of context of the step times
SMOKE_TEXT = "def add(a, b):\n\nThe sea was calm."


def main() -> int:
    """Run (a), then (b), and print both tables; the last line of standard output holds all rows as JSON."""
    options, device = _options()
    run = Run(device, options.minutes, None)
    pair = Pair.load(options.target, options.drafter, str(device), options.dtype)
    rows: list[Record] = []
    for part, measure in (("a", _measured), ("b", _composite)):
        with run.part(f"part ({part})"):
            for row in measure(pair, options, run):
                rows.append({"bench": "end_to_end", "metric": "speed", "part": part, **row, "env": run.env})
        write(options.out / "end_to_end.jsonl", rows)
        print(f"\n{TITLES[part]}\n")
        print(table(["where", "method", "speed", "tau", "over plain", "over best chain", "label"], _rows(rows, part)))
    for record in run.records:
        print(f"{record['bench']}: {record['problem']}", file=sys.stderr)
    print(json.dumps(rows))
    return int(run.failures > 0)


def _measured(pair: Pair, options: argparse.Namespace, run: Run) -> Iterator[Record]:
    """Run every batch size, and give the rows of (a)."""
    bandwidth = copy_bandwidth(run.device)
    for batch in options.batch:
        with run.part(f"batch {batch}"):
            arguments = [*_arguments(options, batch, run.device), "--out", str(options.out / f"batch-{batch}")]
            if status := run_stree(["bench", "run", *arguments]):
                if status == INTERRUPTED:
                    raise SystemExit(status)
                raise RuntimeError(f"stree bench run ended with {status}")
            for temperature in options.temperature:
                methods = pooled(_run_of(options, batch), temperature)
                yield from _real(pair, methods, batch, temperature, options, bandwidth)


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


def _options() -> tuple[argparse.Namespace, torch.device]:
    """Read the command line; the device to measure on."""
    parser = command_line(__doc__, out="folder for end_to_end.jsonl and the runs", minutes=5.0)
    parser.add_argument("--suite", help="NAME=FILE,... as of stree bench run")
    parser.add_argument("--steps", type=Path, help="JSON lines of benchmarks.gpu.suite; measured here if not given")
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each suite")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--temperature", default="0,1")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--methods", default=METHODS)
    options = parser.parse_args()
    device = device_for(parser, options)
    if options.out is None:
        parser.error("--out is needed")
    if options.smoke:
        options.out.mkdir(parents=True, exist_ok=True)
        file = options.out / "smoke.txt"
        file.write_text(SMOKE_TEXT, encoding="utf-8")
        options.suite = options.suite or f"smoke={file}"
        options.batch, options.temperature, options.limit, options.max_new_tokens = "1,2", "1", 2, 12
        options.methods = SMOKE_METHODS
    if not options.suite:
        parser.error("--suite is needed")
    try:
        options.batch = [int(size) for size in options.batch.split(",")]
        options.temperature = [float(value) for value in options.temperature.split(",")]
    except ValueError as error:
        parser.error(f"--batch and --temperature must be numbers, as 1,4 and 0,1: {error}")
    return options, device


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
    state = gpu_steps.state_for(lm, batch, CONTEXT)
    found = {}
    for n in sorted(gpu_steps.NODES):
        record = gpu_steps.timed(gpu_steps.step_of(lm, state, n, CONTEXT), lm.device)
        if "p50" not in record:
            raise RuntimeError(f"a step of {n} nodes cannot be timed: {record['problem']}")
        found[n] = 1e-6 * record["p50"]
    return StepTimes(tuple(found), tuple(found.values()))


def _real(
    pair: Pair, methods: dict[str, dict[Any, Record]], batch: int, temperature: float, options: argparse.Namespace,
    bandwidth: float,
) -> Iterator[Record]:  # fmt: skip
    """Rows of one batch size and temperature."""
    keys = sorted(methods["plain"])
    seconds = {name: [_seconds(blocks[key], options) for key in keys] for name, blocks in methods.items()}
    tokens = [len(methods["plain"][key]["params"]["prompts"]) * options.max_new_tokens for key in keys]
    chains = [name for name in methods if name.startswith("chain")]
    best_chain = min(chains, key=lambda name: sum(seconds[name]), default=None)
    for name, blocks in methods.items():
        row: Record = {
            "params": {"batch": batch, "temperature": temperature, "prompts": sum(tokens) // options.max_new_tokens},
            "method": name,
            "tokens_per_s": sum_ratio(tokens, seconds[name]),
            "tau": mean_tau(blocks.values()),
            "over_plain": sum_ratio(seconds["plain"], seconds[name]),
            **_bound(pair, [blocks[key] for key in keys], seconds[name], batch, options, bandwidth),
        }
        if best_chain is not None and name not in ("plain", "transformers") and name not in chains:
            row |= {"chain": best_chain, "over_chain": sum_ratio(seconds[best_chain], seconds[name])}
        yield row


def _seconds(block: Record, options: argparse.Namespace) -> float:
    """Turn tokens a second of a block back into seconds."""
    return float(len(block["params"]["prompts"]) * options.max_new_tokens / block["p50"])


def _bound(
    pair: Pair, blocks: Sequence[Record], seconds: Sequence[float], batch: int, options: argparse.Namespace,
    bandwidth: float,
) -> Record:  # fmt: skip
    """Set the time after prefill beside what the bytes of its steps and draft calls take."""
    steps, calls = (sum(block[name] for block in blocks) for name in ("steps", "draft_calls"))
    nodes = sum(block["verified"] for block in blocks) / max(steps, 1)
    length = CONTEXT + options.max_new_tokens / 2
    moved = steps * sum(bytes_moved(pair.target, batch=batch, length=length, nodes=nodes).values())
    if pair.drafter is not None and calls:
        width = max(1.0, (nodes - 1) * steps / calls)
        moved += calls * sum(bytes_moved(pair.drafter, batch=batch, length=length, nodes=width).values())
    took = sum(seconds) - sum(block["prefill_s"] for block in blocks)
    times = took * bandwidth / moved
    return {"over_bytes": times, "label": "launch-bound" if times > LAUNCH_BOUND else "near its bytes"}


def _shapes(options: argparse.Namespace, run: Run) -> Iterator[tuple[str, str, tuple[StepTimes, StepTimes]]]:
    """Targets and drafters that have step times, with these."""
    records: list[Record] = []
    if options.steps:
        records = [record for record in read_lines(options.steps) if record.get("bench") == "step"]
    else:
        steps = Run(run.device, options.minutes, options.out / "gpu_steps.jsonl")
        with run.part("steps of large shapes"):
            models = {*gpu_models.DRAFTERS, *gpu_models.DRAFTERS.values()}
            for record in gpu_steps.measure(steps, options.smoke, models, [(1, CONTEXT)]):
                records.append(record)
                steps.add(record)
                if "problem" in record:
                    run.add(record | {"bench": record["params"].get("model")}, is_failure=True)
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
            speed = interval_text(*row["tokens_per_s"], digits=2) if part == "a" else f"{row['step_ms']:.3f} ms"
            label = f"{row['label']}: {row['over_bytes']:.1f} x" if part == "a" else row["label"]
            over = [interval_text(*row[name], digits=2) if name in row else "" for name in ("over_plain", "over_chain")]
            yield [where, row["method"], speed, f"{row['tau']:.2f}", *over, label]


if __name__ == "__main__":
    sys.exit(main())
