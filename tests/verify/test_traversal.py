"""Traversal and block verification: at least as good as recursive rejection, and equal on chains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.enumeration import TableLaw, drafted_trees, emitted_law, every_outcome, expected_tokens, total_variation
from torch import Tensor

from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify import Acceptance, DraftLaws, accept, compiled, traversal
from stree.verify.traversal import _hold, _hold_chain
from stree.verify.trials import Trials

EXACT = 1e-12  # total variation: sums in float64
PLAIN = Sampling(1.0)
SHAPES = {
    "chain": [-1, 0, 1],
    "star": [-1, 0, 0, 0],
    "binary": [-1, 0, 0, 1, 1],
    "uneven": [-1, 0, 0, 1, 3],
    "second": [-1, 0, 0, 2, 2],
}


def depth_of(parents: list[int]) -> int:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def random_rows(batch: int) -> Random:
    return Random(0, torch.arange(batch), torch.zeros(batch, dtype=torch.long))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
def test_traversal_accepts_at_least_as_much_as_rejection(shape: str, seed: int) -> None:
    target, draft = TableLaw.random(3, seed), TableLaw.random(3, 50 + seed)
    trees = drafted_trees(draft, SHAPES[shape], PLAIN)
    rejection, traversal = (expected_tokens(target, trees, PLAIN, verifier) for verifier in ("rejection", "traversal"))
    assert rejection <= traversal + 1e-12
    if shape in ("chain", "binary", "uneven"):
        assert traversal > rejection + 1e-6


@pytest.mark.parametrize("length", [1, 2, 3])
def test_block_verification_emits_the_target_s_law(length: int) -> None:
    target, draft = TableLaw.random(3, 20), TableLaw.random(3, 21)
    trees = drafted_trees(draft, list(range(-1, length)), PLAIN)
    emitted = emitted_law(target, trees, PLAIN, "block", length + 1)
    assert total_variation(emitted, target.joint(PLAIN, length + 1)) < EXACT


def block_by_hand(target_law: Tensor, draft_law: Tensor, tokens: list[int]) -> list[float]:
    """Walk down a chain in plain Python (arXiv 2403.10444): the success probability of each drafted node."""
    reach, coins = 1.0, []
    for place, token in enumerate(tokens[1:]):
        above = tokens[place]
        reach = min(1.0, reach * float(target_law[above, token] / draft_law[above, token]))
        if place + 2 < len(tokens):
            left = sum(
                max(0.0, reach * p - q)
                for p, q in zip(target_law[token].tolist(), draft_law[token].tolist(), strict=True)
            )
            coins.append(left / (left + 1 - reach) if left else 0.0)
        else:
            coins.append(reach)
    return coins


def test_coins_of_a_chain_are_those_of_the_paper_one_by_one_and_all_at_once() -> None:
    target, draft = TableLaw.random(5, 22), TableLaw.random(5, 23)
    trees = drafted_trees(draft, [-1, 0, 1, 2], PLAIN)
    law = PLAIN.law(target.logits)

    def trials() -> Trials:
        return Trials(trees.tree, law[trees.tokens], trees.laws)

    at_once, one_by_one = _hold_chain(trials(), 3), _hold(trees.tree, trials(), 3)
    assert (at_once - one_by_one)[:, 1:].abs().max() < 1e-14
    for row in range(0, len(trees.weight), 7):
        by_hand = block_by_hand(law, PLAIN.law(draft.logits), trees.tokens[row].tolist())
        assert at_once[row, 1:].tolist() == pytest.approx(by_hand, abs=1e-13)


def coins_by_recursion(target_law: Tensor, draft_law: Tensor, tokens: list[int], parents: list[int]) -> list[float]:
    """Visit children first (arXiv 2505.12398): the probability of each node's coin, 0 for padding."""
    coins = [0.0] * len(tokens)

    def visit(node: int, reach: float) -> None:
        left, rest = target_law[tokens[node]], draft_law[tokens[node]].clone()
        for child in (place for place, parent in enumerate(parents) if parent == node):
            law = rest / rest.sum()
            visit(child, min(1.0, float(reach * left[tokens[child]] / law[tokens[child]])))
            remains = (reach * left - law).clamp(min=0)
            total = float(remains.sum())
            reach = total / (total + 1 - reach) if total else 0.0
            left = remains / total if total else left
            rest[tokens[child]] = 0
        coins[node] = reach

    visit(0, 1.0)
    return coins


