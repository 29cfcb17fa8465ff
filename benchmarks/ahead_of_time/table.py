"""Compile the Triton kernels for sm_90 without a GPU: registers, spills, shared memory.

Run: python -m benchmarks.ahead_of_time.table [--tests [TEST ...]] [--triton FOLDER ...] [--out FILE]

By default what whole decoding steps launch at the layer sizes of published models (`runs.py`), one build of each kind
and tile; with ``--tests`` every distinct launch that the tests make under the interpreter.  Exits with 1, and names
kernel and constants, if a build fails, has one of the `faults`, asks for more shared memory than an H100 has, or, in
real runs in 16 bits, spills more than 16 bytes a thread at up to 64 nodes.  The first line of a record has hashes of
the files that it was made from.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # read when a kernel is defined: kernels are compiled here, not interpreted

import triton

from benchmarks.ahead_of_time.faults import NARROW, faults
from benchmarks.ahead_of_time.launches import TARGET, Build
from benchmarks.report import command_line, digests
from stree.bench.records import ROOT, Record, write

FIGURES = ("registers", "spill_bytes", "shared_bytes")
MOST_SPILLED = 16  # bytes a thread that do not count: a store and a load or two, beside hundreds of registers
SHARED_LIMIT = 232448  # bytes that a block may ask for: H100 and H200 have 227 KiB


def sources() -> dict[str, str]:
    """Return the hash of every file that decides what kernels are built: all of kernels/ but the CPU's own."""
    return digests(path for path in (ROOT / "kernels").rglob("*.py") if not path.stem.startswith(("reference", "cpu")))


def compile_build(build: Build) -> Record:
    """Compile for sm_90: shared memory, registers and spilled bytes a thread, and `faults` if any; or the error."""
    try:
        built = triton.compile(build.source(), target=TARGET, options=build.options)
    except Exception as problem:
        return {"triton": triton.__version__, "error": f"{type(problem).__name__}: {problem}"}
    found = {"triton": triton.__version__, "shared_bytes": built.metadata.shared, **_usage(built.asm["cubin"])}
    wrong = list(faults(built.asm, build.options))
    return {**found, "faults": wrong} if wrong else found


def _usage(cubin: bytes) -> Record:
    """Read registers and spilled bytes a thread from machine code, as cuobjdump reports them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    words = (done.stdout + done.stderr).replace("\n", " ").split()
    found = {key: int(value) for key, _, value in (word.partition(":") for word in words) if value.isdigit()}
    return {"registers": found["REG"], "spill_bytes": found["STACK"] + found.get("LOCAL", 0)}


def compile_all(builds: Sequence[Build], folder: Path | None) -> list[Record]:
    """Compile builds in parallel, under the installed Triton or the one that is unpacked in a folder."""
    if folder is not None:
        if not (folder / "triton").is_dir():
            raise FileNotFoundError(f"--triton must name a folder that holds the package triton, got {folder}")
        sys.path.insert(0, str(folder))  # processes that start from here on import what is first
    try:
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            return list(pool.map(compile_build, builds, chunksize=4))
    finally:
        if folder is not None:
            sys.path.pop(0)


def tests_builds(tests: Sequence[str]) -> Iterator[tuple[str, Build]]:
    """Run tests, by default all that launch in their own process, and yield the distinct builds of their launches."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--ignore=tests/scripts"]
        command += [f"--record-launches={folder}", *tests]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)
        lines = {line for path in Path(folder).iterdir() for line in path.read_text(encoding="utf-8").splitlines()}
    for line in sorted(lines):
        yield "tests", Build(**json.loads(line))


def problem_of(found: Record, *, may_spill: bool) -> str | None:
    """Say what is wrong with a compiled build, or return None."""
    if "error" in found:
        return str(found["error"])
    wrong = [fault for fault in found.get("faults", ()) if not (may_spill and fault.startswith(NARROW))]
    if wrong:
        return "; ".join(wrong)
    if found["shared_bytes"] > SHARED_LIMIT:
        return f"asks for {found['shared_bytes']} bytes of shared memory, a block has {SHARED_LIMIT}"
    is_spilled = found["spill_bytes"] > MOST_SPILLED and not may_spill
    return f"spills {found['spill_bytes']} bytes a thread" if is_spilled else None


def summaries(records: Sequence[Record]) -> Iterator[Record]:
    """Yield one record a kernel: number of builds, and the largest figures of each version of Triton."""
    for kernel in sorted({record["kernel"] for record in records}):
        of_kernel = [record for record in records if record["kernel"] == kernel]
        versions = {
            version: {figure: max(record[version].get(figure, -1) for record in of_kernel) for figure in FIGURES}
            for version in of_kernel[0] if version[0].isdigit()
        }  # fmt: skip
        yield {"kernel": kernel, "builds": len(of_kernel), **versions}


def main() -> int:
    """Compile, print what is wrong and a summary, and write the record."""
    options = _options()
    chosen: dict[str, tuple[str, Build]] = {}
    if options.tests is None:
        from benchmarks.ahead_of_time.runs import run_builds  # not in the processes that compile

        for run, build in run_builds():
            chosen.setdefault(build.kind, (run, build))
    else:
        chosen = {str(build): (run, build) for run, build in tests_builds(options.tests)}
    builds = [build for _, build in chosen.values()]
    compiled = [compile_all(builds, folder) for folder in (None, *options.triton)]
    num_problems, records = 0, list[Record]()
    for (run, build), *versions in zip(chosen.values(), *compiled, strict=True):
        record = {"kernel": build.name, "run": run, "constants": build.constants, **build.options}
        for found in versions:
            version = found.pop("triton")
            record[version] = found
            problem = problem_of(found, may_spill=options.tests is not None or build.may_spill)
            if problem is not None:
                num_problems += 1
                print(f"{build.kernel} {build.constants} {build.options} ({run}), Triton {version}: {problem}")
        records.append(record)
    kernels = len({build.name for build in builds})
    print(f"{len(builds)} builds of {kernels} kernels under {len(compiled)} Tritons: {num_problems} problems")
    if options.out:
        write(options.out, [{"sources": sources()}, *(records if options.tests is None else summaries(records))])
    return int(num_problems > 0)


def _options() -> argparse.Namespace:
    parser = command_line(__doc__, "file of JSON lines, replaced")
    parser.add_argument("--tests", nargs="*", help="compile what these tests launch; without names all tests")
    parser.add_argument("--triton", nargs="+", type=Path, default=[], help="folders of further versions of Triton")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
