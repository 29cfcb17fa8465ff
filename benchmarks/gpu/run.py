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
from typing import Any, TypeVar

import torch

from benchmarks import report
from benchmarks.gpu.supervise import Progress, is_wrong
from stree.bench.records import Record, append, environment, failure
from stree.bench.tables import table
from stree.decode.cuda_graphs import recovering

__all__ = ["Run", "begin", "command_line"]

T = TypeVar("T")


def command_line(doc: str | None, file: str, *, minutes: float = 9.0) -> argparse.ArgumentParser:
    """A parser with the options of every script: ``--out``, ``--minutes``, ``--smoke``, and those of a supervisor.

    Args:
        doc: of the module.
        file: name of the file in ``--out`` that records are appended to.
        minutes: of the script, unless told otherwise.
    """
    parser = report.command_line(doc, f"folder for {file}")
    parser.set_defaults(file=file)
    parser.add_argument("--minutes", type=float, default=minutes, help="begin nothing new after this time")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, for a machine without a GPU")
    parser.add_argument("--progress", type=Path, help="file that the names of cases are appended to as they begin")
    parser.add_argument("--first", type=int, default=0, help="number of the case to begin at")
    return parser


def begin(parser: argparse.ArgumentParser, *, is_interpreted: bool = False) -> tuple[argparse.Namespace, Run]:
    """Read the command line, choose the device and begin a run; ends the process where there is no such device.

    Args:
        parser: of ``command_line``; ``--smoke`` allows a CPU.
        is_interpreted: whether the script launches Triton kernels at tiny sizes, which a CPU only interprets.
    """
    options = parser.parse_args()
    device = torch.device("cuda")
    if not torch.cuda.is_available():
        device = torch.device("cpu")
        if not options.smoke:
            parser.error("a CUDA device is needed; without one pass --smoke")
        if is_interpreted and os.environ.get("TRITON_INTERPRET") != "1":
            parser.error("without a CUDA device the kernels need TRITON_INTERPRET=1")
    elif options.smoke and not is_interpreted:
        device = torch.device("cpu")
    file = options.out and options.out / options.file
    return options, Run(device, options.minutes, file, options.progress, options.first)


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

    def add(self, record: Record) -> None:
        """Keep a record, and append it to the file at once."""
        self.records.append({**record, "env": self.env})
        self.failures += is_wrong(record)
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
    def part(self, *, adds: bool = True, **record: Any) -> Iterator[Record]:
        """Add a record that the block fills in; if the block fails, with its problem, and the run goes on.

        Args:
            adds: False adds the record of a failure alone.
            record: what is known of it before.
        """
        try:
            with recovering(self.device):
                yield record
        except Exception as problem:  # a failure is a finding, not the end of the other parts
            record, adds = record | failure(problem), True
        if adds:
            self.add(record)

    def report(self, titles: Sequence[str], rows: Iterable[Sequence[object]], **more: object) -> int:
        """Print a table, and a summary as the last line in JSON; return the exit status."""
        print(table(titles, rows))
        print(json.dumps({"records": len(self.records), **more, "failures": self.failures}))
        return int(self.failures > 0)
