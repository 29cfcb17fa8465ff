"""The study of denoising steps measures a drafter once for each number of steps.

Run: python -m pytest tests/scripts/test_denoising.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.tiny_models import tiny_model

import stree
from benchmarks.studies.denoising import TITLES, cells, drafters_of, measure
from stree.distill.heads import new_head


@pytest.mark.slow
def test_a_row_has_the_draft_calls_of_its_steps(tmp_path: Path) -> None:
    lm = stree.TreeLM(tiny_model("mamba2").float())
    new_head(lm, "diffusion", 0).save(tmp_path)
    drafters = drafters_of("diffusion", str(tmp_path), [1, 2], lm)
    assert [*drafters] == ["diffusion, 1 step", "diffusion, 2 steps"]
    for calls, (label, drafter) in enumerate(drafters.items(), 1):
        row = {"drafter": label, **measure(lm, drafter, "calibrated:16", [[1, 2, 3], [4], [5, 6]], 4)}
        assert row["draft_calls"] == calls and row["method"] == "calibrated:16x8"
        assert all(value[0] >= 1 for value in row["tau"].values())
        assert len(cells(row)) == len(TITLES)
