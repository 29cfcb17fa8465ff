"""Mamba-2 mixers in one launch: trees, paths and copies of a state equal fresh forwards of the unpatched model."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers.family_states import Decoding, verified
from helpers.tiny_family_models import family_model
from helpers.tiny_models import TOLERANCE, as_commit, fresh_node_logits, patched, path_to, real_nodes, tree_error
from transformers import PreTrainedModel

from stree import TreeLM
from stree.kernels import dispatch, ops
from stree.kernels.tiles import MAX_MIXER_NODES

ONE_GROUP: dict[str, dict[str, Any]] = {  # of B and C, and so of the norm, as published models have
    "mamba2": {"n_groups": 1}, "bamba": {"mamba_n_groups": 1}, "granitemoehybrid": {"mamba_n_groups": 1},
}  # fmt: skip
SHORT = {"layers_block_type": ["linear_attention", "mlp", "full_attention"]}
CASES: list[tuple[str, dict[str, Any]]] = [
    *ONE_GROUP.items(), ("mamba2", {}), ("falcon_h1", {}), ("nemotron_h", SHORT), ("zamba2", {}),
]  # fmt: skip


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Run Triton's kernels in the interpreter; count mixers in one launch, and norms that apply the factors of rows."""
    counts: Counter[str] = Counter()
    step, norm = ops.mamba2_step, ops.rms_norm_add

    def mamba2_step(*args: Any, **kwargs: Any) -> Any:
        counts["mamba2_step"] += 1
        return step(*args, **kwargs)

    def rms_norm_add(*args: Any, **kwargs: Any) -> Any:
        counts["squares"] += "squares" in kwargs
        return norm(*args, **kwargs)

    monkeypatch.setattr(ops, "mamba2_step", mamba2_step)
    monkeypatch.setattr(ops, "rms_norm_add", rms_norm_add)
    with dispatch.as_on_device(host_can_read=True, operations=dispatch.TRITON):
        yield counts


def decoding_of(model: PreTrainedModel, lengths: Sequence[int]) -> Decoding:
    lm = patched(model)
    lm.fused_mixers = True
    return Decoding(model, lengths, lm=lm)


def assert_exact_between_commits(decoding: Decoding, sizes: Sequence[int], large: int) -> None:
    """Verify trees, some of them in pieces or too large for one launch, and commit; at last a wrong path."""
    decoding.step(sizes)
    tree = decoding.tree(sizes)
    logits = decoding.pieces(tree, (2, max(sizes)))  # the first piece applies the path
    assert tree_error(decoding.model, decoding.texts, tree, logits) < TOLERANCE[torch.float32]
    decoding.commit(tree, [path_to(tree, row, real_nodes(tree, row)[1]) for row in range(len(sizes))])
    copy = decoding.held_by(decoding.state.clone())
    decoding.step([large] * len(sizes), empty=len(sizes) - 1)
    copy.score(sizes)
    decoding.score(sizes)
    decoding.lm.commit(decoding.state, *as_commit([[0]] * len(sizes)))
    assert decoding.error(decoding.tree(sizes)) > 1e3 * TOLERANCE[torch.float32]  # the texts lack that token


@pytest.mark.slow
def test_bfloat16_stays_as_near_to_float64_as_without(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mamba2_step", "rms_norm_add", "rms_norm", "gated_rms_norm", "ssd_step", "conv_step"):
        # The interpreter cuts bfloat16 off instead of rounding it.
        monkeypatch.setattr(ops, name, functools.partial(getattr(ops, name), backend="reference"))
    squares = [0.0, 0.0]
    for seed, is_fused in itertools.product(range(4), (False, True)):
        monkeypatch.setattr(TreeLM, "fused_mixers", is_fused)
        model = family_model("mamba2", torch.bfloat16, seed, n_groups=1)
        oracle = copy.deepcopy(model).double()
        logits, texts, tree = verified(model, is_fused=True, seed=seed)
        for row, text in enumerate(texts):
            exact = fresh_node_logits(oracle, text, tree, row)
            squares[is_fused] += float((logits[row, real_nodes(tree, row)] - exact).square().mean())
    assert calls["squares"] and squares[1] < 1.5 * squares[0], squares


@pytest.mark.slow
def test_trees_of_a_small_mamba2_are_exact(calls: Counter[str]) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "num_heads": 2, "head_dim": 16, "n_groups": 1}
    assert_exact_between_commits(decoding_of(family_model("mamba2", **sizes), [5]), [4], 3)
    assert calls["mamba2_step"] == calls["squares"] == 7


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_trees_between_deferred_commits_are_exact(family: str, changes: dict[str, Any], calls: Counter[str]) -> None:
    model = family_model(family, **changes)
    assert_exact_between_commits(decoding_of(model, [9, 2]), [7, 5], MAX_MIXER_NODES + 1)
    assert calls["mamba2_step"] and (calls["squares"] > 0) == (changes in ONE_GROUP.values())
