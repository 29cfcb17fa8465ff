"""The study of drafting ahead: of its two pairs, one reuses nearly all trees, and both have every figure of a table.

Run: python -m pytest tests/scripts/test_overlap.py -m slow
"""

from __future__ import annotations

import pytest

from benchmarks.studies.overlap import TITLES, cells, records

pytestmark = pytest.mark.slow


def test_greedy_trees_of_a_draft_model_that_agrees_are_reused() -> None:
    (record,) = records(texts=1, tokens=16)
    rows = record["rows"]
    assert len(rows) == 12 and all(len(cells(row)) == len(TITLES) for row in rows)
    greedy = {row["pair"]: row["reused"] for row in rows if row["temperature"] == 0 and row["growth"] == "chain:4"}
    assert greedy["12 layers, agreeing"] > 0.5 > greedy["bundled"]
