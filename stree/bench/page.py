"""The report as one HTML page that needs nothing else: tables, plots, and what they were made with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from stree.bench.plots import plots_of
from stree.bench.records import Record
from stree.bench.summary import Section
from stree.bench.tables import HEADINGS, REST, SHORT, cells, title

__all__ = ["LoadedRun", "make_page"]


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """A run as read from its directory.

    Attributes:
        name: of the run.
        config: its settings.
        envs: the machines and starts.
        records: all.
        rows: of ``summarise``.
        sections: the rows by suite and temperature.
    """

    name: str
    config: dict[str, Any]
    envs: list[Record]
    records: list[Record]
    rows: list[Record]
    sections: list[Section]


def make_page(runs: Sequence[LoadedRun]) -> str:
    """Render the page."""
    plots = [plot for run in runs for plot in plots_of(run.name, run.rows, run.records)]
    subjects = list(dict.fromkeys(plot.subject for plot in plots))
    tables = [(title(section), [(row["status"], cells(row)) for row in section.rows]) for section in _all(runs)]
    environment = Environment(
        loader=PackageLoader("stree.bench", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    template = environment.get_template("report.html.j2")
    return template.render(
        runs=runs,
        columns=[{name: HEADINGS[name] for name in names} for names in (SHORT, REST)],
        tables=tables,
        plots=sorted(plots, key=lambda plot: subjects.index(plot.subject)),
        pairs=_divergences(runs),
    )


def _all(runs: Sequence[LoadedRun]) -> list[Section]:
    """List the sections so that those of one suite and temperature, of several runs, follow each other."""
    sections = [section for run in runs for section in run.sections]
    order = list(dict.fromkeys((section.suite, section.temperature) for section in sections))
    return sorted(sections, key=lambda section: order.index((section.suite, section.temperature)))


def _divergences(runs: Sequence[LoadedRun]) -> list[tuple[str, float, float]]:
    """List how far drafter and target are apart, by section."""
    return [
        (title(section), row["kl_bits"], row["total_variation"])
        for section in _all(runs)
        for row in section.rows
        if row.get("kl_bits") is not None
    ]
