"""The cost table: what is measured can be saved, read without the bench package, and interpolated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_pairs import tiny_pair

from stree.bench import steps
from stree.bench.baselines import SnapshotLM, UnrolledLM
from stree.bench.measure_cost import Points, measure_cost
from stree.bench.steps import measure_steps
from stree.cost import CostTable, default_path

# ms = 2 batch + context / 100 + nodes, which is linear along every axis.
POINTS = [(b, c, n, 2 * b + c / 100 + n) for b in (1, 4) for c in (100, 300) for n in (1, 3, 11)]
DRAFT = [(1, 100, w, w / 2 + 1) for w in (1, 5)]


def table() -> CostTable:
    return CostTable("t", "d", "cpu", "float32", 2, POINTS, DRAFT, {"torch": "2"})


@pytest.mark.parametrize(("nodes", "batch", "context"), [(1, 1, 100), (11, 4, 300), (7, 3, 170), (64, 8, 1000)])
def test_times_are_interpolated_and_go_on_beyond_the_grid(nodes: int, batch: int, context: int) -> None:
    assert table().target_step(nodes, batch, context) == pytest.approx(2 * batch + context / 100 + nodes)


def test_below_the_grid_the_smallest_is_taken() -> None:
    assert table().target_step(1, 1, 0) == pytest.approx(4.0)
    assert table().draft_call(3, 7, 9) == pytest.approx(2.5)  # an axis of one value is constant


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    table().save(tmp_path / "deep" / "cost.json")
    found = CostTable.load(tmp_path / "deep" / "cost.json")
    assert (list(found.target_ms), list(found.draft_ms)) == (POINTS, DRAFT)
    assert (found.target, found.drafter, found.threads, found.env) == ("t", "d", 2, {"torch": "2"})
    found.check("t", "d", "cpu", "float32", 2)


def test_the_reader_needs_no_bench_package() -> None:
    code = "import sys, stree.cost; assert not any(m.startswith('stree.bench') or m == 'torch' for m in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "x"}, "measured for target 't', not 'x'; measure anew with stree bench cost"),
        ({"dtype": "bfloat16"}, "measured for dtype 'float32', not 'bfloat16'"),
        ({"threads": 1}, "measured for threads 2, not 1"),
    ],
)
def test_a_table_of_another_pair_or_machine_is_refused(change: dict[str, object], message: str) -> None:
    asked = {"target": "t", "drafter": "d", "device": "cpu", "dtype": "float32", "threads": 2} | change
    with pytest.raises(ValueError, match=message):
        table().check(*asked.values())  # type: ignore[arg-type]


def test_bad_tables_are_refused() -> None:
    with pytest.raises(ValueError, match=r"target_ms must be a full grid: 11 points do not fill \(2, 2, 3\)"):
        CostTable("t", None, "cpu", "float32", 2, POINTS[1:])
    with pytest.raises(ValueError, match="every time of target_ms must be positive, got 0"):
        CostTable("t", None, "cpu", "float32", 2, [(1, 1, 1, 0.0)])
    with pytest.raises(ValueError, match="cost table of 't' was measured without a drafter"):
        CostTable("t", None, "cpu", "float32", 2, POINTS).draft_call(1)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    with pytest.raises(ValueError, match="there is no cost table at .*; measure one with stree bench cost"):
        CostTable.load(path)
    for text in ("{", "[]", '{"schema": 1}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"cost\.json is no cost table"):
            CostTable.load(path)
    table().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 99}))
    with pytest.raises(ValueError, match="has schema 99, this version reads 1; measure anew"):
        CostTable.load(path)


def test_the_cache_has_a_file_for_every_pair_and_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths = {default_path("t", d, "cpu", "float32", n) for d in ("a", None) for n in (1, 2)}
    assert len(paths) == 4 and all(path.parent == tmp_path / "stree" for path in paths)


def test_every_point_is_measured() -> None:
    calls: list[None] = []
    points = Points((1, 5), (1, 3), (1, 2), (7,))
    found = measure_cost(tiny_pair(), points, 1, lambda: calls.append(None))
    assert [point[:3] for point in found.target_ms] == [(1, 7, 1), (1, 7, 5), (2, 7, 1), (2, 7, 5)]
    assert [point[:3] for point in found.draft_ms] == [(1, 7, 1), (1, 7, 3), (2, 7, 1), (2, 7, 3)]
    assert len(calls) == 8 and found.target_step(3, 2, 7) > 0 and found.draft_call(2) > 0
    assert (found.target, found.drafter, found.dtype) == ("tiny", "tiny-drafter", "float64")
    assert measure_cost(tiny_pair(drafter=False), points, 1, lambda: None).draft_ms == []


def test_a_context_beyond_the_positions_of_a_model_is_refused_before_anything_is_measured() -> None:
    pair = tiny_pair("bamba", drafter=False)
    calls: list[None] = []
    most = pair.target.max_length
    assert most is not None
    points = Points((1,), (1,), (1,), (7, most - 6))  # three steps commit two tokens each, behind them stands a root
    with pytest.raises(ValueError, match=f"a context of {most - 6} takes {most + 1} positions; a model has {most}"):
        measure_cost(pair, points, 1, lambda: calls.append(None))
    assert not calls


def test_step_costs_cover_all_engines_and_the_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tiny_pair("bamba")
    found = measure_steps(pair, list(range(5, 15)), [6], 1, {"bench": "run"})
    timed = {r["provider"]: r["p50"] for r in found if r["metric"] == "step_latency"}
    assert timed.keys() == {"tree", "unrolled", "snapshot"} and min(timed.values()) > 0
    sizes = {r["provider"]: r["value"] for r in found if r["metric"] == "state_bytes"}
    (known,) = [r for r in found if r["metric"] == "sizes"]
    assert sizes["tree"] == known["state"] + 6 * known["stash_per_node"] == known["replay_chain"]
    assert sizes["snapshot"] == 7 * known["state"] + known["stash_per_node"]
    # A binary tree of six nodes has three leaves; the longest path has three nodes.
    assert sizes["unrolled"] == 4 * known["state"] + 9 * known["stash_per_node"]
    real = SnapshotLM.verify
    monkeypatch.setattr(SnapshotLM, "verify", lambda *a: torch.roll(real(*a), 1, 1))
    found = measure_steps(pair, list(range(5, 15)), [6], 1, {"bench": "run"})
    (failed,) = [r for r in found if r.get("status") == "failed"]
    assert failed["provider"] == "snapshot" and failed["relative_error"] > 0.01
    assert "snapshot" not in {r["provider"] for r in found if r["metric"] == "state_bytes"}


@pytest.mark.parametrize(("engine", "name"), [(UnrolledLM, "unrolled"), (SnapshotLM, "snapshot")])
@pytest.mark.parametrize("error", [1e-6, float("nan")])
def test_every_engine_is_held_to_the_bar_of_its_dtype(
    error: float, engine: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engine.verify
    monkeypatch.setattr(engine, "verify", lambda *a: real(*a) * (1 + error))
    found = measure_steps(tiny_pair("bamba"), list(range(5, 15)), [3], 1, {})  # in float64
    (failed,) = [r for r in found if r.get("status") == "failed"]
    assert failed["provider"] == name and failed["relative_error"] == pytest.approx(error, rel=1e-2, nan_ok=True)


def test_engines_take_turns_in_going_first_and_their_times_are_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def half_a_second(self: Any, tree: Any) -> float:
        order.append(type(self.lm).__name__)
        return 0.5

    monkeypatch.setattr(steps._Engine, "seconds", half_a_second)
    found = measure_steps(tiny_pair("bamba"), list(range(5, 15)), [3], 1, {})
    assert [r["p50"] for r in found if r["metric"] == "step_latency"] == [500.0] * 3
    one, two, three = "TreeLM", "UnrolledLM", "SnapshotLM"
    assert order == [one, two, three, two, three, one, three, one, two]


@pytest.mark.parametrize(("nodes", "length"), [(2, 2), (20, 4)])
def test_there_is_room_for_all_rounds_of_at_most_four_nodes(nodes: int, length: int) -> None:
    pair = tiny_pair("bamba")
    engine = steps._Engine("tree", pair, list(range(5, 15)), nodes, rounds=9)
    tree = steps.binary_tree(nodes, pair.target.vocab_size, pair.target.device)
    for step in range(9 + steps.WARM_UP + 1):
        assert int(engine.state.lengths) == 10 + length * step
        engine.step(tree)
