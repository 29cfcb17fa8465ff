"""What the GPU scripts share: options, a deadline, records that are written at once, and failures that are counted."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.gpu.supervise import Progress
from benchmarks.report import failure, table
from stree.bench.records import Record, append, environment
from stree.decode.cuda_graphs import recovering

__all__ = ["Run", "command_line", "device_for"]

T = TypeVar("T")


def command_line(doc: str | None, *, out: str, minutes: float = 9.0) -> argparse.ArgumentParser:
    """A parser with the options of every script: ``--out``, ``--minutes`` and ``--smoke``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help=out)
    parser.add_argument("--minutes", type=float, default=minutes, help="begin nothing new after this time")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, for a machine without a GPU")
    parser.add_argument("--progress", type=Path, help="file that the names of cases are appended to as they begin")
    parser.add_argument("--first", type=int, default=0, help="number of the case to begin at")
    return parser


def device_for(
    parser: argparse.ArgumentParser, options: argparse.Namespace, *, is_interpreted: bool = False
) -> torch.device:
    """The device to measure on; ends the process with a message where there is none.

    Args:
        parser: ends the process.
        options: ``smoke`` allows a CPU.
        is_interpreted: whether the script launches Triton kernels at tiny sizes, which a CPU only interprets.
    """
    if torch.cuda.is_available():
        return torch.device("cpu" if options.smoke and not is_interpreted else "cuda")
    if not options.smoke:
        parser.error("a CUDA device is needed; without one pass --smoke")
    if is_interpreted and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("without a CUDA device the kernels need TRITON_INTERPRET=1")
    return torch.device("cpu")


class Run:
    """One run of a script.

    Args:
        device: that is measured.
        minutes: until the deadline.
        file: that records are appended to, or None.
        progress: file that `benchmarks.gpu.supervise` reads, or None.
        first: number of the case to begin at.

    Attributes:
        records: all records so far.
        failures: number of things that failed.
    """

    def __init__(
        self, device: torch.device, minutes: float, file: Path | None, progress: Path | None = None, first: int = 0
    ) -> None:
        self.device, self.file, self.progress, self.first = device, file, Progress(progress), first
        self.deadline = time.monotonic() + 60 * minutes
        self.env = environment(device)
        self.records: list[Record] = []
        self.failures = 0

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.deadline

    def add(self, record: Record, *, is_failure: bool = False) -> None:
        """Keep a record, and append it to the file at once."""
        self.records.append({**record, "env": self.env})
        self.failures += is_failure
        if self.file:
            append(self.file, self.records[-1:])

    def cases(self, cases: Iterable[T], name: Callable[[T], str] = str) -> Iterator[T]:
        """Yield numbered cases from the first that was asked for, until the time is up.

        Before each the progress file gets its name.  If the device cannot be used after a case (a CUDA error that stays
        with the context), the process ends, and its supervisor starts another behind that case.
        """
        for number, case in enumerate(cases):
            if number < self.first:
                continue
            if self.is_over:
                self.add({"bench": "unfinished", "case": name(case)})
                self.progress.end(is_over=True)
                return
            self.progress.begin(number, name(case))
            yield case
            self._end_if_device_is_lost()
        self.progress.end(is_over=False)

    def _end_if_device_is_lost(self) -> None:
        if self.device.type == "cuda" and self.progress.path is not None:
            try:
                torch.cuda.synchronize(self.device)
            except Exception as problem:  # the case's own record has its first message
                print(f"the CUDA context is lost: {problem}", file=sys.stderr, flush=True)
                os._exit(1)

    @contextmanager
    def part(self, name: str, **more: object) -> Iterator[None]:
        """Turn the failure of a part into a record, so that the other parts run."""
        try:
            with recovering(self.device):
                yield
        except Exception as problem:
            self.add({"bench": name, **more, **failure(problem)}, is_failure=True)

    def report(self, bench: str, titles: Sequence[str], rows: Iterable[Sequence[object]], **more: object) -> int:
        """Print a table, and a summary as the last line in JSON; return the exit status."""
        print(table(titles, rows))
        print(json.dumps({"bench": bench, **more, "failures": self.failures}))
        return int(self.failures > 0)
