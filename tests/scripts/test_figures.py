"""The committed figures, and the table of README.md and docs/results.md, are those of the present records."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import ROOT
from benchmarks.studies import figure_step, speed_table
from stree.bench.report import load_runs, write_plots

RESULTS = ROOT / "benchmarks" / "results"


def test_the_committed_step_is_what_its_script_draws() -> None:
    drawn = figure_step.draw()
    assert figure_step.OUT.read_text() == drawn, f"run python -m {figure_step.__name__}"
    assert ElementTree.fromstring(drawn).tag.endswith("svg")


@pytest.mark.parametrize(
    ("runs", "plots"),
    [
        (["speed"], ["speed"]),
        (["nodes"], ["tau-by-nodes", "step-time-by-nodes"]),
        ([f"batch-{size}" for size in (1, 2, 4, 8, 16, 32)], ["batch"]),
    ],
    ids=["speed", "nodes", "batch"],
)
def test_the_committed_plots_are_those_of_the_records(runs: list[str], plots: list[str], tmp_path: Path) -> None:
    write_plots(load_runs([RESULTS / run for run in runs]), tmp_path)
    for plot in plots:
        committed = ROOT / "docs" / "plots" / f"{plot}.svg"
        command = f"stree bench report {' '.join(runs)} --markdown --plots FOLDER, in {RESULTS}, and copy {plot}.svg"
        assert committed.read_text() == (tmp_path / f"{plot}.svg").read_text(), f"run {command}"


@pytest.mark.parametrize("document", ["README.md", "docs/results.md"])
def test_the_table_of_speeds_is_the_record(document: str) -> None:
    table = speed_table.speed_table()
    assert table in (ROOT / document).read_text(), f"put this into {document}:\n{table}"
