"""The GPU suite runs without a GPU at tiny sizes, and times nothing that is wrong.

Run: python -m pytest tests/scripts/test_suite.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import suite as gpu_suite
from benchmarks.gpu.case import Inputs, Size
from benchmarks.gpu.recurrences import ssd_case
from benchmarks.gpu.run import Run
from benchmarks.shapes import Mixer

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.mark.slow
def test_the_suite_runs_every_kernel_at_tiny_sizes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.suite", "--smoke", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "gpu_suite.jsonl").read_text(encoding="utf-8").splitlines()]
    timed = {(record["bench"], record["provider"]) for record in records if "p50" in record}
    steps = [f"{op}_step" for op in ("ssd", "conv", "gated_delta", "selective", "diagonal", "attention")]
    launches = [*steps, "gated_rms_norm", "rms_norm_add", "rms_norm", "kv_commit", "match_accept"]
    launches += ["rotary", "gated_activation", "delta_inputs", "experts"]
    expected = {(op, name) for op in launches for name in ("triton", "reference")}
    assert timed == expected
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["measured"] == sum("p50" in record for record in records) and last["records"] == len(records)


def test_a_provider_that_is_wrong_or_fails_is_reported_and_not_timed() -> None:
    run = Run(CPU, 1.0, None)
    case = ssd_case(Mixer(2, 16, 16, 1), Size("tiny", 1, 3, torch.float32, CPU))
    right = case.providers["reference"]

    def failing(inputs: Inputs) -> torch.Tensor:
        raise MemoryError("no room")

    providers = {"reference": right, "wrong": lambda inputs: right(inputs) * 1.001, "failing": failing}
    gpu_suite.run_case(run, replace(case, providers=providers), torch.float32)
    found = {record["provider"]: record for record in run.records}
    assert found["reference"]["correct"] and "p50" in found["reference"]
    assert not found["wrong"]["correct"] and "p50" not in found["wrong"]
    assert not found["failing"]["correct"] and found["failing"]["problem"] == "MemoryError: no room"
    assert run.failures == 2


def test_the_suite_stops_when_its_time_is_up() -> None:
    run = Run(CPU, -1.0, None)
    gpu_suite.run_kernels(run, argparse.Namespace(smoke=True, share=None, kinds=gpu_suite.KINDS))
    assert [record["bench"] for record in run.records] == ["unfinished"]
    assert run.records[0]["case"].startswith("ssd ")


def test_a_part_that_fails_is_a_record_and_the_run_ends_with_status_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(CPU, 1.0, tmp_path / "records.jsonl")
    with run.part(bench="kernels", adds=False):
        raise RuntimeError("the device is dead")
    with run.part(bench="kernels", adds=False):
        pass
    with run.part(bench="steps") as record:
        record |= {"p50": 1.0}
    assert run.report(["title"], [["row"]]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"records": 2, "failures": 1}
    found = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(record["bench"], record.get("problem")) for record in found] == [
        ("kernels", "RuntimeError: the device is dead"), ("steps", None)
    ]  # fmt: skip
