"""A case that crashes, hangs or gives wrong numbers costs only itself; what the time cuts off goes on later.

Run: python -m pytest tests/scripts/test_supervise.py
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import run as gpu_run
from benchmarks.gpu.supervise import Supervisor, Task, shares
from stree.bench.records import read_lines

ROOT = Path(__file__).resolve().parents[2]
# Eight cases: number 1 ends the process, 3 is killed, 5 hangs; the others append their number to a file.
COMMAND = """
import argparse, os, signal, sys, time
from pathlib import Path
from benchmarks.gpu.supervise import Progress
from stree.bench.records import append
parser = argparse.ArgumentParser()
for name in ("--progress", "--out"):
    parser.add_argument(name, type=Path)
parser.add_argument("--first", type=int)
parser.add_argument("--minutes", type=float)
parser.add_argument("--share", type=int, nargs=2, default=(0, 1))
parser.add_argument("--fault", nargs="*", default=[])
options = parser.parse_args()
progress = Progress(options.progress)
for number, case in [*enumerate(range(8)[options.share[0] :: options.share[1]])][options.first :]:
    progress.begin(number, f"case {case}")
    match case if "all" in options.fault else -1:
        case 1: os._exit(0)
        case 3: os.kill(os.getpid(), signal.SIGKILL)
        case 5: time.sleep(60)
    time.sleep(0.3 if "slow" in options.fault else 0)
    append(options.out, [{"case": case}])
progress.end(is_over=False)
"""


def supervised(folder: Path, *arguments: str, seconds: float = 60.0, count: int = 1) -> list[dict[str, Any]]:
    """Run the command until a deadline; return the records of the supervisor so far."""
    command = (sys.executable, "-c", COMMAND, "--out", str(folder / "out"), *arguments)
    task = Task("toy", command, seconds=1.0, start_seconds=30.0)
    supervisor = Supervisor(folder / "run", time.monotonic() + seconds, {**os.environ, "PYTHONPATH": str(ROOT)})
    supervisor.run(shares(task, count) if count > 1 else [task], count)
    return read_lines(folder / "run")


def cases(folder: Path) -> list[int]:
    return [record["case"] for record in read_lines(folder / "out")]


@pytest.mark.slow
def test_what_crashes_or_hangs_is_a_record_and_the_others_run(tmp_path: Path) -> None:
    *faults, task = supervised(tmp_path, "--fault", "all")
    assert cases(tmp_path) == [0, 2, 4, 6, 7]
    assert [(record["case"], record["fault"]) for record in faults] == [
        ("case 1", "crashed, exit status 0"), ("case 3", "crashed, signal 9"), ("case 5", "timed out, 1 s")
    ]  # fmt: skip
    assert (task["status"], task["faults"], task["next"]) == ("done", 3, None)


def test_shares_run_all_cases_once_and_a_finished_task_is_not_run_again(tmp_path: Path) -> None:
    for _ in range(2):
        records = supervised(tmp_path, count=2)
        assert sorted(cases(tmp_path)) == [*range(8)] and [record["status"] for record in records] == ["done"] * 2


@pytest.mark.slow
def test_what_the_time_cuts_off_goes_on_in_the_next_run(tmp_path: Path) -> None:
    (task,) = supervised(tmp_path, "--fault", "slow", seconds=1.2)
    found = cases(tmp_path)
    assert task["status"] == "unfinished" and 0 < len(found) < 8 and task["next"] == len(found)
    assert supervised(tmp_path, "--fault", "slow")[-1]["status"] == "done" and cases(tmp_path) == [*range(8)]


def test_a_command_that_cannot_start_is_given_up_at_once(tmp_path: Path) -> None:
    fault, task = supervised(tmp_path, "--unknown")
    assert (fault["case"], fault["fault"]) == ("start", "crashed, exit status 2") and "--unknown" in fault["tail"]
    assert (task["status"], task["faults"]) == ("given up", 1)


def test_a_lost_context_ends_the_process_and_the_records_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronize(device: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(gpu_run, "environment", lambda device: {})
    run = gpu_run.Run(torch.device("cpu"), 1.0, tmp_path / "records", tmp_path / "progress", first=1)
    monkeypatch.setattr(run, "device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit, match="1"):
        for case in run.cases("abc"):
            run.add({"bench": case})
    assert [record["bench"] for record in read_lines(tmp_path / "records")] == ["b"]
    assert read_lines(tmp_path / "progress") == [{"case": 1, "name": "b"}]
