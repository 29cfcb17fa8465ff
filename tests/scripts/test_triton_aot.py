"""The Triton kernels compile without a GPU: no spills, and shared memory within the chip's limit.

The full table is benchmarks/results/aot/*.jsonl, made by benchmarks/aot_table.py; here, one build for each tile and its
switches.

Run: python -m pytest tests/test_triton_aot.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "aot"
pytest.importorskip("triton")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own: this one may have Triton in the interpreter's mode."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks")))}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def shapes() -> dict[str, list[str]]:
    """Give the models of every operation of the table."""
    listing = "{op: list(models) for op, (_, models) in aot_table.BUILDERS.items()}"
    done = run("-c", f"import json, aot_table; print(json.dumps({listing}))")
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_the_check_fails_on_spills_at_16_to_64_nodes_on_hopper_and_on_too_much_shared_memory() -> None:
    good = {"arch": "sm_90", "nodes": 64, "spill_bytes": 0, "shared_bytes": 232448}
    bad = [good | {"spill_bytes": 8}, good | {"spill_bytes": 8, "nodes": 16}, good | {"shared_bytes": 232449},
           good | {"arch": "sm_80"}]  # fmt: skip
    allowed = [good, good | {"spill_bytes": 8, "nodes": 128}]
    judged = "print(json.dumps([aot_table.is_bad(record) for record in json.loads(sys.argv[1])]))"
    done = run("-c", f"import json, sys, aot_table; {judged}", json.dumps(bad + allowed))
    assert done.returncode == 0 and json.loads(done.stdout) == [True] * 4 + [False] * 2, done.stderr


def test_every_tile_at_64_nodes_compiles_for_hopper_without_spills(shapes: dict[str, list[str]]) -> None:
    done = run("benchmarks/aot_table.py", "--arch", "90", "--nodes", "64", "--distinct", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert {record["op"] for record in records} == set(shapes)
    # A decay a head and a decay a channel have one tile but not one machine code.
    assert {record["model"] for record in records if record["op"] == "gated_delta_step"} == set(
        shapes["gated_delta_step"]
    )
    assert {record["dtype"] for record in records} == {"bfloat16", "float32"}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_committed_table_is_whole_and_within_the_limits(arch: str, shapes: dict[str, list[str]]) -> None:
    lines = (RESULTS / f"{arch}.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    launches = ((op, model) for op, models in shapes.items() for model in models)
    expected = {
        (*launch, n, dtype) for launch in launches for n in (1, 4, 16, 32, 64, 128) for dtype in ("bfloat16", "float32")
    }
    found = {(r["op"], r["model"], r["nodes"], r["dtype"]) for r in records}
    assert expected <= found and len(found) == len(records)
    limit = {"sm_80": 166912, "sm_90": 232448}[arch]
    assert all(r["arch"] == arch and r["shared_bytes"] <= limit for r in records)
    if arch == "sm_90":
        assert [r for r in records if 16 <= r["nodes"] <= 64 and r["spill_bytes"]] == []
