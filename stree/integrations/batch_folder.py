"""The folder of a batch job: its settings, the finished rows, the rejected ones.

Rows are appended by one process and never rewritten.  A process that is killed leaves at most one line that is torn, at
the end of a file; the next one cuts it off and goes on with the rows that are in no file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from stree.files import alone_in, failures_named, replacing
from stree.integrations.batch_rows import Row

__all__ = ["JobFolder", "open_job"]

JOB, REJECTED, PARTS = "job.json", "rejected.jsonl", "part-*.jsonl"


class JobFolder:
    """Where the results of a job are kept; made by ``open_job``.

    Attributes:
        finished: ids of the rows that are in a part.
        rejected: numbers of the rows that are in ``rejected.jsonl``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        parts = sorted(folder.rglob(PARTS))
        self.finished: set[str | int] = {record["id"] for part in parts for record in _records(part, "id")}
        self.rejected: set[int] = {record["row"] for record in _records(folder / REJECTED, "row")}
        self._part = folder / f"part-{len(parts):05}.jsonl"
        while self._part.exists():  # one of them was renamed
            self._part = self._part.with_name(f"{self._part.stem}-.jsonl")

    def pending(self, rows: Iterable[Row]) -> list[Row]:
        """List the rows that are still to be run; reject those that cannot be run, once.

        Raises:
            ValueError: a file cannot be written.
        """
        pending: list[Row] = []
        rejected: list[Row] = []
        for row in rows:
            if row.number in self.rejected or (row.reason is None and row.id in self.finished):
                continue
            (pending if row.reason is None else rejected).append(row)
        self.add([{"row": row.number, "id": row.id, "reason": row.reason} for row in rejected])
        return pending

    def add(self, results: Iterable[Mapping[str, Any]]) -> None:
        """Write results of rows: those with a ``reason`` to the rejected ones, the others, without ``row``, to a part.

        Raises:
            ValueError: a file cannot be written; what was written before stays.
        """
        for result in results:
            if result.get("reason") is not None:
                _append(self.folder / REJECTED, {name: result[name] for name in ("id", "reason", "row")})
                self.rejected.add(result["row"])
            else:
                _append(self._part, {name: value for name, value in result.items() if name not in ("reason", "row")})
                self.finished.add(result["id"])


@contextmanager
def open_job(folder: Path, settings: Mapping[str, Any]) -> Iterator[JobFolder]:
    """Open the folder of a job, a new or an empty one for a new job, and keep other processes out of it.

    Args:
        folder: made where it does not exist.
        settings: JSON-able; everything that decides the texts, the checksum of the input among it.

    Raises:
        ValueError: a folder that holds another job or something else, in which another process writes, or that cannot
            be written.
    """
    with ExitStack() as held:
        with failures_named(folder):
            held.enter_context(alone_in(folder))
            _check_job(folder, json.loads(json.dumps(settings)))
            for path in [*folder.rglob(PARTS), folder / REJECTED]:
                _cut_torn_line(path)
            job = JobFolder(folder)
        yield job


def _check_job(folder: Path, settings: Mapping[str, Any]) -> None:
    """Compare the settings with those of the folder's job, or write them into an empty folder."""
    path = folder / JOB
    if not path.exists():
        if any(not found.name.endswith(".part") for found in folder.iterdir()):  # left behind by ``replacing``
            raise ValueError(f"{folder} holds files that stree batch did not make; choose another --out")
        with replacing(path) as beside:
            beside.write_text(json.dumps(settings, indent=1) + "\n")
        return
    try:
        known = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    known = known if isinstance(known, dict) else {}
    for name in [*settings, *(name for name in known if name not in settings)]:
        if known.get(name) != settings.get(name):
            raise ValueError(
                f"{folder} holds another job, with {name} {known.get(name)!r:.80} where this one has "
                f"{settings.get(name)!r:.80}; choose another --out"
            )


def _cut_torn_line(path: Path) -> None:
    """Cut off what follows the last line end of a file."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, 2)
        keep = end
        while keep:  # backwards, as the last line may be long and the file longer
            start = max(0, keep - 65536)
            file.seek(start)
            place = file.read(keep - start).rfind(b"\n")
            keep = start + place + 1 if place >= 0 else start
            if place >= 0:
                break
        if keep < end:
            file.truncate(keep)


def _records(path: Path, key: str) -> Iterator[dict[str, Any]]:
    """Read the records of a file, none where there is no file; each has ``key``."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                assert isinstance(record[key], str | int)
            except (ValueError, TypeError, LookupError, AssertionError, RecursionError) as error:
                raise ValueError(f"line {number} of {path} is no record of stree batch") from error
            yield record


def _append(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record as one line, past any buffer of this process."""
    line = json.dumps(record).encode() + b"\n"
    with failures_named(path), path.open("ab", buffering=0) as file:
        while line:  # a disk that fills up takes a part of it
            line = line[file.write(line) :]
