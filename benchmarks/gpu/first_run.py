"""A first run on a machine with a GPU and without network: correctness, then figures, in commands of some minutes each.

Run: python -m benchmarks.gpu.texts --write texts.json      (anywhere, before)
     python -m benchmarks.gpu.first_run --out runs/first --expected texts.json [--wheels DIR] [--cache FILE]
Without a GPU: the same with --smoke, at tiny sizes on the CPU.

The same command again goes on where the last one ended, so that each can end within ``--minutes``.  Every part has its
minutes of the whole run; ``--parts`` runs some of them for as long as the command lasts.  Cases run in processes of
their own, and a case that crashes, hangs or gives wrong numbers costs only itself (`benchmarks.gpu.supervise`).
Records are JSON lines in ``--out``, appended at once; `benchmarks.gpu.bars` reads them.  At the end ``--archive`` holds
first_run.tar.gz with all records, and triton_cache.tar.gz, which ``--cache`` unpacks on the next machine.

| part | minutes | what |
| --- | ---: | --- |
| 1 | 6 | facts of the machine; tests of the kernels, side by side |
| 2 | 4 | texts of captured loops beside those of the CPU; tests of the loop |
| 3 | 8 | whole steps, a process a model: batch 1 and context 256 first, 1, 16 and 64 nodes first |
| 4 | 5 | whole loops of target and drafter |
| 5 | 5 | kernels compared with float64 and timed, a process a kind |

Starts with the standard library alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from benchmarks import ROOT
from benchmarks.gpu.supervise import WORKERS, Supervisor, Task, is_wrong, shares
from stree.bench.records import Record, append, read_lines

PACKAGES = (
    "torch", "triton", "transformers", "numpy", "scipy", "numba", "psutil", "rich", "pytest", "hypothesis", "mamba-ssm",
    "causal-conv1d",
)  # fmt: skip
TARGETS, DRAFTERS = ("mamba2-2.7b", "Nemotron-H-8B", "Bamba-9B"), ("mamba2-130m", "mamba2-400m")
TINY = ("tiny-mamba2", "tiny-drafter", "tiny-bamba")
KINDS = (
    "ssd", "conv", "attention", "accept", "experts", "delta", "selective", "diagonal", "gated_norm", "norm_add", "norm",
    "rotary", "activation", "delta_inputs", "commit",
)  # fmt: skip
LOOP = "tests/decode/test_gpu_loop.py"
FAILING_CAPTURE = f"{LOOP}::test_what_cannot_be_captured_leaves_the_device_usable"
FEW_KERNEL_TESTS = ("tests/operations/test_topology.py",)
MOST_BYTES = 16 << 20  # of an archive that some machines send back


@dataclass(frozen=True)
class Part:
    """Stages of tasks, one stage after the other; those of a stage run ``width`` side by side."""

    number: int
    minutes: float
    stages: tuple[tuple[int, Sequence[Task]], ...]


def parts_of(options: argparse.Namespace) -> list[Part]:
    """List all parts."""
    out, is_small = str(options.out), options.smoke
    width = 2 if is_small else min(WORKERS, 12)  # processes that share the device
    records = ["--out", out, *(["--smoke"] if is_small else [])]
    tests = Task("kernel tests", _pytest(out, *kernel_tests(is_small)), 180.0)
    texts = Task("texts", _module("texts", "--expected", str(options.expected), *records), 120.0)
    loop_tests = [] if is_small or importlib.util.find_spec("numba") is None else [
        Task("loop tests", _pytest(out, LOOP, "--deselect", FAILING_CAPTURE), 240.0),
        Task("a capture that fails", _pytest(out, FAILING_CAPTURE), 240.0),
    ]  # fmt: skip
    models = TINY if is_small else (*TARGETS, *DRAFTERS)
    builds = [
        Task(
            f"build steps, {model}", _module("steps", "--build", "--models", model, "--sizes", "1x256", *records), 90.0
        )
        for model in models
    ]
    sizes = [("1x256", models)] if is_small else [("1x256", models), ("1x4096", TARGETS), ("8x256", models)]
    steps = [
        Task(f"steps {size}, {model}", _module("steps", "--models", model, "--sizes", size, *records), 90.0)
        for size, names in sizes
        for model in names
    ]
    pairs = TINY[:1] if is_small else TARGETS[:2]
    loops = [
        Task(f"loops, {model}, batch {batch}", _module("loops", "--models", model, "--batch", batch, *records), 120.0)
        for batch in ("1", "8")
        for model in pairs
    ]
    peers = ["--peer-dir", str(options.peer_dir)] if options.peer_dir else []
    suite = Task("build kernels", _module("suite", "--kinds", *KINDS[:5], *records), 60.0)
    kernels = [Task(f"kernels, {kind}", _module("suite", "--kinds", kind, *peers, *records), 60.0) for kind in KINDS]
    return [
        Part(1, 6, ((1, [Task("facts", _module("facts", *records), 60.0)]), (width, shares(tests, width)))),
        Part(2, 4, ((1, [texts]), (2, loop_tests))),
        Part(3, 8, ((3, builds), (1, steps))),
        Part(4, 5, ((1, loops),)),
        Part(5, 5, ((width, [] if is_small else shares(suite, width)), (1, kernels))),
    ]


def kernel_tests(is_small: bool) -> Sequence[str]:
    """List the files of tests/operations that put their tensors on the device."""
    if is_small:
        return FEW_KERNEL_TESTS
    files = sorted((ROOT / "tests" / "operations").glob("test_*.py"))
    wanted = re.compile(r"\bDEVICE\b|operation_problem|growth_problems|traversal_problems")
    return [str(path.relative_to(ROOT)) for path in files if wanted.search(path.read_text("utf-8"))]


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return sys.executable, "-m", f"benchmarks.gpu.{name}", *arguments


def _pytest(out: str, *arguments: str) -> tuple[str, ...]:
    """A command that runs tests as cases."""
    options = ("-q", "-p", "no:cacheprovider", "-p", "benchmarks.gpu.pytest_cases", "-m", "not slow")
    more = ("--continue-on-collection-errors", "--records", str(Path(out, "gpu_tests.jsonl")))
    return sys.executable, "-m", "pytest", *options, *more, *arguments


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    """Install the wheels, unpack the cache of builds, and return the environment of all commands.

    Raises:
        RuntimeError: pip could not install the wheels.
    """
    site = options.out.resolve() / "site"
    if options.wheels is not None and not site.exists():
        wheels = sorted(map(str, options.wheels.glob("*.whl")))
        quiet = ["-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "install", *quiet, "--find-links", str(options.wheels)]
        done = subprocess.run([*command, "--target", str(site), *wheels], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"pip could not install {len(wheels)} wheels of {options.wheels}: {done.stderr[-500:]}")
    cache = options.out.resolve() / "triton_cache"
    if options.cache is not None and not cache.exists():
        unpack_builds(options.cache, cache)
    cache.mkdir(exist_ok=True)
    paths = [str(site), *os.environ.get("PYTHONPATH", str(ROOT)).split(os.pathsep)]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1",
             "HF_HUB_OFFLINE": "1", "TRITON_CACHE_DIR": str(cache), "TRITON_STORE_BINARY_ONLY": "1"}  # fmt: skip
    if options.smoke:
        found |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return found


def unpack_builds(file: Path, folder: Path) -> None:
    """Unpack Triton's cache, and change the absolute paths in its index files to this folder's."""
    with tarfile.open(file) as archive:
        archive.extractall(folder, filter="data")
    for index in folder.rglob("__grp__*.json"):
        names = json.loads(index.read_text(encoding="utf-8"))["child_paths"]
        group = {"child_paths": {name: str(index.parent.resolve() / name) for name in names}}
        index.write_text(json.dumps(group), encoding="utf-8")


def machine() -> Record:
    """Describe the machine without importing anything that may be missing or broken."""
    links = {name: (ROOT / "stree" / name).is_dir() for name in ("kernels", "models")}
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm"
    program = shutil.which("nvidia-smi")
    gpu = subprocess.run([program, query, "--format=csv,noheader"], capture_output=True, text=True) if program else None
    return {
        "bench": "machine", "python": platform.python_version(), "cores": os.cpu_count(), "packages": versions,
        "gpu": gpu.stdout.strip() if gpu else None, "links": links,
        "disk_gb": shutil.disk_usage(ROOT).free >> 30, "compute_sanitizer": shutil.which("compute-sanitizer"),
    }  # fmt: skip


def run_parts(options: argparse.Namespace, environment: dict[str, str]) -> None:
    """Run the parts that are asked for, each for the minutes that it has left."""
    file, deadline = options.out / "first_run.jsonl", time.monotonic() + 60 * options.minutes
    append(file, [machine()])
    for part in parts_of(options):
        if options.parts and part.number not in options.parts:
            continue
        spent = sum(r["seconds"] for r in read_lines(file) if r["bench"] == "part" and r["part"] == part.number)
        began = time.monotonic()
        left = deadline if options.parts else min(deadline, began + 60 * part.minutes - spent)
        supervisor = Supervisor(file, left, environment)
        for width, tasks in part.stages:
            supervisor.run(tasks, width)
        append(file, [{"bench": "part", "part": part.number, "seconds": time.monotonic() - began}])


def pack(options: argparse.Namespace) -> None:
    """Pack the records, and the builds in Triton's cache."""
    folder = options.archive or options.out
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "first_run.tar.gz", "w:gz") as archive:
        for file in sorted(options.out.glob("*.jsonl")):
            archive.add(file, file.name)
    with tarfile.open(folder / "triton_cache.tar.gz", "w:gz") as archive:
        archive.add(options.out / "triton_cache", ".")
    for name in ("first_run.tar.gz", "triton_cache.tar.gz"):
        size = (folder / name).stat().st_size
        note = f", more than {MOST_BYTES >> 20} MiB" if size > MOST_BYTES else ""
        print(f"{folder / name}: {size / 2**20:.1f} MiB{note}")


