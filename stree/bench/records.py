"""Benchmark records: JSON lines, one measurement a line, and the machine that they were made on.

Reading and writing them needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import datetime
import gzip
import json
import os
import platform
import subprocess
import zlib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stree.files import failures_named, replacing

if TYPE_CHECKING:
    import torch

__all__ = [
    "BUSY", "ROOT", "Record", "append", "busy_load", "environment", "failure", "quantiles", "read", "read_lines",
    "unpack", "write",
]  # fmt: skip

Record = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent.parent
BUSY = 1.0  # load average over a minute above which timings would be wrong
PACKAGES = ("torch", "transformers", "triton", "mamba-ssm")


def environment(device: torch.device | None = None) -> Record:
    """Describe device, clocks, versions and commit; the load average tells whether the machine was idle.

    ``dirty`` is whether tracked files other than records differ from the commit.
    """
    import torch

    is_ours = Path(_run("git", "rev-parse", "--show-toplevel")) == ROOT  # and not one that holds an installation
    record: Record = {
        "device": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "mhz": _megahertz(),
        "load": _load(),
        "python": platform.python_version(),
        **{name: version for name in PACKAGES if (version := _version(name))},
        "commit": _run("git", "rev-parse", "--short", "HEAD") if is_ours else "",
        "dirty": is_ours
        and bool(_run("git", "status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/benchmarks/results")),
        "date": datetime.date.today().isoformat(),
    }
    if device is not None and device.type == "cuda":
        record |= {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
        asked = "clocks.sm,clocks.mem,clocks.max.sm,driver_version,power.limit"
        record["gpu_clocks"] = {asked: _run("nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader")}
    return record


def busy_load() -> float | None:
    """Return the load average over the last minute where it is too high for timings, else None."""
    load = _load()
    return load if load is not None and load > BUSY else None


def _load() -> float | None:
    """Load average over the last minute, where the system has one."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def quantiles(values: Sequence[float]) -> Record:
    """Summarise repeated measurements: p20, p50, p80 and their number."""
    import numpy as np

    low, middle, high = (float(value) for value in np.quantile(values, [0.2, 0.5, 0.8]))
    return {"p20": low, "p50": middle, "p80": high, "runs": len(values)}


def failure(problem: Exception) -> Record:
    """The part of a record that says what failed."""
    return {"problem": f"{type(problem).__name__}: {problem}"[:500]}


def append(path: Path, records: Sequence[Record]) -> None:
    """Append records to a file in one write, so that several processes may, and put them on the disk."""
    with failures_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        unpack(path)
        with path.open("ab") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records).encode())
            file.flush()
            os.fsync(file.fileno())


def write(path: Path, records: Sequence[Record]) -> None:
    """Replace a file by these records, in one move: an interruption leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        append(beside, records)


def unpack(path: Path) -> None:
    """Unpack a file of which there is only what ``gzip`` made of it."""
    packed = _packed(path)
    if packed.exists() and not path.exists():
        with replacing(path) as beside:
            beside.write_bytes(_unpacked(packed))
        packed.unlink()


def read(path: Path) -> list[Record]:
    """Read a file's records; none where there is no file.

    Raises:
        ValueError: as for ``read_lines``, or a line that is no record; the message names it.
    """
    records = read_lines(path)
    for number, record in enumerate(records, 1):
        if "metric" not in record or not isinstance(record.get("params", {}), dict):
            raise ValueError(f"line {number} of {path} is no benchmark record")
    return records


def read_lines(path: Path) -> list[Record]:
    """Read a file's JSON lines, each a dictionary; none where there is no file.

    Where there is only the file that ``gzip`` makes of it, ``path`` with ".gz" appended, that is read.  A last line
    without its end was cut off while it was written, and is left out.

    Raises:
        ValueError: another line that is none; the message names it.
    """
    if path.exists():
        text = path.read_text(encoding="utf-8", errors="replace")
    elif (packed := _packed(path)).exists():
        text = _unpacked(packed).decode()
    else:
        return []
    *lines, _ = text.split("\n")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {path} is not JSON ({error}); remove it to go on") from error
        if not isinstance(found[-1], dict):
            raise ValueError(f"line {number} of {path} is no benchmark record")
    return found


def _unpacked(packed: Path) -> bytes:
    """Read what ``gzip`` made of a file."""
    try:
        return gzip.decompress(packed.read_bytes())
    except (OSError, EOFError, zlib.error) as error:  # the second where its end is missing
        raise ValueError(f"{packed} cannot be read: {error}") from error


def _packed(path: Path) -> Path:
    return path.with_name(path.name + ".gz")


def _version(package: str) -> str | None:
    """Look up an installed version."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _proc_lines(file: str, name: str) -> list[str]:
    """List the values of a name in a file of /proc."""
    try:
        lines = Path("/proc", file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(name)]


def _processor() -> str:
    """Name the processor."""
    return next(iter(_proc_lines("cpuinfo", "model name")), platform.processor() or platform.machine())


def _megahertz() -> list[int]:
    """List the cores' clocks."""
    return [round(float(value)) for value in _proc_lines("cpuinfo", "cpu MHz")]


def _run(*command: str) -> str:
    """Ask a program; empty where it is not there or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
