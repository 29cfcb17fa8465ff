"""The bench of whole steps at large shapes runs at tiny sizes without a GPU; what fails is a record.

Run: python -m pytest tests/scripts/test_loops.py
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.cuda_graph_tape import TapeRecorder
from helpers.on_device import treat_as_on_device

from benchmarks.gpu import loops
from benchmarks.gpu import steps as gpu_steps
from stree.bench.profile import Shape
from stree.bench.records import read
from stree.decode import step_cache as step_cache
from stree.growth import Chain

CPU = torch.device("cpu")


def options(**changes: Any) -> Any:
    cases = [(1, 0.0, loops.SIZES[0]), (2, 0.8, loops.SIZES[1])]
    return SimpleNamespace(**{"smoke": True, "models": None, "context": 8, "new_tokens": 6, "cases": cases} | changes)


def measured(**changes: Any) -> list[Any]:
    return list(loops.measure(CPU, options(**changes), time.monotonic() + 600))


@pytest.mark.slow
def test_the_bench_runs_at_tiny_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["loops.py", "--smoke", "--out", str(tmp_path)])
    assert loops.main() == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"bench": "gpu_loops", "records": 2, "failures": 0}
    found = read(tmp_path / "gpu_loops.jsonl")
    assert [record["params"]["growth"] for record in found] == ["plain", "Calibrated"]
    for record in found:
        assert record["params"]["model"] == "tiny-mamba2" and record["params"]["drafter"] == "tiny-drafter"
        assert record["bench"] == "loop" and record["step_ms"] > 0 and record["replayed"] is None


@pytest.mark.slow
def test_where_steps_are_captured_what_is_no_forward_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_size_or_a_model_that_fails_is_a_record_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(1, 0.0, (None, 0)), *options().cases[:1]]
    failed, found = measured(cases=cases)
    assert "budget" in failed["problem"] and failed["params"]["budget"] == 0 and found["step_ms"] > 0
    monkeypatch.setattr(gpu_steps, "model_of", lambda *_: 1 / 0)
    (failed,) = measured()
    assert failed["problem"].startswith("ZeroDivisionError") and failed["params"]["model"] == "tiny-mamba2"


def test_when_the_time_is_up_no_other_size_begins() -> None:
    assert [record["is_unfinished"] for record in loops.measure(CPU, options(), 0.0)] == [True]


def test_kernels_are_summed_by_step_or_their_lack_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = SimpleNamespace(
        target=gpu_steps.model_of(gpu_steps.configurations(True)["tiny-mamba2"], CPU),
        drafter=gpu_steps.model_of(gpu_steps.configurations(True)["tiny-drafter"], CPU),
    )
    shape: Any = Shape(Chain(2), 3, 1, 8, 6, 0.0)

    class Profiler:
        def __init__(self, **_: Any) -> None:
            pass

        def __enter__(self) -> Profiler:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def key_averages(self) -> list[Any]:
            return [SimpleNamespace(key=f"k{i}", self_device_time_total=1e3 * i) for i in range(1, 60)]

    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    found = loops.by_kernel(pair, shape)  # type: ignore[arg-type]
    ratio = found["kernels"]["k58"] / found["kernels"]["k29"]
    assert 1.5 < 59 / found["kernels"]["k59"] <= 5, "steps of a text of six tokens"
    assert len(found["kernels"]) == loops.NUM_KERNELS and next(iter(found["kernels"])) == "k59"
    assert ratio == pytest.approx(2) and found["kernels_ms"] == pytest.approx(found["kernels"]["k59"] * 30)
    monkeypatch.setattr(Profiler, "__enter__", lambda self: 1 / 0)
    assert loops.by_kernel(pair, shape)["kernels"].startswith("ZeroDivisionError")  # type: ignore[arg-type]
