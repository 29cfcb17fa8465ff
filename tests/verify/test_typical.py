"""Typical acceptance: the rule of its paper, allowed only where a lossy text is, and found lossy by enumeration."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from helpers.random_rows import random_rows
from helpers.tiny_models import patched, random_tree, real_nodes, tiny_model
from torch import Tensor

import stree
from stree.bench.methods import parse_methods
from stree.drafters import ModelDrafter
from stree.sampling import Sampling
from stree.testing import CheckFailed, check_verifier
from stree.tree import TokenTree
from stree.verify import TypicalAcceptance

SEVERAL = Sampling(0.7)


def accepted_by_hand(tree: TokenTree, row: int, probs: Tensor, threshold: float, alpha: float) -> list[int]:
    """Return the accepted path: the longest one of likely tokens, of several the most probable one."""
    parents, tokens = tree.parents[row].tolist(), tree.tokens[row].tolist()
    best, best_score = [0], (0, 0.0)
    for leaf in real_nodes(tree, row):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        likelihood, is_accepted = 1.0, True
        for above, node in zip(path, path[1:], strict=False):
            dist = probs[row, above].tolist()
            entropy = -sum(p * math.log(p + 1e-5) for p in dist)
            is_accepted &= dist[tokens[node]] > min(threshold, alpha * math.exp(-entropy))
            likelihood *= dist[tokens[node]]
        if is_accepted and (len(path) - 1, likelihood) > best_score:
            best, best_score = path, (len(path) - 1, likelihood)
    return best


@pytest.mark.parametrize(("threshold", "alpha"), [(0.09, 0.3), (0.3, 0.9), (0.0, 0.0)])
def test_the_accepted_path_is_the_papers(threshold: float, alpha: float) -> None:
    chance, generator, lengths = random.Random(0), torch.Generator().manual_seed(0), set[int]()
    rule = TypicalAcceptance(threshold, alpha)
    for _ in range(40):
        tree = random_tree(chance, [48, 5])
        tree = TokenTree(tree.tokens % 5, tree.parents)
        logits = 2 * torch.randn(2, tree.tokens.shape[1], 5, generator=generator)
        found = stree.accept(tree, logits, SEVERAL, random_rows(2), verifier=rule)
        for row in range(2):
            path = accepted_by_hand(tree, row, SEVERAL.probs(logits), threshold, alpha)
            assert found.path[row, : found.path_lengths[row]].tolist() == path
            lengths.add(len(path))
    assert len(lengths) > 2


def test_enumeration_finds_that_it_is_lossy() -> None:
    with pytest.raises(CheckFailed):
        check_verifier(TypicalAcceptance())


def test_it_runs_where_lossy_texts_are_allowed_and_is_greedy_at_temperature_0() -> None:
    lm, drafter = patched(tiny_model("mamba2")), ModelDrafter(patched(tiny_model("mamba2", seed=1)))
    with pytest.raises(ValueError, match="TypicalAcceptance does not keep .* only with allow_lossy=True"):
        stree.generate(lm, [[5, 6, 7]], drafter, verifier=TypicalAcceptance())
    options: dict[str, Any] = {"max_new_tokens": 12, "allow_lossy": True}
    out = stree.generate(lm, [[5, 6, 7]], drafter, budget=8, verifier=TypicalAcceptance(), **options)
    assert out.sequences == stree.generate(lm, [[5, 6, 7]], budget=1, max_new_tokens=12).sequences
    assert out.stats["lossless"] is False and out.stats["verifier"] == "TypicalAcceptance"


def test_the_bench_labels_it_lossy() -> None:
    default, shaped = parse_methods("lossy-typical,lossy-typical:static:2,2")
    assert default.is_lossy and shaped.is_lossy and shaped.budget == 7
    with pytest.raises(ValueError, match="has a rule of its own"):
        parse_methods("lossy-typical:stree@match")


@pytest.mark.parametrize("arguments", [(1.5,), (0.1, -0.1)])
def test_shares_outside_their_range_are_refused(arguments: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must be in"):
        TypicalAcceptance(*arguments)
