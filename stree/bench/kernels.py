"""``stree bench kernels``: run the kernel benches of the repository and show their records as a table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from stree.bench.records import Record, append

__all__ = ["BENCHES", "run_benches"]

FOLDER = Path(__file__).resolve().parent.parent.parent / "benchmarks"
# Name -> script, its arguments for a smoke run, and those for a full one.  The reference bench prints its records, the
# suite writes them to a folder.
BENCHES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "reference": ("bench_reference.py", ("--nodes", "1", "5", "--runs", "3"), ()),
    "suite": ("gpu_suite.py", ("--smoke", "--parts", "kernels"), ("--parts", "kernels")),
}


def run_benches(names: Sequence[str], *, smoke: bool, out: Path | None, console: Console) -> None:
    """Run benches, each in a process of its own; a smoke run only shows that they work.

    Args:
        names: of ``BENCHES``; empty for the GPU suite where there is a GPU, else for the reference operations.
        smoke: tiny sizes, Triton kernels in its interpreter.
        out: folder to which ``kernels.jsonl`` is appended.
        console: where the tables go.

    Raises:
        ValueError: an unknown name.
        RuntimeError: the repository's benchmarks are not there, or one fails.
    """
    chosen = list(names) or (["suite"] if torch.cuda.is_available() else ["reference"])
    for name in chosen:
        if name not in BENCHES:
            raise ValueError(f"kernel bench {name!r} is unknown; known are {', '.join(BENCHES)}")
        found, problem = _run(name, smoke)
        if out is not None:
            append(out / "kernels.jsonl", found)
        console.print(_table(name, found))
        if problem:
            raise RuntimeError(problem)


def _run(name: str, smoke: bool) -> tuple[list[Record], str]:
    """Run one script; give its records, and what went wrong."""
    script, tiny, full = BENCHES[name]
    if not (FOLDER / script).is_file():
        raise RuntimeError(f"kernel benches are run from a checkout of the repository: there is no {script} here")
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if smoke and not torch.cuda.is_available() else {})}
    with tempfile.TemporaryDirectory() as folder:
        out = ("--out", folder) if name == "suite" else ()
        command = [sys.executable, str(FOLDER / script), *(tiny if smoke else full), *out]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        texts = [path.read_text(encoding="utf-8") for path in Path(folder).glob("*.jsonl")] or [done.stdout]
    found = [json.loads(line) for text in texts for line in text.splitlines() if line.startswith("{")]
    problem = f"{script} ended with status {done.returncode}: {done.stderr.strip()[-400:]}" if done.returncode else ""
    return found, problem


def _table(name: str, found: Sequence[Record]) -> Table:
    """Show records."""
    table = Table("bench", "provider", "parameters", "p20", "p50", "p80", "unit", title=name)
    for record in found:
        params = " ".join(f"{key}={value}" for key, value in record.get("params", {}).items())
        numbers = [_number(record.get(q)) for q in ("p20", "p50", "p80")]
        table.add_row(record["bench"], str(record.get("provider", "")), params, *numbers, record.get("unit", ""))
    return table


def _number(value: Any) -> str:
    """Write a measurement that may be missing."""
    return "-" if value is None else f"{value:.1f}"
