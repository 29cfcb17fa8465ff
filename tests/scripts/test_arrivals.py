"""Open load on a server: seeded arrivals, figures from times, and a small run.

Run: python -m pytest -m "slow or not slow" tests/scripts/test_arrivals.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.serving import arrivals
from stree.bench.records import ROOT


def test_arrival_times_are_seeded_and_of_the_rate() -> None:
    times = arrivals.arrival_times(4.0, 4000, 0)
    assert times == arrivals.arrival_times(4.0, 4000, 0) != arrivals.arrival_times(4.0, 4000, 1)
    gaps = np.diff(times)
    assert times[0] == 0 and (gaps > 0).all()
    assert gaps.mean() == pytest.approx(0.25, rel=0.1) and gaps.std() == pytest.approx(0.25, rel=0.1)


def test_figures_are_of_all_requests() -> None:
    plain = np.array([[0.1, 0.3, 0.2], [1.0, 2.0, 3.0]])
    row = arrivals.figures(plain, 7.0, 10)
    assert row["tokens_per_s"] == pytest.approx(30 / 7) and row["ttft_median_s"] == pytest.approx(0.2)
    assert row["ttft_p99_s"] == pytest.approx(0.298) and row["latency_median_s"] == pytest.approx(0.2)
    ratios = arrivals.ratios(arrivals.figures(plain / 2, 6.0, 10), row, plain / 2, plain)
    assert ratios["tokens_per_s"] == pytest.approx(7 / 6) and ratios["ttft_p99_s"] == pytest.approx(0.5)
    assert ratios["ttft_median_s"][0] == ratios["latency_median_s"][0] == pytest.approx(0.5)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_small_run_appends_a_row_a_rate_and_budget(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "arrivals.jsonl"
    options = ["--rates", "8,16", "--requests", "3", "--tokens", "8", "--rounds", "2", "--budgets", "auto", "--out"]
    command = [sys.executable, "-m", "benchmarks.serving.arrivals", *options, str(out)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, stdout=subprocess.DEVNULL)
    (record,) = map(json.loads, out.read_text().splitlines())
    assert [(row["rate"], row["budget"]) for row in record["rows"]] == [
        (8, "plain"), (8, "auto"), (16, "plain"), (16, "auto")
    ]  # fmt: skip
    for row in record["rows"]:
        assert 0 < row["ttft_median_s"] <= row["ttft_p99_s"] and 0 < row["latency_median_s"] < 60
        assert row["over_plain"]["latency_median_s"][0] > 0
