"""Facts about a GPU on which the predictions rest: events in graphs, a copy's bandwidth, products of few rows.

Run: python -m benchmarks.gpu.facts --out DIR
Without a GPU: python -m benchmarks.gpu.facts --smoke, at tiny sizes.

Steps of 16 and of 64 nodes cannot be within their bars of a one-token step where the products of their weights
(``over_one_row``) are above them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.case import CACHE_BYTES
from benchmarks.gpu.run import begin, command_line
from stree.bench.device_clock import time_graph
from stree.bench.profile import copy_bandwidth
from stree.bench.records import Record

ROWS = (1, 4, 8, 16, 32, 64)
# Columns and rows of the weights that every step reads.
PROJECTIONS = {
    "mamba2-2.7b in": (2560, 10576), "mamba2-2.7b out": (5120, 2560), "mamba2-2.7b head": (2560, 50288),
    "Nemotron-H-8B in": (4096, 18560), "Nemotron-H-8B out": (8192, 4096), "Nemotron-H-8B up": (4096, 21504),
    "Nemotron-H-8B down": (21504, 4096), "Nemotron-H-8B head": (4096, 131072), "mamba2-130m in": (768, 3352),
    "mamba2-130m out": (1536, 768),
}  # fmt: skip
MOST_SETS = 64


def main() -> int:
    """Find out every fact; one that fails is a record with its problem."""
    options, run = begin(command_line(__doc__, "gpu_facts.jsonl"))
    facts = facts_of(run.device, options.smoke)
    for name in run.cases(facts):
        with run.part(bench="fact", fact=name) as record:
            record |= facts[name]()
    rows = [[record.get("fact", record["bench"]), _text(record)] for record in run.records]
    return run.report(["fact", "measured"], rows)


def facts_of(device: torch.device, is_small: bool) -> Mapping[str, Callable[[], Record]]:
    """Functions that find out a fact, by its name."""
    found: dict[str, Callable[[], Record]] = {}
    if device.type == "cuda":
        found["timed external event in a graph"] = partial(external_event, device)
    found["copy"] = partial(copy, device)
    for dtype in (torch.bfloat16, torch.float32):
        found[f"product, {str(dtype)[6:]}"] = partial(product, device, dtype, 64 if is_small else 8192)
    for name, (columns, rows) in PROJECTIONS.items():
        shape = (columns // 64, rows // 64) if is_small else (columns, rows)
        found[name] = partial(projection, device, *shape)
    return found


def external_event(device: torch.device) -> Record:
    """Record two events inside a graph, and read the time between them after a replay, as the step clock does."""
    marks: list[torch.cuda.Event] = []

    def work() -> None:
        marks.clear()
        for _ in range(2):
            is_capturing = torch.cuda.is_current_stream_capturing()
            marks.append(torch.cuda.Event(enable_timing=True, external=is_capturing))
            marks[-1].record(torch.cuda.current_stream())
            torch.ones(1 << 24, device=device).mul_(2)

    whole = time_graph(work, device)
    return {"us_between": 1e3 * marks[0].elapsed_time(marks[1]), "us_graph": whole["p50"]}


def copy(device: torch.device) -> Record:
    """Copy a large buffer: gigabytes read and written a second."""
    return {"gb_per_s": copy_bandwidth(device) / 1e9}


def product(device: torch.device, dtype: torch.dtype, size: int) -> Record:
    """Multiply two square matrices, float32 as TF32: 10^12 operations a second."""
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        elapsed = time_graph(lambda: torch.matmul(left, right), device)["p50"]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    return {"tflops": 2 * size**3 / elapsed / 1e6}


def projection(device: torch.device, columns: int, rows: int) -> Record:
    """Multiply 1 to 64 rows with bfloat16[rows, columns] weights that are not in the cache."""
    generator = torch.Generator(device).manual_seed(0)
    count = min(MOST_SETS, max(1, CACHE_BYTES // (2 * columns * rows))) if device.type == "cuda" else 1
    weights = [_normal(generator, rows, columns) * 0.02 for _ in range(count)]
    times = {}
    for number in ROWS:
        x = _normal(generator, 1, number, columns)
        times[number] = time_graph(partial(_products, x, weights), device, count)["p50"]
    return {
        "us": times,
        "over_one_row": {number: taken / times[1] for number, taken in times.items()},
        "gb_per_s": {number: 2 * columns * rows / taken / 1e3 for number, taken in times.items()},
    }


def _products(x: Tensor, weights: list[Tensor]) -> None:
    for weight in weights:
        torch.nn.functional.linear(x, weight)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(torch.bfloat16)


def _text(record: Record) -> str:
    """Lay the measured figures of a record out on one line."""
    figures = record.get("over_one_row") or {k: v for k, v in record.items() if isinstance(v, float)}
    return record.get("problem") or ", ".join(f"{name}: {value:.3g}" for name, value in figures.items())


if __name__ == "__main__":
    sys.exit(main())
