"""Traversal and block verification: at least as good as recursive rejection, and equal on chains."""

from __future__ import annotations

import pytest
import torch
from helpers.random_rows import random_rows
from helpers.traversal_problems import weigh_parent_by_own_probs

from stree.kernels.dispatch import as_on_device
from stree.kernels.traversal.residuals import Residuals
from stree.testing.enumeration import EXACT, PLAIN, drafted_trees, every_outcome, step_bias
from stree.testing.reference_rules import plain_trees, traversal_ends
from stree.testing.tables import TableModel, exact_probs
from stree.tree import TokenTree
from stree.verify import Acceptance, DraftProbs, accept

SHAPES = {
    "chain": [-1, 0, 1],
    "star": [-1, 0, 0, 0],
    "binary": [-1, 0, 0, 1, 1],
    "uneven": [-1, 0, 0, 1, 3],
    "second": [-1, 0, 0, 2, 2],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_traversal_accepts_at_least_as_much_as_rejection(shape: str) -> None:
    target, draft = TableModel.random(3, 0), TableModel.random(3, 50)
    trees = drafted_trees(draft, SHAPES[shape], PLAIN)
    rejection, traversal = (
        sum(float((one.path_lengths * weight).sum()) for _, one, weight in every_outcome(target, trees, PLAIN, rule))
        for rule in ("rejection", "traversal")
    )
    assert rejection <= traversal + EXACT
    if shape in ("chain", "binary", "uneven"):
        assert traversal > rejection + 1e-6


@pytest.mark.parametrize("shape", [[-1, 0, 1, 2], [-1, 0, 0, 1, 2], [-1, 0, 1, 0, 3], [-1, 0, 0, 0, 1]], ids=str)
def test_paths_end_as_by_the_recursion_of_the_paper(shape: list[int]) -> None:
    target, draft = TableModel.random(5, 24), TableModel.random(5, 25)
    trees = drafted_trees(draft, shape, PLAIN)
    probs = exact_probs(target.logits, PLAIN).tolist()
    for row in range(0, len(trees.weight), len(trees.weight) // 5):
        one, found = trees.select(torch.tensor([row])), torch.zeros(len(shape), dtype=torch.float64)
        for _, accepted, weight in every_outcome(target, one, PLAIN, "traversal"):
            last = accepted.path.gather(1, accepted.path_lengths[:, None].long() - 1)[:, 0].long()
            found.index_add_(0, last, weight)
        ends = {path[-1]: prob for path, prob, _ in traversal_ends(next(plain_trees(one)), probs)}
        assert (found / found.sum()).tolist() == pytest.approx([ends[node] for node in range(len(shape))], abs=EXACT)


def test_block_is_traversal_of_chains_which_may_have_several_lengths() -> None:
    target, draft = TableModel.random(4, 1), TableModel.random(4, 2)
    trees = drafted_trees(draft, [-1, 0, 1, 2], PLAIN)
    parents, tokens = trees.parents.clone(), trees.tokens.clone()
    parents[::2, 3], tokens[::2, 3] = -1, 0
    tree, rng = TokenTree(tokens, parents), random_rows(len(tokens))
    block, traversal = (
        accept(tree, target.logits[tokens], PLAIN, rng, trees.probs, verifier) for verifier in ("block", "traversal")
    )
    assert torch.equal(block.path, traversal.path) and torch.equal(block.next_token, traversal.next_token)
    assert (block.path_lengths[::2] <= 3).all() and (block.path_lengths == 4).any()


def test_block_refuses_branches() -> None:
    mixed = TokenTree(torch.tensor([[0, 1, 2]] * 2), torch.tensor([[-1, 0, 1], [-1, 0, 0]]))
    with pytest.raises(ValueError, match="block verification takes trees without branches; use traversal for others"):
        accept(mixed, torch.zeros(2, 3, 4), PLAIN, random_rows(2), None, "block")


def test_a_wrong_parent_probability_gives_another_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residuals, "test", weigh_parent_by_own_probs)
    trees = drafted_trees(TableModel.random(4, 40), SHAPES["chain"], PLAIN)
    with as_on_device(triton=False, host_can_read=False):
        assert step_bias(TableModel.random(4, 0), trees, "traversal") > 0.0032


@pytest.mark.parametrize("in_torch", [True, False], ids=["torch", "numba"])
@pytest.mark.parametrize("shape", SHAPES)
def test_traversal_emits_the_target_s_distribution(shape: str, in_torch: bool) -> None:
    trees = drafted_trees(TableModel.random(3, 31), SHAPES[shape], PLAIN)
    with as_on_device(triton=False, host_can_read=not in_torch):
        assert step_bias(TableModel.random(3, 30), trees, "traversal") < EXACT


@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
def test_float32_distributions_that_agree_are_accepted_whole(verifier: str) -> None:
    target = TableModel(TableModel.random(50, 7).logits.float())
    tokens = torch.randint(0, 50, (300, 6), generator=torch.Generator().manual_seed(0))
    tree = TokenTree(tokens, torch.tensor([[-1, 0, 0, 1, 1, 3]]).expand(300, 6))
    draft = DraftProbs(PLAIN.probs(target.logits[tokens]), tree.parents, torch.zeros_like(tree.parents))
    accepted: Acceptance = accept(tree, target.logits[tokens], PLAIN, random_rows(300), draft, verifier)
    assert accepted.path.tolist() == [[0, 1, 3, 5]] * 300


@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
def test_float32_distributions_that_differ_in_denormal_numbers_leave_no_nan(verifier: str) -> None:
    # Softmax tails: p and q are one-hot but for numbers too small to divide by.
    logits = torch.tensor([0.0, -87.0, -86.0, -200.0, -200.0]).expand(1, 5, 5)
    draft_probs = PLAIN.probs(torch.tensor([0.0, -87.02, -85.9, -200.0, -200.0]).expand(1, 5, 5))
    tree = TokenTree(torch.tensor([[0, 0, 1, 0, 2]]), torch.tensor([[-1, 0, 0, 1, 0]]))
    draft = DraftProbs(draft_probs, tree.parents, torch.zeros_like(tree.parents))
    accepted = accept(tree, logits, PLAIN, random_rows(1), draft, verifier)
    assert accepted.ratios is not None
    assert bool(accepted.ratios.isfinite().all())
    assert accepted.path.tolist() == [[0, 1, 3]]
    assert accepted.next_token.tolist() == [0]
