"""Composite speeds follow from their two measurements, and the end-to-end bench runs at tiny sizes without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.composite import StepTimes, composite_rows, pooled

ROOT = Path(__file__).resolve().parents[2]
TARGET, DRAFT = StepTimes((1, 4, 16), (0.010, 0.011, 0.015)), StepTimes((1, 8), (0.001, 0.0017))


def block(name: str, batch: int, *, steps: int, nodes: int, calls: int, p50: float = 100.0, **changes: Any) -> Any:
    params = {"suite": "s", "batch": batch, "turn": 0, "temperature": 0.0, "prompts": [batch]}
    drafter = "none" if name == "plain" else "suffix" if name.startswith("suffix") else "model"
    counts = {"steps": steps, "verified": steps * nodes, "draft_calls": steps * calls, "tau": 40 / steps}
    timed = {"metric": "tokens_per_s", "provider": name, "p50": p50, "prefill_s": 0.1, "lossless": True}
    return {"params": params | {"drafter": drafter}, "reached": [steps], **counts, **timed, **changes}


def records() -> list[Any]:
    found = []
    for batch in range(4):
        found += [
            block("plain", batch, steps=40, nodes=1, calls=0),
            block("chain:3", batch, steps=20 + batch, nodes=4, calls=3),
            block("chain:7", batch, steps=19 + batch, nodes=8, calls=7),
            block("static:2,2", batch, steps=10 + batch, nodes=7, calls=2),
            block("auto", batch, steps=10, nodes=4, calls=2),
            block("suffix:16", batch, steps=5, nodes=16, calls=0),
        ]
    return found


def test_composite_rows_have_the_best_chain_and_the_best_tree_and_nothing_that_followed_a_clock() -> None:
    methods = pooled(records(), 0.0)
    overheads = dict.fromkeys(methods, 0.0)
    rows = {row["method"]: row for row in composite_rows(methods, overheads, TARGET, DRAFT)}
    assert set(rows) == {"plain", "chain:3", "chain:7", "static:2,2"}
    assert [name for name, row in rows.items() if row["is_best"]] == ["chain:3", "static:2,2"]
    tree, chain = rows["static:2,2"], rows["chain:3"]
    steps = {"tree": 10 + 11 + 12 + 13, "chain": 20 + 21 + 22 + 23}
    each = {"tree": 0.012 + 2 * 0.0012, "chain": 0.011 + 3 * 0.001}
    seconds = {name: steps[name] * each[name] for name in steps}
    assert tree["chain"] == "chain:3" and "over_chain" not in chain
    assert tree["over_chain"][0] == pytest.approx(seconds["chain"] / seconds["tree"])
    assert tree["over_plain"][0] == pytest.approx(4 * 0.4 / seconds["tree"])
    assert tree["over_chain"][1] < tree["over_chain"][0] < tree["over_chain"][2]
    assert tree["step_ms"] == pytest.approx(1e3 * each["tree"]) and tree["tau"][0] == pytest.approx(160 / steps["tree"])
    slower = {row["method"]: row for row in composite_rows(methods, {**overheads, "static:2,2": 0.1}, TARGET, DRAFT)}
    assert slower["static:2,2"]["over_chain"][0] < 1 < tree["over_chain"][0]
    assert slower["static:2,2"]["outside_forwards"] == pytest.approx(0.1 / (0.1 + each["tree"]))


def test_a_method_that_is_wrong_or_lacks_a_prompt_is_left_out() -> None:
    found = records()
    for record in found:
        if record["provider"] == "chain:7" and record["params"]["batch"] == 2:
            record["lossless"] = False
    found = [r for r in found if (r["provider"], r["params"]["batch"]) != ("static:2,2", 3)]
    assert set(pooled(found, 0.0)) == {"plain", "chain:3", "auto", "suffix:16"}
    assert pooled(found, 1.0) == {}


@pytest.mark.slow
def test_the_bench_runs_at_tiny_sizes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.end_to_end", "--smoke", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    written = (tmp_path / "end_to_end.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in written] == rows
    real = [row for row in rows if row["part"] == "a"]
    assert {(row["params"]["batch"], row["params"]["temperature"]) for row in real} == {(1, 1.0), (2, 1.0)}
    assert {row["method"] for row in real} == {"plain", "chain:2", "static:2,1", "auto"}
    assert all(row["over_plain"][0] == 1 for row in real if row["method"] == "plain")
    rest = [row for row in rows if row["part"] == "b"]
    assert {row["params"]["target"] for row in rest} == {"tiny-mamba2"} and all(r["label"] == "composite" for r in rest)
    assert {row["method"] for row in rest} == {"plain", "chain:2", "static:2,1"}
