"""``stree bench report``: the rows of runs as a Markdown table, and as one HTML page with plots."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from stree.bench import plots
from stree.bench.directory import read_about
from stree.bench.drawing import describe, svg
from stree.bench.methods import PEERS
from stree.bench.records import BUSY, Record, read
from stree.bench.summary import PARTS, compare, pool, summarise
from stree.bench.tables import ratio_text, table
from stree.bench.unfinished import with_unfinished
from stree.bench.verdict import verdict_text
from stree.files import replacing

__all__ = [
    "HEADINGS", "LoadedRun", "cells", "load_runs", "markdown", "plots_of", "ratio_table", "with_form", "write_page",
    "write_plots",
]  # fmt: skip

HEADINGS = {  # column -> heading
    "suite": "suite",
    "temperature": "T",
    "method": "method",
    "tokens_per_s": "tokens/s",
    "over_plain": "over plain [95%]",
    "perfect_over_plain": "over plain if all drafts were right",
    "over_chain": "over best chain [95%]",
    "tau": "tau [95%]",
    "draft_calls": "draft calls",
    "verified": "nodes",
    "parts": "ms a step: " + " / ".join(PARTS),
    "ttft_ms": "first token, ms",
    "distinct_4grams": "distinct 4-grams",
    "output": "output",
}
MOST_ON_A_PAGE = 4  # runs
CONDITIONS = {  # setting -> how a plot names it
    "target": "target {}",
    "drafter": "drafter {}",
    "device": "{}",
    "threads": "threads {}",
    "dtype": "{}",
    "batch_size": "batch {}",
    "max_new_tokens": "{} new tokens",
}


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """A run as read from its directory.

    Attributes:
        name: of the directory.
        config: settings of the run.
        sessions: environments of its starts.
        rows: of ``summarise``.
        pooled: of ``pool``.
    """

    name: str
    config: dict[str, Any]
    sessions: list[Record]
    rows: list[Record]
    pooled: list[Record]

    @property
    def command(self) -> str:
        """The command line of the last start."""
        return str(self.sessions[-1]["command"])

    @property
    def made_on(self) -> str:
        """Commit, device and load of the last start."""
        env = self.sessions[-1]
        load = "" if env.get("load") is None else f"load average {env['load']:g} at the start"
        if env.get("load") is not None and env["load"] > BUSY:
            load += ": times of a busy machine are wrong"
        parts = (f"commit {env['commit']}" if env.get("commit") else "", str(env.get("device") or ""), load)
        return ", ".join(part for part in parts if part)


Drawn = tuple[Figure, list[LoadedRun]]  # a plot, and the runs that it shows


def load_runs(paths: Sequence[Path]) -> list[LoadedRun]:
    """Read the directories of runs.

    Raises:
        ValueError: a directory without a run or without results, a damaged file, or two of one name.
    """
    runs = []
    for path in paths:
        if not (path / "run.json").is_file():
            raise ValueError(f"{path} holds no run: there is no run.json in it")
        config, sessions = read_about(path / "run.json")
        if not sessions or "command" not in sessions[-1]:
            raise ValueError(f"{path / 'run.json'} cannot be read: its last session has no command")
        records = read(path / "results.jsonl")
        if not records:
            raise ValueError(f"{path} holds no results yet")
        try:
            rows = summarise(records)
            pooled = pool(records, rows)
            rows = with_unfinished(rows, records, config) if rows else []
        except (LookupError, TypeError, ArithmeticError) as error:
            raise ValueError(f"{path} holds a record that this version cannot read: {error!r}") from error
        if not rows:
            skipped = [record["reason"] for record in records if record["metric"] == "skipped"]
            cause = "no method has been checked or measured yet"
            if skipped:
                cause = f"every prompt was left out: {skipped[0]}"
            raise ValueError(f"{path} holds records, but {cause}")
        runs.append(LoadedRun(path.resolve().name, config, sessions, rows, pooled))
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"every directory needs a name of its own, got {', '.join(names)}")
    return runs


def markdown(rows: Sequence[Record]) -> str:
    """Write rows as a Markdown table with aligned columns."""
    lines = [list(HEADINGS.values()), [""] * len(HEADINGS)]
    for row in rows:
        written = cells(row)
        lines.append([written.get(name, "") for name in HEADINGS])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines[1] = ["-" * width for width in widths]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def ratio_table(path: Path, pairs: Sequence[str]) -> str:
    """Compare pairs of methods of one run over the prompts of all its suites, as a Markdown table.

    Args:
        path: directory of the run.
        pairs: METHOD/METHOD.

    Raises:
        ValueError: no such pair, or a method that the run does not have, or of which one output is not the target's.
    """
    records, rows = read(path / "results.jsonl"), []
    known = {record["provider"] for record in records}
    for pair in pairs:
        # Names may hold slashes, as sequoia:rates=0.6/0.2.
        splits = [(pair[:at], pair[at + 1 :]) for at, sign in enumerate(pair) if sign == "/"]
        if not splits:
            raise ValueError(f"--ratios must be METHOD/METHOD, got {pair!r}")
        method, base = next((names for names in splits if known.issuperset(names)), splits[-1])
        for row in compare(records, method, base):
            ratios = ratio_text(row["speed"]), ratio_text(row["tau"])
            rows.append([method, base, f"{row['temperature']:g}", str(row["texts"]), *ratios])
    return table(["method", "over", "T", "texts", "speed [95%]", "tau [95%]"], rows)


def write_page(runs: Sequence[LoadedRun], path: Path) -> None:
    """Write one HTML page that needs no other file; of many runs each has a page beside it, NAME-RUN.html."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = plots_of(runs)
    if len(runs) <= MOST_ON_A_PAGE:
        _write_page(runs, drawn, path, [])
        return
    pages = [(run, path.with_name(f"{path.stem}-{run.name}{path.suffix}")) for run in runs]
    for run, own in pages:
        _write_page([run], [found for found in drawn if found[1] == [run]], own, [("all runs", path.name)])
    shared = [found for found in drawn if len(found[1]) > 1]
    _write_page([], shared, path, [(run.name, own.name) for run, own in pages])


