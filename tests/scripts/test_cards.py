"""The GPU scripts know an H100 and an H200: predictions for both, models that fit both, tables for each.

Run: python -m pytest tests/scripts/test_cards.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import stree
from benchmarks.gpu import bars, models
from benchmarks.gpu.steps import NODES, ROOM, SIZES
from stree.bench.predictions import CARDS, PREDICTED, predicted_ms
from stree.decode.memory import state_bytes
from stree.models.state_size import empty_model
from stree.models.tree_memory import tree_bytes

ROOT = Path(__file__).resolve().parents[2]
H100_BYTES = 78 * 2**30


def test_the_table_of_the_docs_is_what_is_predicted() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text("utf-8")
    for model, steps in PREDICTED.items():
        for nodes in steps:
            found = [predicted_ms(model, nodes, bandwidth) for bandwidth in CARDS.values()]
            assert all(found)
            cells = [" / ".join(f"{one[part]:.2f}" for one in found if one) for part in ("products", "recurrent")]
            totals = " / ".join(f"{one['total']:.1f}" for one in found if one)
            assert f"| {model}, {nodes} | {cells[0]} | {cells[1]} |" in text and f"| {totals} |" in text
    assert predicted_ms("mamba2-2.7b", 5, 1e12) is None is predicted_ms("another", 1, 1e12)


@pytest.mark.slow
@pytest.mark.parametrize("name", models.configurations(False))
def test_every_model_fits_an_h100_at_every_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = stree.TreeLM(empty_model(models.configurations(False)[name], torch.bfloat16))
    weights = sum(weight.nbytes for weight in lm.model.parameters())
    states = [state_bytes(lm, batch, context + ROOM, max(NODES)) for batch, context in SIZES]
    monkeypatch.setattr(stree.TreeLM, "device", torch.device("cuda"))
    steps = [tree_bytes(lm, batch, max(NODES), context) for batch, context in SIZES]
    assert min(steps) > 0
    assert weights + max(map(sum, zip(states, steps, strict=True))) < H100_BYTES


def test_bars_are_read_card_by_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(card: str, n: int, p50: float) -> dict[str, object]:
        params = {"model": "mamba2-2.7b", "batch": 1, "context": 256, "n": n}
        return {"bench": "step", "provider": "graph", "params": params, "p50": p50, "env": {"device": card}}

    records = [step("NVIDIA H100", 1, 3.5), step("NVIDIA H200", 16, 3.1), step("NVIDIA H100", 16, 5.0)]
    (tmp_path / "gpu_steps.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setattr(sys, "argv", ["bars", str(tmp_path)])
    assert bars.main() == 0
    first, second = capsys.readouterr().out.split("NVIDIA H200")
    assert first.startswith("NVIDIA H100") and "1.429" in first and "missed" in first
    assert "missed" not in second