def chances(coins: list[float], parents: list[int]) -> list[float]:
    """Turn coins into the probability that each node is the first in post-order whose coin shows."""
    found, missed = [0.0] * len(coins), 1.0

    def visit(node: int) -> None:
        nonlocal missed
        for child in (place for place, parent in enumerate(parents) if parent == node):
            visit(child)
        coin = coins[node] if node else 1.0
        found[node], missed = missed * coin, missed * (1 - coin)

    visit(0)
    return found


def test_coins_of_different_trees_in_one_batch_are_those_of_the_recursion() -> None:
    target, draft = TableLaw.random(5, 24), TableLaw.random(5, 25)
    shapes = [[-1, 0, 1, 0, 3, 1], [-1, 0, 0, 0, 1, 3], [-1, 0, 1, 2, 3, 0], [-1, 0, -1, 1, 0, 1]]
    drafts = [drafted_trees(draft, shape, PLAIN).select(torch.arange(0, 500, 41)) for shape in shapes]
    tokens, parents = torch.cat([trees.tokens for trees in drafts]), torch.cat([trees.parents for trees in drafts])
    padding = torch.tensor(shapes).repeat_interleave(len(drafts[0].weight), 0) < 0
    padding[:, 0] = False
    tokens, parents = tokens.masked_fill(padding, 0), parents.masked_fill(padding, -1)
    tree, laws = (
        TokenTree(tokens, parents),
        DraftLaws(PLAIN.law(draft.logits)[tokens], parents, torch.zeros_like(parents)),
    )
    coins = _hold(tree, Trials(tree, PLAIN.law(target.logits)[tokens], laws), int(tree.depths.max()))
    for row in range(len(tokens)):
        text, shape = tokens[row].tolist(), parents[row].tolist()
        expected = coins_by_recursion(PLAIN.law(target.logits), PLAIN.law(draft.logits), text, shape)
        # Coins that follow a sure one may differ: they are never looked at.
        assert chances(coins[row].tolist(), shape) == pytest.approx(chances(expected, shape), abs=1e-12)


def test_block_is_traversal_and_refuses_branches() -> None:
    target, draft = TableLaw.random(4, 1), TableLaw.random(4, 2)
    trees = drafted_trees(draft, [-1, 0, 1, 2], PLAIN)
    logits, rng = target.logits[trees.tokens], random_rows(len(trees.weight))
    block = accept(trees.tree, logits, PLAIN, rng, trees.laws, "block")
    traversal = accept(trees.tree, logits, PLAIN, rng, trees.laws, "traversal")
    assert torch.equal(block.path, traversal.path)
    assert torch.equal(block.next_token, traversal.next_token)
    star = TokenTree(torch.tensor([0, 1, 2]), torch.tensor([-1, 0, 0]))
    with pytest.raises(ValueError, match="block verification takes trees without branches; use traversal for others"):
        accept(star, torch.zeros(1, 3, 4), PLAIN, random_rows(1), None, "block")
    mixed = TokenTree(torch.tensor([[0, 1, 2]] * 2), torch.tensor([[-1, 0, 1], [-1, 0, 0]]))
    with pytest.raises(ValueError, match="block verification takes trees without branches"):
        accept(mixed, torch.zeros(2, 3, 4), PLAIN, random_rows(2), None, "block")


def test_chains_of_unequal_lengths_are_chains() -> None:
    target, draft = TableLaw.random(4, 3), TableLaw.random(4, 4)
    trees = drafted_trees(draft, [-1, 0, 1], PLAIN).select(torch.arange(8))
    parents, tokens = trees.parents.clone(), trees.tokens.clone()
    parents[::2, 2], tokens[::2, 2] = -1, 0
    trees = replace(trees, tokens=tokens, parents=parents)
    accepted = accept(trees.tree, target.logits[tokens], PLAIN, random_rows(8), trees.laws, "block")
    assert (accepted.path_lengths[::2] <= 2).all()