def _write_page(
    runs: Sequence[LoadedRun], drawn: Sequence[Drawn], path: Path, pages: Sequence[tuple[str, str]]
) -> None:
    """Write the page of these runs and plots; its contents list other pages by name and file."""
    environment = Environment(
        loader=PackageLoader("stree.bench", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    tables = [(run.name, [(row["status"], cells(row)) for row in run.rows]) for run in runs]
    page = environment.get_template("report.html.j2").render(
        runs=runs, tables=tables, headings=HEADINGS, plots=drawn, svg=svg, pages=pages
    )
    with replacing(path) as beside:
        beside.write_text(page, encoding="utf-8")


def write_plots(runs: Sequence[LoadedRun], folder: Path) -> list[Path]:
    """Write each plot as an SVG file; its name ends in the run's where several runs have such a plot."""
    drawn = plots_of(runs)
    names = [figure.get_label() for figure, _ in drawn]
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for (figure, shown), name in zip(drawn, names, strict=True):
        paths.append(folder / f"{name if names.count(name) == 1 else f'{name}-{shown[0].name}'}.svg")
        with replacing(paths[-1]) as beside:
            beside.write_text(svg(figure), encoding="utf-8")
    return paths


def plots_of(runs: Sequence[LoadedRun]) -> list[Drawn]:
    """Draw what the runs hold: plots of each run, then of runs that differ in batch size only; with the runs shown."""
    found: list[tuple[Figure | None, list[LoadedRun]]] = []
    by_config: dict[str, dict[int, LoadedRun]] = {}
    for run in runs:
        by_method = plots.speed(run.rows), plots.tau(run.rows)
        by_nodes = plots.tau_by_nodes(run.pooled), plots.step_time_by_nodes(run.pooled)
        found += [
            (figure, [run]) for figure in (*by_method, *by_nodes, plots.acceptance(run.pooled), plots.context(run.rows))
        ]
        if "batch_size" in run.config:
            others = {name: value for name, value in run.config.items() if name != "batch_size"}
            by_config.setdefault(json.dumps(others), {}).setdefault(run.config["batch_size"], run)
    for alike in by_config.values():
        found.append((plots.batch({size: run.pooled for size, run in alike.items()}), list(alike.values())))
    drawn = [(figure, shown) for figure, shown in found if figure is not None]
    for figure, shown in drawn:
        config = shown[0].config
        shared = [name for name in CONDITIONS if all(run.config.get(name) == config.get(name) for run in shown)]
        values = {
            name: PurePath(value).name if name in ("target", "drafter") else value for name, value in config.items()
        }
        describe(figure, ", ".join(CONDITIONS[name].format(values[name]) for name in shared if name in config))
    return drawn


def with_form(row: Record) -> str:
    """Return a method's name, of DySpec's trees with the form, as its two forms have different costs and trees."""
    name, form = str(row["method"]), re.search(r"DySpec\(.*form='(\w+)'", row.get("growth") or "")
    return name if form is None or f"form={form[1]}" in name else f"{name} ({form[1]})"


def cells(row: Record) -> Mapping[str, str]:
    """Write the cells of a row by column; a row without figures has no numbers."""
    names = {"suite": row["suite"], "temperature": f"{row['temperature']:g}", "method": with_form(row)}
    if row["status"] != "ok":
        return {**names, "output": verdict_text(row)}
    has_parts = row["drafter"] not in PEERS
    return {
        **names,
        "tokens_per_s": f"{row['tokens_per_s']:.0f}",
        **{name: ratio_text(row[name]) for name in ("over_plain", "over_chain")},
        "perfect_over_plain": "-" if row["perfect_over_plain"] is None else f"{row['perfect_over_plain']:.2f}",
        "tau": ratio_text(row["tau_interval"]),
        "draft_calls": f"{row['draft_calls']:.1f}",
        "verified": f"{row['verified']:.1f}",
        "parts": " / ".join(f"{row[f'{part}_ms']:.1f}" for part in PARTS) if has_parts else "-",
        "ttft_ms": "-" if row["ttft_ms"] is None else f"{row['ttft_ms']:.1f}",
        "distinct_4grams": f"{row['distinct_4grams']:.2f}",
        "output": verdict_text(row),
    }
