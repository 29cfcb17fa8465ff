"""The script that retunes the table of tiles runs without a GPU at tiny sizes, and never chooses a wrong tile.

Run: TRITON_INTERPRET=1 python -m pytest tests/scripts/test_retune_tiles.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu import cases, retune_tiles
from benchmarks.gpu.case import Case, Inputs, Size
from benchmarks.gpu.recurrences import conv_case, ssd_case
from benchmarks.shapes import Mixer
from stree.kernels import tiles

TINY = Mixer(1, 16, 16, 1)
CPU = torch.device("cpu")

INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the script times it")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> retune_tiles.Watched:
    """Put a table that can be told other entries in the place of that of SSD."""
    watched = retune_tiles.Watched(tiles._SSD)
    monkeypatch.setattr(tiles, "_SSD", watched)
    return watched


def test_every_table_of_a_case_is_tuned_and_its_key_is_the_one_looked_up(table: retune_tiles.Watched) -> None:
    assert set(retune_tiles.TABLES) == {"ssd_step", "gated_delta_step", "attention_step", "selective_step", "conv_step"}
    for name, values in retune_tiles.TABLES.values():
        assert {len(values)} == {len(entry) for entry in getattr(tiles, name).values()}
    table.other = (32, 16, 4, 3)
    tile = tiles.SsdTile.of(40, 40, 1, 64, 128, torch.bfloat16)
    assert table.key == (64, False) and (tile.headdim, tile.dstate, tile.warps, tile.stages) == table.other


@pytest.mark.slow
@INTERPRETED
def test_the_script_runs_at_tiny_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, _ in retune_tiles.TABLES.values():
        monkeypatch.setattr(tiles, name, getattr(tiles, name))  # the script replaces the tables
    monkeypatch.setattr(cases, "SMALL", [(ssd_case, {"tiny": TINY}), (conv_case, {"tiny": TINY})])
    monkeypatch.setattr(
        sys, "argv", ["retune_tiles", "--smoke", "--ops", "ssd_step", "conv_step", "--out", str(tmp_path)]
    )
    assert retune_tiles.main() == 0
    records = [json.loads(line) for line in (tmp_path / "gpu_tiles.jsonl").read_text().splitlines()]
    measured, best = [r for r in records if "p50" in r], [r for r in records if "best" in r]
    assert [(r["op"], r["present"]) for r in measured] == [
        ("ssd_step", True), ("ssd_step", False), ("conv_step", True), ("conv_step", False)
    ]  # fmt: skip
    assert all(r["correct"] for r in measured)
    assert [(r["op"], r["key"]) for r in best] == [("ssd_step", [16, True]), ("conv_step", 8)]
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["measured"], last["entries"], last["failures"]) == (4, 2, 0)
    assert last["lines"][0].startswith("_SSD:    (16, True): (")


def test_a_candidate_that_computes_something_else_is_not_timed(table: retune_tiles.Watched) -> None:
    case = ssd_case(TINY, Size("tiny", 1, 3, torch.float32, CPU))
    right = case.providers["reference"]

    def wrong_with_another_tile(inputs: Inputs) -> torch.Tensor:
        tiles.SsdTile.of(3, 3, 4, 16, 16, torch.float32)
        return right(inputs) * (1.0 if table.other in (None, table.get(table.key)) else 1.01)

    broken = Case(
        case.op, case.params, case.make, {"triton": wrong_with_another_tile, "reference": right}, 1, 1, case.terms
    )
    present, other = retune_tiles.measure(broken, table, torch.float32, CPU)
    assert present["correct"] and "p50" in present and not other["correct"] and "p50" not in other


def test_the_best_entry_is_right_everywhere_and_fastest_on_average() -> None:
    def record(entry: str, ratio: float | None) -> dict[str, Any]:
        names = {"op": "ssd_step", "key": (16, False), "entry": (entry,), "present": entry == "now"}
        return names | ({"correct": False} if ratio is None else {"correct": True, "ratio": ratio})

    found = retune_tiles.choose(
        [record("now", 1.0), record("even", 0.5), record("uneven", 0.25), record("wrong", 0.1),
         record("now", 1.0), record("even", 0.5), record("uneven", 1.2), record("wrong", None)]
    )  # fmt: skip
    best = {"op": "ssd_step", "key": (16, False), "best": ("even",), "now": ("now",), "gain": pytest.approx(2.0)}
    assert found == [best]
    # Without a present entry that runs, the others are compared with each other.
    found = retune_tiles.choose([record("now", None), record("uneven", 1.0), record("even", 0.7)])
    assert found == [{**best, "gain": float("inf")}]
    assert retune_tiles.choose([record("now", None), record("wrong", None)]) == []
