"""Kernels of traversal against stree.verify.traversal, interpreted on the CPU; see also `test_traversal`.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_traversal_triton.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.traversal_problems import DEVICE, Problem
from torch import Tensor

from stree import TokenTree
from stree.kernels.traversal import kernel as kernels
from stree.kernels.traversal.api import traverse as traverse_on_device
from stree.kernels.traversal.operands import DraftProbs, TraversedPath
from stree.verify.traversal import traverse, traverse_by_kernels
from stree.verify.values import DELTA, INDEPENDENT, SAMPLED


@pytest.mark.parametrize("kinds", [(INDEPENDENT,), (SAMPLED, DELTA, INDEPENDENT)], ids=str)
def test_siblings_of_one_token_are_counted_once(kinds: tuple[int, ...]) -> None:
    problem = Problem.draw(7, 6, seed=0, kinds=kinds, shape=[-1, 0, 0, 0, 0, 0, 0])
    tokens = problem.tree.tokens[:, 1:]
    assert all(len(set(row)) < 6 for row in tokens.tolist())
    problem.check(problem.found(), close=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [(SAMPLED,), (DELTA,), (SAMPLED, DELTA, INDEPENDENT)], ids=str)
def test_a_full_vocabulary_of_several_blocks_is_tested_and_drawn_from(kinds: tuple[int, ...]) -> None:
    accepted = 0
    for seed in range(2):
        problem = Problem.draw(9, 2 * kernels.BLOCK + 813, seed=seed, batch=2, kinds=kinds, sharp=8.0)
        found = problem.found()
        problem.check(found)
        accepted += int(found.path_lengths.sum()) - 2
    assert accepted > 0


def test_stored_distributions_need_not_sum_to_one() -> None:
    problem = Problem.draw(12, 200, seed=5, kinds=(SAMPLED, DELTA))
    assert problem.draft is not None
    share = torch.rand(problem.draft.probs.shape[:2], generator=torch.Generator().manual_seed(0))[..., None] + 0.1
    found = replace(problem, draft=replace(problem.draft, probs=problem.draft.probs * share)).found()
    problem.check(found)


def test_the_rule_of_a_gpu_gives_an_acceptance_and_leaves_the_distribution_as_it_is() -> None:
    problem = Problem.draw(17, 40, seed=8, padding=2)
    moved = problem.moved()
    rng = replace(moved.rng, positions=moved.rng.positions.int())
    found = traverse_by_kernels(moved.tree, moved.dist, rng, moved.draft, problem.depth)
    assert torch.equal(moved.dist.cpu(), problem.dist)
    expected = traverse(problem.tree, problem.dist.clone(), problem.rng, problem.draft, problem.depth)
    assert torch.equal(found.path.cpu(), expected.path) and torch.equal(found.next_token.cpu(), expected.next_token)
    assert found.ratios is not None and found.ratios.dtype == torch.float32 and found.left is None


@pytest.mark.slow
def test_operands_of_any_strides_and_a_seed_on_the_device_are_read() -> None:
    problem = Problem.draw(9, 203, seed=9).moved()
    tree, rng, draft = problem.tree, problem.rng, problem.draft
    assert draft is not None

    def apart(tensor: Tensor) -> Tensor:
        return torch.stack([tensor, torch.zeros_like(tensor)], -1)[..., 0]

    def padded(rows: Tensor) -> Tensor:
        return torch.nn.functional.pad(rows, (0, 5), value=torch.nan)[..., :203]

    found = traverse_on_device(
        TokenTree.unchecked(*map(apart, (tree.tokens, tree.parents, tree.depths, tree.ancestor_mask))),
        padded(problem.dist), DraftProbs(padded(draft.probs), apart(draft.row), apart(draft.kind)),
        max_depth=problem.depth, seed=torch.tensor(rng.seed, device=DEVICE), sequences=apart(rng.sequences),
        positions=apart(rng.positions),
    )  # fmt: skip
    expected = problem.found()
    for name in TraversedPath.__slots__:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
