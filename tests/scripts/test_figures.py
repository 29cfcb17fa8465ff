"""The committed figures are those that their scripts draw."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.studies import figure_speed, figure_step


@pytest.mark.parametrize("figure", [figure_step, figure_speed], ids=["step", "speed"])
def test_a_committed_figure_is_drawn_from_the_present_records(figure: object) -> None:
    drawn = figure.draw()  # type: ignore[attr-defined]
    assert figure.OUT.read_text() == drawn, f"run python -m {figure.__name__}"  # type: ignore[attr-defined]
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
