"""The GPU scripts know an H100 and an H200: predictions for both, models that fit both, tables for each.

Run: python -m pytest tests/scripts/test_cards.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import stree
from benchmarks.gpu import models
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
