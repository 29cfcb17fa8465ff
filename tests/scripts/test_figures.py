"""The committed figures, and the table of README.md and docs/results.md, are those of the present records."""

from __future__ import annotations

from types import ModuleType
from xml.etree import ElementTree

import pytest

from benchmarks import ROOT
from benchmarks.studies import figure_speed, figure_step


@pytest.mark.parametrize("figure", [figure_step, figure_speed], ids=["step", "speed"])
def test_a_committed_figure_is_what_its_script_draws(figure: ModuleType) -> None:
    drawn = figure.draw()
    assert figure.OUT.read_text() == drawn, f"run python -m {figure.__name__}"
    assert ElementTree.fromstring(drawn).tag.endswith("svg")


@pytest.mark.parametrize("document", ["README.md", "docs/results.md"])
def test_the_table_of_speeds_is_the_record(document: str) -> None:
    table = figure_speed.speed_table()
    assert table in (ROOT / document).read_text(), f"put this into {document}:\n{table}"
