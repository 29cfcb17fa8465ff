"""The committed figures, and the table of README.md and docs/results.md, are those of the present records."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import ROOT
from benchmarks.studies import figure_step, speed_table
from stree.bench.report import load_runs, write_plots


def test_the_committed_step_is_what_its_script_draws() -> None:
    drawn = figure_step.draw()
    assert figure_step.OUT.read_text() == drawn, f"run python -m {figure_step.__name__}"
    assert ElementTree.fromstring(drawn).tag.endswith("svg")


def test_the_committed_plot_of_speeds_is_that_of_the_record(tmp_path: Path) -> None:
    (drawn,) = write_plots(load_runs([speed_table.RUN]), tmp_path)
    committed = ROOT / "docs" / "plots" / drawn.name
    command = "stree bench report benchmarks/results/speed --markdown --plots docs/plots"
    assert committed.read_text() == drawn.read_text(), f"run {command}"


@pytest.mark.parametrize("document", ["README.md", "docs/results.md"])
def test_the_table_of_speeds_is_the_record(document: str) -> None:
    table = speed_table.speed_table()
    assert table in (ROOT / document).read_text(), f"put this into {document}:\n{table}"
