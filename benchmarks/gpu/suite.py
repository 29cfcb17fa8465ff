"""Check and time every kernel on a GPU in one command of at most ten minutes: JSON lines, and a table last.

Run: python -m benchmarks.gpu.suite --out DIR [--parts tests kernels steps] [--minutes 9] [--peer-dir DIR]
Without a GPU: TRITON_INTERPRET=1 python -m benchmarks.gpu.suite --smoke, which runs everything at tiny sizes.

A provider is compared with the reference in float64 before it is timed; a wrong one is reported and not timed, and the
command ends with 1.  So it does where a build, a model or a whole part fails; the others run all the same.  Each case
rotates among input sets that exceed the cache, in one replayed CUDA graph.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from benchmarks import ROOT
from benchmarks.gpu import cases as gpu_cases
from benchmarks.gpu import peers as gpu_peers
from benchmarks.gpu import prebuild
from benchmarks.gpu import steps as gpu_steps
from benchmarks.gpu.case import Case, Inputs, copied, normal
from benchmarks.gpu.clock import time_graph
from benchmarks.gpu.run import Run, command_line, device_for
from benchmarks.report import failure
from stree.bench.records import Record

CACHE_BYTES = 256 << 20  # four times the second-level cache of an H200
SIZES = [(b, n) for n in (32, 16, 64, 1, 4, 128) for b in (1, 16, 64, 4)]


class Suite(Run):
    """A run of the suite with its options."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        super().__init__(device, options.minutes, options.out and options.out / "gpu_suite.jsonl")
        self.options = options

    def run_steps(self) -> None:
        """Time whole steps of models until the time is up."""
        for record in gpu_steps.measure(self.device, self.options.smoke, self.deadline):
            self.add(record, is_failure="problem" in record)

    def run_tests(self) -> None:
        """Run the kernels' tests on the device in a process of their own."""
        # The tests that put their tensors on the device; the others test whole models under the interpreter.
        tests = sorted((ROOT / "tests").rglob("test_*.py"))
        files = [
            str(path.relative_to(ROOT))
            for path in tests
            if re.search(r"\bDEVICE\b|operation_problem", path.read_text("utf-8"))
        ]
        limit = max(self.deadline - time.monotonic(), 1)
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *files]
        if importlib.util.find_spec("xdist"):  # most of their time is compilation
            command += ["-n", str(max(1, (os.cpu_count() or 2) - 2))]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
            code, lines = done.returncode, done.stdout.splitlines()
        except subprocess.TimeoutExpired as error:
            text = error.stdout or b""
            code, lines = -1, (text.decode() if isinstance(text, bytes) else text).splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        record = {"bench": "tests", "files": files, "exit": code, "summary": lines[-1:], "failed": failed[:40]}
        self.add(record, is_failure=code != 0)

    def run_kernels(self, bar: Progress) -> None:
        """Compare and time every case until the time is up."""
        ceilings: Record = {}
        if self.device.type == "cuda":
            with self.part("builds"):
                self.build_kernels()
            with self.part("ceilings"):
                ceilings = self.measure_ceilings()
        found = self.cases()
        task = bar.add_task("kernels", total=len(found))
        for place, (case, dtype) in enumerate(found):
            if self.is_over:
                self.add({"bench": "unfinished", "cases": len(found) - place})
                break
            self.run_case(case, dtype, ceilings)
            bar.advance(task)

    def cases(self) -> list[tuple[Case, torch.dtype]]:
        """List what is timed."""
        smoke = self.options.smoke
        kinds, sizes = (gpu_cases.SMALL, [(2, 5)]) if smoke else (gpu_cases.KINDS, SIZES)
        dtypes = [torch.float32] if smoke else [getattr(torch, name) for name in self.options.dtypes]
        return [(case, dtype) for dtype in dtypes for case in gpu_cases.cases(kinds, sizes, dtype, self.device)]

    def build_kernels(self) -> None:
        """Launch every case once in several processes, so that Triton's cache holds the builds before any is timed."""
        self.add(prebuild.build("benchmarks.gpu.suite", ["--dtypes", *self.options.dtypes], self.deadline))

    def build_share(self, share: int, count: int) -> int:
        """Launch one share of the cases, untimed, and give 1 if one fails; those of batch 1 and 16 serve the others."""
        generator = torch.Generator(self.device).manual_seed(0)
        found = [case for case, _ in self.cases() if case.params["batch"] in (1, 16)]
        failed = False
        for case in found[share::count]:
            if self.is_over:
                return int(failed)
            try:
                case.providers["triton"](case.make(generator))
            except Exception as problem:  # the other cases are built all the same
                failed = True
                print(f"{case.op}: {type(problem).__name__}: {problem}"[:500], file=sys.stderr)
        return int(failed)

    def run_case(self, case: Case, dtype: torch.dtype, ceilings: Record) -> None:
        """Compare each provider with float64, then time it."""
        generator = torch.Generator(self.device).manual_seed(0)
        with self.part(case.op, params=case.params):  # a case may be too large for this device
            first = case.make(generator)
            self._run_providers(case, dtype, ceilings, generator, first)

    def _run_providers(
        self, case: Case, dtype: torch.dtype, ceilings: Record, generator: torch.Generator, first: Inputs
    ) -> None:
        """Compare and time the providers of one case, whose first inputs are given."""
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
                    record |= shares(case, dtype, record["p50"], ceilings, sets)
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

    def measure_ceilings(self) -> Record:
        """Measure what the machine can do: gigabytes copied a second, and 10^12 operations of matrix products."""
        source = torch.ones(1 << 28, device=self.device)
        generator = torch.Generator(self.device).manual_seed(0)  # a failed capture may spoil the device's own
        target = torch.empty_like(source)
        copy = time_graph(lambda: target.copy_(source), self.device, 1)["p50"]
        ceilings = {"gb_per_s": 2 * source.nbytes / copy / 1e3}
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "tf32")):
            left, right = (normal(generator, dtype)(8192, 8192) for _ in range(2))
            torch.backends.cuda.matmul.allow_tf32 = True
            try:
                elapsed = time_graph(partial(torch.matmul, left, right), self.device, 1)["p50"]
            finally:
                torch.backends.cuda.matmul.allow_tf32 = False
            ceilings[f"{name}_tflops"] = 2 * 8192**3 / elapsed / 1e6
        self.add({"bench": "ceilings", **ceilings})
        return ceilings


