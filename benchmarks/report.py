"""What the scripts share: their command line, and how they report: records, Markdown tables, JSON as the last line."""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

from stree.bench.records import ROOT, Record, append, environment, write
from stree.bench.tables import table

__all__ = ["command_line", "digests", "finish", "study"]


def command_line(
    doc: str | None, out: str, *, default: Path | None = None, required: bool = False
) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring, with ``--out``, which ``out`` describes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help=out, default=default, required=required)
    return parser


def study(
    measure: Callable[..., Iterable[Record]], titles: Sequence[str] = (),
    cells: Callable[[Record], Sequence[object]] | None = None, *, out: str = "file of JSON lines to append to",
    default: Path | None = None, replaces: bool = False, by_place: str = "",
) -> None:  # fmt: skip
    """Run a study from the command line and report its records.

    Args:
        measure: its parameters are the options, which its docstring describes in a line each; one that is False by
            default is a switch. A ValueError of it is a mistake on the command line.
        titles: of the table.
        cells: makes a line of the table from a record or, where records have ``rows``, from each of those.
        out: help of ``--out``.
        default: of ``--out``.
        replaces: whether the file holds these records alone.
        by_place: the parameter that is given without its name.
    """
    parser = command_line(sys.modules[measure.__module__].__doc__, out, default=default)
    helps = dict(re.findall(r"^ +(\w+): (.*)$", measure.__doc__ or "", re.MULTILINE))
    for name, one in inspect.signature(measure, eval_str=True).parameters.items():
        choices, is_needed = get_args(one.annotation), one.default is one.empty
        settings: dict[str, Any] = {"type": str if choices else one.annotation, "choices": choices or None}
        if one.default is False:
            settings = {"action": "store_true"}
        elif name != by_place:
            settings |= {"required": is_needed, "default": None if is_needed else one.default}
        option = name if name == by_place else f"--{name.replace('_', '-')}"
        parser.add_argument(option, help=helps.get(name), **settings)
    given = vars(parser.parse_args())
    file = given.pop("out")
    try:
        records = list(measure(**given))
    except ValueError as error:
        parser.error(str(error))
    rows = (row for record in records for row in record.get("rows", [record]))
    finish(records, file, titles, map(cells, rows) if cells else (), replaces=replaces)


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
