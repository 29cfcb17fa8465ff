"""Benchmark records: JSON lines, one measurement a line, appended as soon as it is made, and the machine they name."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

Record = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent


def environment() -> Record:
    """Describe processor, versions and commit; the load average tells whether the machine was idle."""
    return {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": _git("rev-parse", "--short", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.date.today().isoformat(),
    }


def quantiles(values: Sequence[float]) -> Record:
    """Summarise repeated measurements: p20, p50, p80 and their number."""
    low, middle, high = (float(value) for value in np.quantile(values, [0.2, 0.5, 0.8]))
    return {"p20": low, "p50": middle, "p80": high, "runs": len(values)}


def append(path: Path, records: Iterable[Record]) -> None:
    """Append records to a file in one write, so that an interruption leaves whole lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()


def read(path: Path) -> list[Record]:
    """Read a file's records; none where there is no file.

    Raises:
        ValueError: a line that is not JSON; the message names it.
    """
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {path.name} is not JSON ({error}); remove it to resume") from error
    return records


def _processor() -> str:
    """Name the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _git(*arguments: str) -> str:
    """Ask git about this checkout; empty where there is none."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