def summary(options: argparse.Namespace) -> int:
    """Print what is done, and every fault; return 1 if anything failed or is unfinished."""
    records = [record for file in sorted(options.out.glob("*.jsonl")) for record in read_lines(file)]
    status = {record["task"]: record["status"] for record in records if record["bench"] == "task"}
    parts = [part for part in parts_of(options) if part.number in (options.parts or range(1, 6))]
    tasks = [task.name for part in parts for _, stage in part.stages for task in stage]
    faults = [record for record in records if record["bench"] == "fault"]
    wrong = [record for record in records if is_wrong(record)]
    for record in faults:
        print(f"fault: {record['task']}, {record['case']}: {record['fault']}")
    for record in wrong:
        names = [record.get(name) for name in ("bench", "provider", "params", "test", "text", "fact")]
        text = str(record.get("problem", f"wrong, error {record.get('error')}")).strip()
        print(f"failed: {', '.join(str(name) for name in names if name)}: {text.splitlines()[-1][:200]}")
    unfinished = [f"{name}: {status.get(name, 'not begun')}" for name in tasks if status.get(name) != "done"]
    print(f"{len(records)} records; {len(tasks) - len(unfinished)} of {len(tasks)} tasks done")
    print(f"not done: {'; '.join(unfinished) or 'none'}")
    print(f"{len(faults)} cases crashed or hung, {len(wrong)} failed or wrong")
    return int(bool(faults or wrong or unfinished))


def main() -> int:
    """Prepare, run parts, pack, and print a summary last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for records; a later command goes on there")
    parser.add_argument("--expected", type=Path, help="what benchmarks.gpu.texts --write has written; part 2 needs it")
    parser.add_argument("--parts", type=int, nargs="+", choices=range(1, 6), help="all if not given")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this command")
    parser.add_argument("--wheels", type=Path, help="folder with wheels to install into OUT/site")
    parser.add_argument("--cache", type=Path, help="triton_cache.tar.gz of an earlier run")
    parser.add_argument("--archive", type=Path, help="folder for the archives; OUT if not given")
    parser.add_argument("--peer-dir", type=Path, help="folder with SGLang's kernel files")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU")
    options = parser.parse_args()
    if 2 in (options.parts or [2]) and not (options.expected and options.expected.is_file()):
        parser.error(f"--expected must be a file of benchmarks.gpu.texts --write for part 2, got {options.expected}")
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        run_parts(options, environment_of(options))
    finally:
        pack(options)
    return summary(options)


if __name__ == "__main__":
    sys.exit(main())
