"""``stree bench report``: read run directories, write tables, CSV and the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from stree.bench.page import LoadedRun, make_page
from stree.bench.records import read
from stree.bench.summary import sections, summarise
from stree.bench.tables import csv_text, markdown, rich_tables

__all__ = ["load_runs", "print_markdown", "write_report"]

LEAST_WIDTH = 210  # characters, so that no column of the terminal table is cut


def load_runs(paths: Sequence[Path]) -> list[LoadedRun]:
    """Read the directories of runs.

    Raises:
        ValueError: a directory without a run or without results, a broken file, or two of one name.
    """
    runs = []
    for path in paths:
        about = path / "run.json"
        if not about.is_file():
            raise ValueError(f"{path} holds no run: there is no run.json in it")
        try:
            known = json.loads(about.read_text(encoding="utf-8"))
            config, envs = dict(known["config"]), list(known["sessions"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{about} cannot be read: {error}") from error
        records = read(path / "results.jsonl")
        if not records:
            raise ValueError(f"{path} holds no results yet")
        try:
            rows = summarise(records)
        except (LookupError, TypeError, ArithmeticError) as error:
            raise ValueError(f"{path} holds a record that this version cannot read: {error!r}") from error
        name = path.resolve().name
        runs.append(LoadedRun(name, config, envs, records, rows, sections(name, rows)))
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"every directory needs a name of its own, got {', '.join(names)}")
    return runs


def print_markdown(runs: Sequence[LoadedRun], console: Console, *, every: bool) -> None:
    """Print the README's table."""
    for run in runs:
        console.print(markdown(run.sections, every=every), markup=False, highlight=False, soft_wrap=True)


def write_report(runs: Sequence[LoadedRun], out: Path, console: Console, *, as_json: bool = False) -> None:
    """Print the tables, and all rows as one JSON line if asked; write ``report.csv`` and ``report.html``."""
    wide = Console(file=console.file, width=max(console.width, LEAST_WIDTH))
    every = [section for run in runs for section in run.sections]
    for section in every:
        for part in rich_tables(section):
            wide.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
    out.mkdir(parents=True, exist_ok=True)
    for name, text in (("report.csv", csv_text(every)), ("report.html", make_page(runs))):
        (out / name).write_text(text, encoding="utf-8")
        console.print(f"written: {out / name}", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        rows = [{"run": section.run, **row} for section in every for row in section.rows]
        line = json.dumps({"bench": "run", "rows": rows, "env": runs[0].envs[-1]})
        console.print(line, markup=False, highlight=False, soft_wrap=True)
