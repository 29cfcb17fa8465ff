"""What the sanitizer's bench makes of what the tool says; and what it lets the tool watch runs without a GPU.

Run: python -m pytest tests/scripts/test_sanitizer.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import cases
from benchmarks.gpu import sanitizer as gpu_sanitizer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a tool on the PATH that says some lines and ends with a status."""

    def make(said: str, status: int) -> None:
        decode_step = tmp_path / "compute-sanitizer"
        decode_step.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\ncat <<'END'\n{said}\nEND\nexit {status}\n")
        decode_step.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


@pytest.mark.parametrize(
    ("said", "status", "errors"),
    [
        ('{"launched": 7}\n========= ERROR SUMMARY: 0 errors', 0, 0),
        ('{"launched": 7}\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)', 0, 0),
        ("========= Invalid __global__ write of size 4 bytes\n========= ERROR SUMMARY: 12 errors", 9, 12),
        ("Traceback\nKeyError\n========= ERROR SUMMARY: 0 errors", 1, None),  # what it watched has failed
        ("killed", 137, None),
    ],
)
def test_errors_are_what_the_tool_counted_in_all_of_what_it_watched(
    said: str, status: int, errors: int | None, tool: Any, tmp_path: Path
) -> None:
    tool(said, status)
    record = gpu_sanitizer.watched("memcheck", 60.0)
    assert record["errors"] == errors and record["exit"] == status and "unavailable" not in record
    assert record["said"] and record["said"][-1] == said.splitlines()[-1]
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("--tool memcheck --error-exitcode 9") and asked.rstrip().endswith(
        "-m benchmarks.gpu.sanitizer --launch"
    )


def test_a_machine_that_refuses_the_tool_is_no_failure(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool("========= Error: Device not supported. Please refer to the list\n========= ERROR SUMMARY: 1 error", 1)
    assert gpu_sanitizer.watched("memcheck", 60.0)["unavailable"].startswith("Error: Device not supported")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    record = gpu_sanitizer.watched("memcheck", 60.0)
    assert record["unavailable"] == "compute-sanitizer is not on the PATH" and record["errors"] is None


@pytest.mark.slow
def test_every_operation_and_whole_texts_are_launched() -> None:
    script = (
        "from benchmarks.gpu import sanitizer; import torch; sanitizer.SIZES = [(2, 5)]; "
        "print(sanitizer.launch(torch.device('cpu')))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    num_cases = sum(len(shapes) for _, shapes in cases.SMALL)
    assert int(done.stdout) == 2 * num_cases + 8
