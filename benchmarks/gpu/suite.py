"""Check and time every kernel on a GPU: JSON lines, and a table last.

Run: python -m benchmarks.gpu.suite --out DIR [--kinds ssd conv ...] [--minutes 9] [--peer-dir DIR]
Without a GPU: TRITON_INTERPRET=1 python -m benchmarks.gpu.suite --smoke, which runs everything at tiny sizes.

A provider is compared with the reference in float64 before it is timed; a wrong one is reported and not timed, and the
command ends with 1.  So it does where a build or a case fails; the others run all the same.  Each case rotates among
input sets that exceed the cache, in one replayed CUDA graph.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.gpu import cases as gpu_cases
from benchmarks.gpu import peers as gpu_peers
from benchmarks.gpu.case import Case, copied
from benchmarks.gpu.cases import Spec
from benchmarks.gpu.run import Run, begin, command_line
from stree.bench.records import Record

__all__ = ["KINDS", "name_of", "run_case", "run_kernels"]

SIZES = [(b, n) for n in (32, 16, 64, 1, 4, 128) for b in (1, 16, 64, 4)]
KINDS = tuple(dict.fromkeys(make.__name__.removesuffix("_case") for make, _ in gpu_cases.KINDS))


def run_kernels(run: Run, options: argparse.Namespace) -> None:
    """Compare and time every case until the time is up; with ``--share`` only launch a share of them."""
    share, count = options.share or (0, 1)
    for spec in run.cases([*specs(options, run.device)][share::count], name_of):
        make, models, size = spec
        with run.part(bench=name_of(spec), adds=False):  # a case may be too large for this device
            case = make(models, size)
            if options.share:
                case.providers["triton"](case.make(torch.Generator(run.device).manual_seed(0)))
            else:
                run_case(run, case, size.dtype)


def specs(options: argparse.Namespace, device: torch.device) -> Iterator[Spec]:
    """List what is timed; of shares, which only build kernels, batches 1 and 16 serve the others."""
    kinds, sizes = (gpu_cases.SMALL, [(2, 5)]) if options.smoke else (gpu_cases.KINDS, SIZES)
    kinds = [kind for kind in kinds if kind[0].__name__.removesuffix("_case") in options.kinds]
    if options.share:
        sizes = [(batch, n) for batch, n in sizes if batch in (1, 2, 16)]
    for dtype in [torch.float32] if options.smoke else [getattr(torch, name) for name in options.dtypes]:
        yield from gpu_cases.specs(kinds, sizes, dtype, device)


def run_case(run: Run, case: Case, dtype: torch.dtype) -> None:
    """Compare each provider with float64, then time it."""
    generator = torch.Generator(run.device).manual_seed(0)
    first = case.make(generator)
    expected = case.expected(first)
    for name, provider in case.providers.items():
        with run.part(
            bench=case.op, provider=name, params=dict(case.params), dtype=str(dtype)[6:], bytes=case.num_bytes,
            flops=case.flops, stash_bytes=case.stash_bytes, snapshot_bytes=case.snapshot_bytes, correct=False,
        ) as record:  # fmt: skip
            inputs = copied(first)
            with peak_bytes(run.device, record):
                output = provider(inputs)
            record |= case.compared(output, expected, dtype)
            del inputs, output
            if record["correct"]:
                sets = case.input_sets(generator, 8 if name == "reference" else 256)  # it has many launches
                record |= case.timed(provider, sets, run.device)


@contextmanager
def peak_bytes(device: torch.device, record: Record) -> Iterator[None]:
    """Note the most memory that a call takes beside its inputs: outputs, copies, snapshots of peers."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield
    torch.cuda.synchronize(device)
    record["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before


def name_of(spec: Spec) -> str:
    """Name a case by its kind, model, batch and nodes."""
    make, _, size = spec
    return f"{make.__name__.removesuffix('_case')} {size.model}, batch {size.batch}, nodes {size.n}"


def rows(records: list[Record]) -> Iterator[list[str]]:
    """Lines of the table: what was measured, and ours against each other provider."""
    timed = [record for record in records if "p50" in record and "provider" in record]
    keys = [str((record["bench"], record["params"], record["dtype"])) for record in timed]
    ours = {key: r["p50"] for key, r in zip(keys, timed, strict=True) if r["provider"] == "triton"}
    for key, record in zip(keys, timed, strict=True):
        params = record["params"]
        yield [
            record["bench"], params["model"], str(params["batch"]), str(params.get("n", 1)), record["provider"],
            f"{record['p50']:.1f}", f"{record['gb_per_s']:.0f}" if "gb_per_s" in record else "-",
            f"{record['peak_bytes'] / 2**20:.1f}" if "peak_bytes" in record else "-",
            f"{ours[key] / record['p50']:.2f}" if key in ours else "-",
        ]  # fmt: skip


def main() -> int:
    """Run the cases, write records, print the table."""
    parser = command_line(__doc__, "gpu_suite.jsonl")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="of operations; all if not given")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--peer-dir", type=Path, help="folder with SGLang's kernel files, laid out as in its wheel")
    parser.add_argument("--share", type=int, nargs=2, help="only launch share I of N of the cases, untimed: I N")
    options, run = begin(parser, is_interpreted=True)
    gpu_peers.use_peer_dir(options.peer_dir)
    with torch.inference_mode():
        run_kernels(run, options)
    titles = ["operation", "model", "batch", "nodes", "provider", "us", "GB/s", "MiB", "ours / it"]
    measured = [record["p50"] for record in run.records if "p50" in record]
    median = statistics.median(measured) if measured else None
    return run.report(titles, rows(run.records), measured=len(measured), median_us=median)


if __name__ == "__main__":
    sys.exit(main())
