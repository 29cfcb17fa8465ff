"""The bars of the GPU are read off the right records, on the right side, by whole intervals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import bars as gpu_bars


def step(model: str = "mamba2-2.7b", provider: str = "graph", n: int = 1, **changes: Any) -> dict[str, Any]:
    params = {"model": model, "batch": 1, "context": 256, "n": n} | changes.pop("params", {})
    return {"bench": "step", "provider": provider, "params": params, "p50": 100.0} | changes


def kernel(provider: str, p50: float, op: str = "gated_delta_step", n: int = 32) -> dict[str, Any]:
    params = {"model": "m", "batch": 4, "n": n}
    return {"bench": op, "provider": provider, "params": params, "p50": p50, "correct": True}


def loop(**shares: float) -> dict[str, Any]:
    params = {"model": "Nemotron-H-8B", "batch": 8, "temperature": 0.8, "budget": 64, "growth": "Calibrated"}
    return {"bench": "loop", "params": params, "replayed": {"idle": 0.0, "outside_forwards": 0.0} | shares}


def rows(*records: dict[str, Any]) -> list[list[str]]:
    """Give what, limit, where, figure and verdict of what was measured."""
    found = [[*row] for row in gpu_bars.rows(records)]
    assert {row[0] for row in found} == {bar.what for bar in gpu_bars.BARS}, "no bar is left out"
    return [row for row in found if row[-1] != "not measured"]


MET: list[tuple[list[dict[str, Any]], list[tuple[str, str]]]] = [
    ([step(), step(n=16, p50=115.0)], [("verify of 16 nodes / one-token step", "met")]),
    ([step(), step(n=64, p50=140.0)], [("verify of 64 nodes / one-token step", "missed")]),
    ([step(n=64, p50=140.0)], []),
    ([step(n=1, params={"batch": 8}), step(n=64, p50=140.0, params={"batch": 8})], []),
    ([{"bench": "test", "outcome": "passed"}, {"bench": "text", "outcome": "passed"}],
     [("what failed", "met"), ("what failed", "met")]),
    ([{"bench": "test", "outcome": "failed"}], [("what failed", "missed")]),
    ([{"bench": "fault", "fault": "timed out, 60 s"}], [("what failed", "missed")]),
    ([step(), step(provider="mamba_ssm", p50=99.0)], [("our one-token step / mamba-ssm's", "missed")]),
    ([kernel("triton", 3.0), kernel("sglang", 9.0)],
     [("what failed", "met"), ("gated delta tree kernel / sequential snapshots, 32 nodes", "met")]),
    ([loop(outside_forwards=0.04, idle=0.04)],
     [("a step outside the models' forwards", "met"), ("device idle between steps", "missed")]),
    ([kernel("triton", 3.0), kernel("sglang", 9.0) | {"correct": False}],
     [("what failed", "missed"), ("gated delta tree kernel / sequential snapshots, 32 nodes", "met")]),
]  # fmt: skip


@pytest.mark.parametrize(("records", "verdicts"), MET)
def test_a_bar_is_met_on_its_side_of_the_limit(records: list[dict[str, Any]], verdicts: list[tuple[str, str]]) -> None:
    assert [(row[0], row[-1]) for row in rows(*records)] == verdicts


def test_a_line_names_its_place() -> None:
    assert rows(loop())[0][1:4] == ["<= 0.05", "Nemotron-H-8B, batch 8, Calibrated 64, T 0.8", "0.000"]
    assert rows(step(), step(n=16))[0][2] == "mamba2-2.7b, batch 1, context 256"


def test_the_command_reads_what_the_others_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    h100, h200 = ({"env": {"device": f"NVIDIA {card}"}} for card in ("H100", "H200"))
    records = step(of_bound=0.8) | h100, loop() | h100, step(n=16) | h200
    for number, record in enumerate(records):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["bars", str(tmp_path)])
    assert gpu_bars.main() == 0
    first, second = capsys.readouterr().out.split("NVIDIA H200")
    assert first.startswith("NVIDIA H100") and first.count("| met |") == 3
    assert "| met |" not in second, "its step of one node is another card's"
    monkeypatch.setattr(sys, "argv", ["bars", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit):
        gpu_bars.main()
    assert "there is no folder" in capsys.readouterr().err
