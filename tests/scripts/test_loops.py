"""The bench of whole steps at large shapes runs at tiny sizes without a GPU; what fails is a record.

Run: python -m pytest tests/scripts/test_loops.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.captured import TapeRecorder
from helpers.on_device import treat_as_on_device

from benchmarks.gpu import loops
from benchmarks.gpu import models as gpu_models
from benchmarks.gpu.run import Run
from stree.bench.records import read
from stree.decode import step_cache as step_cache

CPU = torch.device("cpu")


def options(**changes: Any) -> Any:
    cases = [(1, 0.0, loops.SIZES[0]), (2, 0.8, loops.SIZES[1])]
    return SimpleNamespace(**{"smoke": True, "models": None, "context": 8, "new_tokens": 6, "cases": cases} | changes)


def measured(**changes: Any) -> list[Any]:
    run = Run(CPU, 10.0, None)
    loops.measure(run, options(**changes))
    return run.records


@pytest.mark.slow
def test_the_bench_runs_at_tiny_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["loops.py", "--smoke", "--out", str(tmp_path)])
    assert loops.main() == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"records": 2, "failures": 0}
    found = read(tmp_path / "gpu_loops.jsonl")
    assert [record["params"]["growth"] for record in found] == ["plain", "Calibrated"]
    for record in found:
        assert record["params"]["model"] == "tiny-mamba2" and record["params"]["drafter"] == "tiny-drafter"
        assert record["bench"] == "loop" and record["step_ms"] > 0 and record["replayed"] is None


@pytest.mark.slow
def test_where_steps_are_captured_what_is_no_forward_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREE_DEBUG")  # the same logits answer every step, so none may be poisoned
    treat_as_on_device(monkeypatch)
    monkeypatch.setattr(step_cache, "_can_capture", lambda lm: lm.captures_steps is not False)
    monkeypatch.setattr(step_cache, "CudaRecorder", lambda device: TapeRecorder())
    (record,) = measured(cases=options().cases[1:])
    assert record["params"] == {
        "model": "tiny-mamba2", "drafter": "tiny-drafter", "batch": 2, "context": 8, "temperature": 0.8, "budget": 5,
        "growth": "Chain",
    }  # fmt: skip
    assert record["replayed"]["outside_forwards"] > 0 and record["replayed"]["replays"] > 0
    assert [row[-1] for row in loops.rows([record])] == [f"{record['replayed']['outside_forwards']:.1%}"]


@pytest.mark.slow
def test_a_size_or_a_model_that_fails_is_a_record_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(1, 0.0, (None, 0)), *options().cases[:1]]
    failed, found = measured(cases=cases)
    assert "budget" in failed["problem"] and failed["params"]["budget"] == 0 and found["step_ms"] > 0
    monkeypatch.setattr(gpu_models, "model_of", lambda *_: 1 / 0)
    failed, _ = measured()
    assert failed["problem"].startswith("ZeroDivisionError") and failed["params"]["model"] == "tiny-mamba2"


def test_when_the_time_is_up_no_other_size_begins() -> None:
    run = Run(CPU, -1.0, None)
    loops.measure(run, options())
    assert [record["bench"] for record in run.records] == ["unfinished"]
