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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import cases as gpu_cases
from benchmarks.gpu import peers as gpu_peers
from benchmarks.gpu.case import Case, copied
from benchmarks.gpu.cases import Spec
from benchmarks.gpu.clock import time_graph
from benchmarks.gpu.run import Run, command_line, device_for
from benchmarks.report import failure
from stree.bench.records import Record

__all__ = ["CACHE_BYTES", "KINDS", "Suite", "name_of"]

CACHE_BYTES = 256 << 20  # four times the second-level cache of an H200
SIZES = [(b, n) for n in (32, 16, 64, 1, 4, 128) for b in (1, 16, 64, 4)]
KINDS = tuple(dict.fromkeys(make.__name__.removesuffix("_case") for make, _ in gpu_cases.KINDS))


class Suite(Run):
    """A run of the suite with its options."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        file = options.out and options.out / "gpu_suite.jsonl"
        super().__init__(device, options.minutes, file, options.progress, options.first)
        self.options = options

    def run_kernels(self) -> None:
        """Compare and time every case until the time is up; with ``--share`` only launch a share of them."""
        share, count = self.options.share or (0, 1)
        for spec in self.cases([*self.specs()][share::count], name_of):
            make, models, size = spec
            with self.part(name_of(spec)):  # a case may be too large for this device
                if self.options.share:
                    self.launch(make(models, size))
                else:
                    self.run_case(make(models, size), size.dtype)

    def specs(self) -> Iterator[Spec]:
        """List what is timed; of shares, which only build kernels, batches 1 and 16 serve the others."""
        smoke = self.options.smoke
        kinds, sizes = (gpu_cases.SMALL, [(2, 5)]) if smoke else (gpu_cases.KINDS, SIZES)
        kinds = [kind for kind in kinds if kind[0].__name__.removesuffix("_case") in self.options.kinds]
        if self.options.share:
            sizes = [(batch, n) for batch, n in sizes if batch in (1, 2, 16)]
        for dtype in [torch.float32] if smoke else [getattr(torch, name) for name in self.options.dtypes]:
            yield from gpu_cases.specs(kinds, sizes, dtype, self.device)

    def launch(self, case: Case) -> None:
        """Launch a case once, so that Triton's cache holds its builds."""
        case.providers["triton"](case.make(torch.Generator(self.device).manual_seed(0)))

    def run_case(self, case: Case, dtype: torch.dtype) -> None:
        """Compare each provider with float64, then time it."""
        generator = torch.Generator(self.device).manual_seed(0)
        first = case.make(generator)
        expected = case.expected(first)
        scale = float(expected.abs().max())
        count = 1 if self.options.smoke else max(1, min(256, CACHE_BYTES // max(case.num_bytes, 1)))
        for name, provider in case.providers.items():
            record: Record = {
                "bench": case.op, "provider": name, "params": dict(case.params), "dtype": str(dtype)[6:],
                "bytes": case.num_bytes, "flops": case.flops, "stash_bytes": case.stash_bytes,
                "snapshot_bytes": case.snapshot_bytes,
            }  # fmt: skip
            try:
                inputs = copied(first)
                with self.peak_bytes(record):
                    output = provider(inputs)
                error = float((output.double() - expected).abs().max()) / scale
                del inputs, output
                record |= {"error": error, "correct": error <= case.tolerance(dtype)}
                if record["correct"]:
                    sets = min(count, 8) if name == "reference" else count  # it has many launches
                    record |= self.time(provider, [case.make(generator) for _ in range(sets)])
                    is_cached = sets * case.num_bytes < CACHE_BYTES // 2
                    record |= {} if is_cached else {"gb_per_s": case.num_bytes / record["p50"] / 1e3}
            except Exception as problem:  # one provider's failure is a finding, not the end of the suite
                record |= {"correct": False, **failure(problem)}
            self.add(record, is_failure=not record["correct"])

    @contextmanager
    def peak_bytes(self, record: Record) -> Iterator[None]:
        """Note the most memory that a call takes beside its inputs: outputs, copies, snapshots of peers."""
        if self.device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        yield
        torch.cuda.synchronize(self.device)
        record["peak_bytes"] = torch.cuda.max_memory_allocated(self.device) - before

    def time(self, provider: Callable[[Any], Tensor], sets: list[Any]) -> Record:
        """Time one call, in microseconds: a graph of one call on each set on a GPU, plain calls elsewhere."""

        def calls() -> None:
            for inputs in sets:
                provider(inputs)

        return {"metric": "latency", "unit": "us", **time_graph(calls, self.device, len(sets))}


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
    parser = command_line(__doc__, out="folder for gpu_suite.jsonl")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="of operations; all if not given")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--peer-dir", type=Path, help="folder with SGLang's kernel files, laid out as in its wheel")
    parser.add_argument("--share", type=int, nargs=2, help="only launch share I of N of the cases, untimed: I N")
    options = parser.parse_args()
    device = device_for(parser, options, is_interpreted=True)
    gpu_peers.use_peer_dir(options.peer_dir)
    suite = Suite(options, device)
    with torch.inference_mode():
        suite.run_kernels()
    titles = ["operation", "model", "batch", "nodes", "provider", "us", "GB/s", "MiB", "ours / it"]
    measured = [record["p50"] for record in suite.records if "p50" in record]
    median = statistics.median(measured) if measured else None
    return suite.report("gpu_suite", titles, rows(suite.records), measured=len(measured), median_us=median)


if __name__ == "__main__":
    sys.exit(main())
