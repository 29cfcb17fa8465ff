"""Runs commands that work through numbered cases, each in a process of its own, and restarts them behind a fault.

Such a command takes ``--progress FILE`` and ``--first NUMBER``: it begins at the case of that number, and appends to
the file which case it begins (`Progress`).  If it crashes, or a case runs longer than its seconds, that case becomes a
record and the command is started again behind it, with a new CUDA context.  Standard library only, so that nothing that
is missing or broken on a machine ends the supervisor.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from stree.bench.records import Record, append, read_lines

__all__ = ["WORKERS", "Progress", "Supervisor", "Task", "is_wrong", "shares"]

NUM_CHARACTERS = 3000  # of a command's output that a record keeps
MOST_FAULTS = 12  # of one task, each of which costs a start
POLL_SECONDS = 0.1
WORKERS = max(1, (os.cpu_count() or 2) - 2)  # that build kernels side by side


class Progress:
    """Where a command is: a file of JSON lines.

    Args:
        path: the file, or None where no supervisor reads it.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def begin(self, number: int, name: str) -> None:
        """Record that a case begins."""
        self._add({"case": number, "name": name})

    def end(self, *, is_over: bool) -> None:
        """Record that all cases were run, or that the command's time was over before."""
        self._add({"is_over": is_over})

    def _add(self, record: Record) -> None:
        if self.path is not None:
            append(self.path, [record])


@dataclass(frozen=True)
class Task:
    """A command that works through numbered cases.

    Attributes:
        name: of the task, unique in a run.
        command: without ``--progress``, ``--first`` and ``--minutes``.
        seconds: that one case may take.
        start_seconds: that it may take until its first case begins: imports, weights.
    """

    name: str
    command: tuple[str, ...]
    seconds: float = 60.0
    start_seconds: float = 120.0


def shares(task: Task, count: int) -> list[Task]:
    """Split a task whose command takes ``--share I N`` into ``count`` tasks."""
    return [
        replace(task, name=f"{task.name} {i + 1}/{count}", command=(*task.command, "--share", str(i), str(count)))
        for i in range(count)
    ]


def is_wrong(record: Record) -> bool:
    """Whether a record is of something that failed or gave wrong numbers."""
    return "problem" in record or record.get("correct") is False or record.get("outcome") == "failed"


class Supervisor:
    """Runs tasks until a deadline, and goes on where an earlier run with the same file ended.

    Args:
        file: for a record of every fault and of every task, appended at once.
        deadline: by ``time.monotonic()``; what runs then is killed and recorded as unfinished.
        environment: of the commands.
    """

    def __init__(self, file: Path, deadline: float, environment: Mapping[str, str] | None = None) -> None:
        self.file, self.deadline, self.environment = file, deadline, environment
        self._lock = threading.Lock()
        self._next = {r["task"]: r["next"] for r in read_lines(file) if r["bench"] == "task"}  # None: it is done

    def run(self, tasks: Sequence[Task], width: int = 1) -> None:
        """Run tasks, ``width`` of them side by side; those that are done already are left out."""
        with ThreadPoolExecutor(width) as pool:
            try:
                list(pool.map(self._supervise, tasks))
            except BaseException:  # Ctrl-C
                self.deadline = 0.0
                raise

    def _supervise(self, task: Task) -> None:
        """Run one task to its end, restarting it behind each fault."""
        first, began, faults = self._next.get(task.name, 0), time.monotonic(), 0
        if first is None or began > self.deadline:
            return
        status = "unfinished"
        while time.monotonic() < self.deadline:
            case, fault, tail = self._run_once(task, first)
            if fault is None:
                first, status = None, "done"
                break
            if fault == "unfinished":
                first = first if case is None else case["case"] + case.get("is_done", False)
                break
            faults += 1
            name = "start" if case is None else case["name"]
            self._add({"bench": "fault", "task": task.name, "case": name, "fault": fault, "tail": tail})
            if case is None or faults == MOST_FAULTS:
                first, status = None if case else first, "given up"  # what cannot start is tried in the next run
                break
            first = case["case"] + 1
        self._next[task.name] = first
        seconds = round(time.monotonic() - began, 1)
        self._add(
            {"bench": "task", "task": task.name, "status": status, "next": first, "faults": faults, "seconds": seconds}
        )

    def _run_once(self, task: Task, first: int) -> tuple[Record | None, str | None, str]:
        """Start the command; return the case that it was at, what went wrong or None, and the end of its output."""
        with tempfile.TemporaryDirectory() as folder:
            progress, output = Path(folder, "progress"), Path(folder, "output")
            minutes = (self.deadline - time.monotonic()) / 60
            more = ["--progress", str(progress), "--first", str(first), "--minutes", f"{minutes:.3f}"]
            with output.open("wb") as file:
                process = subprocess.Popen(
                    [*task.command, *more], stdout=file, stderr=subprocess.STDOUT, env=self.environment,
                    stdin=subprocess.DEVNULL, process_group=0,
                )  # fmt: skip
                fault = self._watched(process, task, progress)
            tail = output.read_text(encoding="utf-8", errors="replace")[-NUM_CHARACTERS:]
            lines = read_lines(progress)
        case = next((line for line in reversed(lines) if "case" in line), None)
        if lines and "is_over" in lines[-1]:  # what happens while the process ends costs no case
            fault = "unfinished" if lines[-1]["is_over"] else None
            case = case and case | {"is_done": True}
        elif fault is None:
            code = process.returncode
            fault = f"crashed, {f'signal {-code}' if code < 0 else f'exit status {code}'}"
        return case, fault, tail

    def _watched(self, process: subprocess.Popen[bytes], task: Task, progress: Path) -> str | None:
        """Wait until a process ends, a case outruns its seconds, or the deadline passes; kill it in the last two."""
        size, since, limit = 0, time.monotonic(), task.start_seconds
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            if (found := progress.stat().st_size if progress.exists() else 0) != size:
                size, since = found, now
                is_ending = b"is_over" in progress.read_bytes()
                limit = task.start_seconds if is_ending else task.seconds
            fault = f"timed out, {limit:g} s" if now - since > limit else "unfinished" if now > self.deadline else None
            if fault is not None:
                os.killpg(process.pid, signal.SIGKILL)  # this command and its children
                process.wait()
                return fault
        return None

    def _add(self, record: Record) -> None:
        with self._lock:
            append(self.file, [record])
            print(*(f"{name}={value}" for name, value in record.items() if name not in ("bench", "tail")), flush=True)
