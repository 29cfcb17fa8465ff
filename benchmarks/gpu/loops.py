"""What a whole step takes at the shapes of large pairs, and how much of it is no model's forward: random weights.

Run: python -m benchmarks.gpu.loops --out DIR [--minutes 9] [--models NAME ...]
Without a GPU: python -m benchmarks.gpu.loops --smoke --out DIR, which runs everything at tiny sizes, uncaptured.

The loop is `generate`'s own: a target, a drafter a twentieth of its size (`gpu_models.DRAFTERS`), trees grown, scored,
accepted and committed, every step a replayed CUDA graph.  Random models agree on nothing, but a captured step does the
same work whatever is accepted.  Of each size: milliseconds a step, the share of it that the device is idle between
replays, what the same steps take without the models' forwards ("outside_forwards"), the parts when launched one by one
(`stree.bench.profile`), and the kernels of a replayed step by what they take, if the profiler runs there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch

from benchmarks.gpu import models as gpu_models
from benchmarks.gpu.run import Run, begin, command_line
from stree.bench.pair import Pair
from stree.bench.profile import Shape, profile
from stree.bench.records import Record
from stree.growth import Calibrated, Chain, Growth

SIZES: tuple[tuple[Growth | None, int], ...] = (
    (None, 1), (Chain(4), 5), (Calibrated(4), 16), (Calibrated(6), 32), (Calibrated(6), 64)
)  # fmt: skip
TEMPERATURES, CONTEXT, NEW_TOKENS = (0.0, 0.8), 256, 64
NUM_KERNELS = 40  # that a record names, those that take most


def main() -> int:
    """Measure pair by pair, and print the table last."""
    options, run = _options()
    measure(run, options)
    titles = ["target", "batch", "T", "growth", "nodes", "ms a step", "idle", "outside forwards"]
    return run.report(titles, rows(run.records))


def measure(run: Run, options: argparse.Namespace) -> None:
    """Add a record for every pair, batch, temperature and size until the time is up; a failure is a record."""
    shapes = gpu_models.configurations(options.smoke)
    pairs = [(target, draft) for target, draft in gpu_models.DRAFTERS.items()
             if target in shapes and target in (options.models or shapes)]  # fmt: skip
    cases = [_params(names, options, *case) for names in pairs for case in options.cases]
    pair, sizes = None, [size for _, _, size in options.cases] * len(pairs)
    for params, (growth, budget) in run.cases(zip(cases, sizes, strict=True), name=lambda case: _name(case[0])):
        shape = Shape(growth, budget, params["batch"], options.context, options.new_tokens, params["temperature"])
        with run.part(bench="loop", metric="latency", unit="ms", params=params) as record:
            if pair is None or pair.source != params["model"]:
                pair = None
                gpu_models.free(run.device)
                names = params["model"], params["drafter"]
                target, draft = (gpu_models.model_of(shapes[name], run.device) for name in names)
                pair = Pair(target, draft, None, *names)
            record |= {**profile(pair, shape), "bench": "loop", "params": params}
            record |= by_kernel(pair, shape) if run.device.type == "cuda" else {}


def _params(
    names: tuple[str, str], options: argparse.Namespace, batch: int, temperature: float,
    size: tuple[Growth | None, int],
) -> Record:  # fmt: skip
    """Parameters of a case, as its record has them."""
    growth = "plain" if size[0] is None else type(size[0]).__name__
    return {"model": names[0], "drafter": names[1], "batch": batch, "context": options.context,
            "temperature": temperature, "budget": size[1], "growth": growth}  # fmt: skip


def _name(params: Record) -> str:
    return ", ".join(f"{name} {value}" for name, value in params.items() if name not in ("drafter", "context"))


def by_kernel(pair: Pair, shape: Shape) -> Record:
    """Milliseconds a step of the kernels that take most, and of all of them; or why there are none."""
    run = shape.runner(pair)
    try:
        run(shape.new_tokens)  # captures
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            steps = run(shape.new_tokens)["steps"]
        found = {event.key: event.self_device_time_total / 1e3 / steps for event in profiler.key_averages()}
    except Exception as problem:  # where the machine shows no counters
        return {"kernels": f"{type(problem).__name__}: {problem}"[:200]}
    most = sorted(found, key=lambda name: -found[name])[:NUM_KERNELS]
    return {"kernels_ms": sum(found.values()), "kernels": {name[:120]: found[name] for name in most}}


def rows(records: list[Record]) -> Iterator[list[str]]:
    """Lines of the table of measured sizes."""
    for record in records:
        params, replayed = record["params"], record.get("replayed") or {}
        if "step_ms" in record:
            shares = (f"{replayed[name]:.1%}" if replayed else "-" for name in ("idle", "outside_forwards"))
            yield [
                params["model"], str(params["batch"]), f"{params['temperature']:g}", params["growth"],
                str(params["budget"]), f"{replayed.get('step_ms', record['step_ms']):.3f}", *shares,
            ]  # fmt: skip


def _options() -> tuple[argparse.Namespace, Run]:
    """Read the command line, and begin a run."""
    parser = command_line(__doc__, "gpu_loops.jsonl")
    parser.add_argument("--models", nargs="+", choices=gpu_models.DRAFTERS, help="targets; all if not given")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    options, run = begin(parser)
    options.context, options.new_tokens = (8, 6) if options.smoke else (CONTEXT, NEW_TOKENS)
    options.cases = [(b, t, size) for b in options.batch for t in TEMPERATURES for size in SIZES]
    if options.smoke:
        options.cases = [(2, 0.8, SIZES[0]), (1, 0.0, SIZES[2])]
    return options, run


if __name__ == "__main__":
    sys.exit(main())
