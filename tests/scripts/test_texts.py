"""Texts of the CPU that a GPU's are compared with: the same ones pass, another one fails with its place.

Run: python -m pytest tests/scripts/test_texts.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import facts, texts
from stree.bench.records import read_lines


@pytest.mark.slow
def test_texts_pass_where_they_are_equal_and_fail_at_the_place_of_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "texts.json"
    monkeypatch.setattr(sys, "argv", ["texts", "--smoke", "--write", str(file)])
    assert texts.main() == 0
    arguments = ["texts", "--smoke", "--expected", str(file), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert texts.main() == 0
    expected = json.loads(file.read_text(encoding="utf-8"))
    first, other = expected["texts"]
    expected["texts"][first][1][-1] += 1
    file.write_text(json.dumps(expected), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [*arguments, "--first", "0"])
    assert texts.main() == 1
    records = read_lines(tmp_path / "gpu_texts.jsonl")[-2:]
    assert [(record["text"], record["outcome"]) for record in records] == [(first, "failed"), (other, "passed")]
    assert records[0]["replayed"] == [1, len(expected["texts"][first][1]) - 1] and records[1]["replayed"] is None
    monkeypatch.setattr(sys, "argv", ["texts", "--smoke"])
    with pytest.raises(SystemExit):
        texts.main()


def test_facts_are_measured_at_tiny_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["facts", "--smoke", "--out", str(tmp_path)])
    assert facts.main() == 0
    records = {record["fact"]: record for record in read_lines(tmp_path / "gpu_facts.jsonl")}
    assert records["copy"]["gb_per_s"] > 0 and records["product, bfloat16"]["tflops"] > 0
    assert records.keys() >= facts.PROJECTIONS.keys()
    assert all(records[name]["over_one_row"]["1"] == 1 for name in facts.PROJECTIONS)