def shares(case: Case, dtype: torch.dtype, micros: float, ceilings: Record, sets: int) -> Record:
    """Set bytes and operations a second beside what was measured; bytes only where the sets exceed the cache."""
    found: Record = {}
    if ceilings and sets * case.num_bytes >= CACHE_BYTES // 2:
        found["bandwidth_share"] = case.num_bytes / micros / ceilings["gb_per_s"] / 1e3
    if ceilings and case.flops:
        rate = ceilings["tf32_tflops" if dtype == torch.float32 else "bf16_tflops"]
        found["rate_share"] = case.flops / micros / rate / 1e6
    return found


def rows(records: list[Record]) -> Iterator[list[str]]:
    """Lines of the table: what was measured, and ours against each other provider."""
    timed = [record for record in records if "p50" in record and "provider" in record]
    keys = [str((record["bench"], record["params"], record["dtype"])) for record in timed]
    ours = {key: r["p50"] for key, r in zip(keys, timed, strict=True) if r["provider"] == "triton"}
    for key, record in zip(keys, timed, strict=True):
        params = record["params"]
        yield [
            record["bench"], params["model"], str(params["batch"]), str(params.get("n", 1)), record["provider"],
            f"{record['p50']:.1f}", f"{record['bandwidth_share']:.2f}" if "bandwidth_share" in record else "-",
            f"{record['peak_bytes'] / 2**20:.1f}" if "peak_bytes" in record else "-",
            f"{ours[key] / record['p50']:.2f}" if key in ours else "-",
        ]  # fmt: skip


def main() -> int:
    """Run the parts, write records, print the table."""
    parser = command_line(__doc__, out="folder for gpu_suite.jsonl")
    parts = ["steps", "kernels", "tests"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--peer-dir", type=Path, help="folder with SGLang's kernel files, laid out as in its wheel")
    parser.add_argument("--build-share", type=int, nargs=2, help="only launch share I of N of the cases: I N")
    options = parser.parse_args()
    device = device_for(parser, options, is_interpreted=True)
    gpu_peers.use_peer_dir(options.peer_dir)
    suite = Suite(options, device)
    if options.build_share:
        with torch.inference_mode():
            return suite.build_share(*options.build_share)
    whole, began = suite.deadline, time.monotonic()
    with torch.inference_mode(), Progress(console=Console(stderr=True)) as bar:
        # Each part has its share of the time, and what it leaves goes to the next.
        if "steps" in options.parts:
            suite.deadline = began + 0.25 * (whole - began)
            with suite.part("steps"):
                suite.run_steps()
        if "kernels" in options.parts:
            suite.deadline = began + (0.7 if "tests" in options.parts else 1.0) * (whole - began)
            with suite.part("kernels"):
                suite.run_kernels(bar)
        suite.deadline = whole
        if "tests" in options.parts and not options.smoke:
            with suite.part("tests"):
                suite.run_tests()
    titles = ["operation", "model", "batch", "nodes", "provider", "us", "of bandwidth", "MiB", "ours / it"]
    measured = [record["p50"] for record in suite.records if "p50" in record]
    median = statistics.median(measured) if measured else None
    return suite.report("gpu_suite", titles, rows(suite.records), measured=len(measured), median_us=median)


if __name__ == "__main__":
    sys.exit(main())