@pytest.mark.parametrize("seed", range(4))
def test_another_weight_of_the_parent_gives_another_law_in_torch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # min(S / (1 - q(x)), 1) instead of S / (S + 1 - r), as a public reimplementation has it.
    test = Trials.test

    def wrong(trials: Trials, nodes: Tensor, child: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        below, above = test(trials, nodes, child, held)
        assert trials._probs is not None
        total = (above * (1 - held) / (1 - above).clamp(min=1e-12)).where(above < 1, held)
        own = 1 / trials._facts[trials._batch, child][..., 0].clamp(min=1e-12)
        return below, torch.where(child < trials.ratio.shape[1] - 1, (total / (1 - own)).clamp(max=1), held)

    right, exact = law_of_a_chain(seed, in_torch=True)
    assert total_variation(right, exact) < EXACT
    monkeypatch.setattr(Trials, "test", wrong)
    assert total_variation(law_of_a_chain(seed, in_torch=True)[0], exact) > 0.0032


@pytest.mark.parametrize("weight", ["by its own law", "as before"])
@pytest.mark.parametrize("seed", range(4))
def test_another_weight_of_the_parent_gives_another_law_compiled(
    seed: int, weight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = compiled.hold

    def wrong(*given: Any) -> None:
        hold(*given)
        tokens, _, _, probs, row, _, held, ratio = given
        coin, before = (
            held[:, 1],
            ratio[:, 1],
        )  # of the node that has a child; a chain's first node is held by its ratio
        left = coin * (1 - before) / np.maximum(1 - coin, 1e-12)
        own = np.take_along_axis(probs[np.arange(len(row)), row[:, 2]], tokens[:, 2:], 1)[:, 0]
        by_own = np.minimum(np.where(coin < 1, left, before) / (1 - own), 1)
        held[:, 1] = before if weight == "as before" else by_own

    right, exact = law_of_a_chain(seed)
    assert total_variation(right, exact) < EXACT
    monkeypatch.setattr(compiled, "hold", wrong)
    assert total_variation(law_of_a_chain(seed)[0], exact) > 0.0032


def law_of_a_chain(seed: int, *, in_torch: bool = False) -> tuple[Tensor, Tensor]:
    """Enumerate what two drafted tokens emit; give the target's law, too."""
    target, draft = TableLaw.random(4, seed), TableLaw.random(4, 40 + seed)
    trees = drafted_trees(draft, [-1, 0, 1], PLAIN)
    with pytest.MonkeyPatch.context() as patch:
        if in_torch:
            patch.setattr(traversal, "reads_freely", lambda _: False)
        return emitted_law(target, trees, PLAIN, "traversal", 3), target.joint(PLAIN, 3)


@pytest.mark.parametrize("shape", SHAPES)
def test_traversal_in_torch_emits_the_target_s_law(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traversal, "reads_freely", lambda _: False)
    monkeypatch.setattr(compiled, "hold", None)  # not called
    target, draft = TableLaw.random(3, 30), TableLaw.random(3, 31)
    emitted = emitted_law(target, drafted_trees(draft, SHAPES[shape], PLAIN), PLAIN, "traversal", 5)
    assert total_variation(emitted, target.joint(PLAIN, 5)) < EXACT


def test_the_log_is_the_probability_that_a_test_accepts() -> None:
    target, draft = TableLaw.random(4, 5), TableLaw.random(4, 6)
    trees = drafted_trees(draft, [-1, 0, 0, 1], PLAIN)
    rest, law = PLAIN.law(target.logits), PLAIN.law(draft.logits)
    for verifier in ("rejection", "traversal"):
        logits, rng = target.logits[trees.tokens], random_rows(len(trees.weight))
        ratios = accept(trees.tree, logits, PLAIN, rng, trees.laws, verifier).ratios
        assert ratios is not None
        for row in range(0, len(trees.weight), 5):
            first, second, below = trees.tokens[row, 1:].tolist()
            left = (rest[0] - law[0]).clamp(min=0)
            without = law[0].clone()
            without[first] = 0
            expected = [
                rest[0, first] / law[0, first],
                left[second] / left.sum() / (without[second] / without.sum()),
                rest[first, below] / law[first, below],
            ]
            certain = float(expected[0]) >= 1  # then the second is never tested
            actual = ratios[row, 1:].tolist()
            for place, value in enumerate(expected):
                if not (certain and place == 1):
                    assert actual[place] == pytest.approx(min(1.0, float(value)), abs=1e-12)
    assert accept(trees.tree, logits, PLAIN, rng, None).ratios is None


@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
def test_float32_laws_that_agree_are_accepted_whole(verifier: str) -> None:
    target = TableLaw(TableLaw.random(50, 7).logits.float())
    tokens = torch.randint(0, 50, (300, 6), generator=torch.Generator().manual_seed(0))
    tree = TokenTree(tokens, torch.tensor([[-1, 0, 0, 1, 1, 3]]).expand(300, 6))
    laws = DraftLaws(PLAIN.law(target.logits[tokens]), tree.parents, torch.zeros_like(tree.parents))
    accepted: Acceptance = accept(tree, target.logits[tokens], PLAIN, random_rows(300), laws, verifier)
    assert accepted.path.tolist() == [[0, 1, 3, 5]] * 300


@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
def test_float32_laws_that_differ_in_denormal_numbers_leave_no_nan(verifier: str) -> None:
    # Softmax tails of sharp laws: p and q are one-hot but for numbers too small to divide by.
    logits = torch.tensor([0.0, -87.0, -86.0, -200.0, -200.0]).expand(1, 5, 5)
    law = PLAIN.law(torch.tensor([0.0, -87.02, -85.9, -200.0, -200.0]).expand(1, 5, 5))
    tree = TokenTree(torch.tensor([[0, 0, 1, 0, 2]]), torch.tensor([[-1, 0, 0, 1, 0]]))
    laws = DraftLaws(law, tree.parents, torch.zeros_like(tree.parents))
    accepted = accept(tree, logits, PLAIN, random_rows(1), laws, verifier)
    assert accepted.ratios is not None
    assert bool(accepted.ratios.isfinite().all())
    assert accepted.path.tolist() == [[0, 1, 3]]
    assert accepted.next_token.tolist() == [0]


def test_a_root_that_is_sure_stays_sure_however_little_its_children_leave() -> None:
    # In float32 (1e-8 + 1) - 1 is 0: a parent held with probability 1 must still be held with 1 after a rejection.
    law = torch.tensor([1 - 3e-8, 1e-8, 1e-8, 1e-8, 1e-9], dtype=torch.float64)
    draft = torch.tensor([1 - 3e-8, 2e-8, 1e-9, 1e-9, 1e-9], dtype=torch.float64)
    tree = TokenTree(torch.tensor([[0, 0, 1, 2]]), torch.tensor([[-1, 0, 0, 0]]))
    coins = []
    for dtype in (torch.float32, torch.float64):
        laws = DraftLaws(
            draft.to(dtype).expand(1, 1, 5), torch.zeros_like(tree.parents), torch.zeros_like(tree.parents)
        )
        coins.append(_hold(tree, Trials(tree, law.to(dtype).repeat(1, 4, 1), laws), 1))
        assert bool(((coins[-1] >= 0) & (coins[-1] <= 1)).all())
        assert float(coins[-1][0, 0]) == pytest.approx(1)


def test_every_outcome_has_a_weight() -> None:
    target, draft = TableLaw.random(3, 1), TableLaw.random(3, 2)
    trees = drafted_trees(draft, [-1, 0, 0, 1], PLAIN)
    total = sum(float(weight.sum()) for _, _, weight in every_outcome(target, trees, PLAIN, "traversal"))
    assert total == pytest.approx(1, abs=1e-12)
