"""The study of the decision model labels nodes by what was accepted, and trains what ``DecisionStop`` takes.

Run: python -m pytest tests/scripts/test_decision.py
"""

from __future__ import annotations

import pytest
import torch
from helpers.tiny_models import tiny_model

import stree
from benchmarks.studies.decision import MODELS, WIDTHS, collect, fit, weights_of
from stree.growth import DecisionStop, Static


@pytest.mark.slow
def test_nodes_whose_children_are_always_accepted_are_learnt_as_such() -> None:
    lm = stree.TreeLM(tiny_model("mamba2", vocab_size=12).float())
    drafter = stree.drafters.ModelDrafter(stree.TreeLM(tiny_model("mamba2", vocab_size=12).float()))
    inputs, labels = collect(lm, drafter, [[1, 2, 3]], 24)
    assert inputs.shape == (len(labels), 11)
    greedy = labels[: 16 * 5]  # the same model drafts: of the widths 1, 3, 6, 6 the first node of each layer is right
    assert greedy.view(-1, 16)[0].nonzero().flatten().tolist() == [0, 1, 4, 10]
    for hidden in MODELS.values():
        weights = weights_of(fit(hidden, inputs, labels, epochs=2))
        DecisionStop(Static(WIDTHS), weights=weights)
        with pytest.raises(ValueError, match="weights must have rows of 11 inputs"):
            DecisionStop(Static(WIDTHS), weights=[[row[1:] for row in weights[0]], *weights[1:]])
    assert torch.isfinite(inputs).all()
