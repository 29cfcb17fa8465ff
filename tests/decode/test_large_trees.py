"""Trees of 64 nodes in steps of fixed shapes, as a device runs them, stay within what its kernels take."""

from __future__ import annotations

import random
from typing import Any

import pytest
from helpers.on_device import treat_as_on_device
from helpers.tiny_models import patched, random_texts, tiny_model
from torch import Tensor

import stree
from stree.drafters import ModelDrafter
from stree.growth import Calibrated, DySpec, Eagle2, Growth, OptTree
from stree.kernels import tiles
from stree.sampling import Sampling

TEXTS = random_texts(random.Random(0), [6, 6])


@pytest.mark.parametrize(
    ("growth", "temperature"),
    [(Calibrated(depth=8), 0.8), (DySpec(depth=8), 0.0), (OptTree(), 0.8), (Eagle2(), 0.0), (DySpec(form="heap"), 0.8)],
)
def test_a_large_tree_of_fixed_shapes_fits_the_kernels(
    growth: Growth, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    treat_as_on_device(monkeypatch)  # what a device does, on the CPU
    verify, sizes = stree.TreeLM.verify, set()

    def watched(self: stree.TreeLM, state: Any, tree: stree.TokenTree, first: int = 0) -> Tensor:
        sizes.add(tree.tokens.shape[1])
        assert state.max_nodes <= tiles.MAX_NODES
        return verify(self, state, tree, first)

    monkeypatch.setattr(stree.TreeLM, "verify", watched)
    lm, sampling = patched(tiny_model("bamba")), Sampling(temperature)
    drafter = ModelDrafter(patched(tiny_model("mamba2", seed=1)))
    found = stree.generate(
        lm, TEXTS, drafter, growth=growth, budget=64, sampling=sampling, max_new_tokens=4, verifier="match"
    )
    assert 64 in sizes and max(sizes) <= tiles.MAX_NODES
    treat_as_on_device(monkeypatch, host_can_read=True)
    plain = stree.generate(lm, TEXTS, budget=1, sampling=sampling, max_new_tokens=4)
    assert found.sequences == plain.sequences


def test_an_absurd_budget_is_refused_with_the_size_computation(caplog: pytest.LogCaptureFixture) -> None:
    lm = patched(tiny_model("mamba2"))
    with pytest.raises(ValueError, match=r"states need .* 1,000,000,000,000 pairs of nodes x 10 B.*lower .* budget"):
        stree.generate(lm, [[1, 2]], "suffix", budget=1_000_000)
    with caplog.at_level("WARNING", "stree"):
        stree.generate(lm, [[1, 2]], "suffix", budget=1100, max_new_tokens=1)
    assert "a step of 1100 nodes costs more than it emits" in caplog.text
