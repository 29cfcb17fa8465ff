"""The Triton kernels compile without a GPU: no spills, and shared memory within the chip's limit.

Run: python -m pytest tests/scripts/test_ahead_of_time.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "aot"
pytest.importorskip("triton")


def run(*arguments: str) -> str:
    """Run Python in a process of its own: this one may have Triton in the interpreter's mode."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_check_fails_on_spills_at_16_to_64_nodes_on_hopper_and_on_too_much_shared_memory() -> None:
    good = {"arch": "sm_90", "nodes": 64, "spill_bytes": 0, "shared_bytes": 232448}
    bad = [good | {"spill_bytes": 8}, good | {"spill_bytes": 8, "nodes": 16}, good | {"shared_bytes": 232449},
           good | {"arch": "sm_80"}]  # fmt: skip
    allowed = [good, good | {"spill_bytes": 8, "nodes": 128}]
    judge = "from benchmarks.ahead_of_time.table import is_bad; import json, sys; "
    judge += "print(json.dumps([is_bad(record) for record in json.loads(sys.argv[1])]))"
    assert json.loads(run("-c", judge, json.dumps(bad + allowed))) == [True] * 4 + [False] * 2


@pytest.mark.slow
def test_every_kernel_is_in_the_table_at_every_size() -> None:
    listing = "from benchmarks.ahead_of_time.table import builds; import json, torch; "
    listing += "print(json.dumps([names for names, _ in builds((1, 64), [torch.bfloat16])]))"
    found = json.loads(run("-c", listing))
    sources = [path.read_text("utf-8") for path in (ROOT / "kernels").rglob("*.py")]
    kernels = {name for text in sources for name in re.findall(r"^def (\w+_kernel)\($", text, re.M)}
    assert kernels <= {names["kernel"] for names in found}
    models = {(names["kernel"], names["model"]) for names in found if names["nodes"] == 64}
    assert {("ssd_kernel", "Zamba2-7B"), ("gated_delta_kernel", "Kimi-Linear-48B")} <= models
    assert {("probs_kernel", f"vocabulary of {size}") for size in (50257, 151936)} <= models


@pytest.mark.slow
def test_every_tile_at_64_nodes_compiles_for_hopper_without_spills() -> None:
    table = ("-m", "benchmarks.ahead_of_time.table", "--arch", "90", "--nodes", "64", "--distinct", "--check")
    records = [json.loads(line) for line in run(*table).splitlines()]
    assert {record["dtype"] for record in records} == {"bfloat16", "float32"}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_committed_table_is_within_the_limits(arch: str) -> None:
    records = [json.loads(line) for line in (RESULTS / f"{arch}.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {r["nodes"] for r in records} == {1, 4, 16, 32, 64, 128}
    limit = {"sm_80": 166912, "sm_90": 232448}[arch]
    assert all(r["arch"] == arch and r["shared_bytes"] <= limit for r in records)
    if arch == "sm_90":
        assert [r for r in records if 16 <= r["nodes"] <= 64 and r["spill_bytes"]] == []
