"""What the scripts share: their command line, and how they report: records, Markdown tables, JSON as the last line."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from stree.bench.records import ROOT, Record, append, environment, write
from stree.bench.tables import table

__all__ = ["command_line", "digests", "finish"]


def command_line(
    doc: str | None, out: str, *, default: Path | None = None, required: bool = False
) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring, with ``--out``, which ``out`` describes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help=out, default=default, required=required)
    return parser


def digests(files: Iterable[Path]) -> dict[str, str]:
    """Return the hashes of files of the repository, by path: a record that has them tells what it was made of."""
    return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in sorted(files)}


def finish(
    records: Sequence[Record], out: Path | None, titles: Sequence[str] = (), rows: Iterable[Sequence[object]] = (),
    *, replaces: bool = False,
) -> None:  # fmt: skip
    """Stamp records with the environment, append them to a file or replace it, and print table and records.

    The last line of output is all records in JSON.
    """
    env = environment()
    stamped = [{**record, "env": env} for record in records]
    if out is not None:
        (write if replaces else append)(out, stamped)
    if titles:
        print(table(titles, rows))
    print(json.dumps(stamped))
