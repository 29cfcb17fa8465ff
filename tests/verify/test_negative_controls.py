"""Negative controls: the library's growth and verification with one mistake each, which enumeration must detect.

Every bound is a tenth of the total variation that an independent enumeration of the same mistake gave.
``test_traversal`` has another control, a wrong acceptance probability of the parent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from helpers.draft_steps import Retrieval
from helpers.text_enumeration import joint_of_loop, joint_of_steps
from torch import Tensor

from stree.drafters import Drafter, DraftRun, FusedDrafter
from stree.drafters.target_init import TargetInitDrafter
from stree.growth import RSDS, AcceptanceModel, Chain, DySpec, Growth, Plan, Static, TargetInit
from stree.growth.acceptance_model import PathProbability
from stree.sampling import Random, Sampling
from stree.testing.enumeration import EXACT, PLAIN, DraftedTrees, drafts_of, every_outcome, strings_of, total_variation
from stree.testing.tables import TableModel, table_drafter
from stree.tree import TokenTree
from stree.verify import LONGEST, SAMPLED, Acceptance, DraftProbs, accept

VOCAB, LENGTH = 4, 4
TARGET, DRAFT = TableModel.random(VOCAB, 3), TableModel.random(VOCAB, 103)
TARGET_PROBS, DRAFT_PROBS = PLAIN.probs(TARGET.logits), PLAIN.probs(DRAFT.logits)
DRAFTER = table_drafter(DRAFT)


def bias(
    drafter: Drafter,
    growth: Growth,
    budget: int,
    verifier: str = "rejection",
    change: Callable[[DraftedTrees], DraftedTrees] = lambda trees: trees,
    sampling: Sampling = PLAIN,
) -> float:
    """Total variation between the output and the target's distribution, after a change of the drafted trees."""
    trees = (change(drafts_of(drafter, growth, budget, sampling, VOCAB, root)) for root in range(VOCAB))
    steps = [strings_of(TARGET, drafted, PLAIN, verifier) for drafted in trees]
    return total_variation(joint_of_steps(steps, LENGTH), TARGET.joint(PLAIN, LENGTH))


@dataclass(frozen=True)
class PrunedAfterwards(DySpec):
    """Prunes the finished sampled tree by the nodes' own probabilities, as EAGLE-2 does with deterministic nodes."""

    def plan(self, budget: int) -> Plan:
        return replace(DySpec.plan(self, budget + 2), num_nodes=budget - 1, is_pruned=True)


def test_a_sampled_tree_pruned_afterwards_by_its_own_probability() -> None:
    growth = PrunedAfterwards(depth=2, ranks=2, threshold=0.0)
    assert bias(DRAFTER, growth, 3) > 0.0156
    assert bias(DRAFTER, growth, 3, "match") < EXACT  # MATCH is lossless for every tree


@dataclass(frozen=True)
class OwnProbability(DySpec):
    """Drops a drawn token if its own probability is low."""

    def acceptance_model(self, batch: int, device: torch.device) -> AcceptanceModel:
        return PathProbability()


def test_a_chain_that_drops_its_token_of_low_probability() -> None:
    # With budget 2 at depth 2 no level has a guaranteed node.
    shape: dict[str, Any] = {"depth": 2, "ranks": 1, "threshold": 0.3}
    assert bias(DRAFTER, OwnProbability(**shape), 2) > 0.0165
    assert bias(DRAFTER, DySpec(**shape), 2) < EXACT  # stops below the token, which is kept


def with_softmax(trees: DraftedTrees) -> DraftedTrees:
    """Declare the two most probable tokens as sampled from the softmax over them."""
    is_top = DRAFT.logits >= DRAFT.logits.topk(2, -1).values[:, -1:]
    top_probs = DRAFT.logits.masked_fill(~is_top, -torch.inf).softmax(-1)
    draft = DraftProbs(top_probs[trees.tokens], trees.parents, torch.full_like(trees.probs.kind, SAMPLED))
    return replace(trees, probs=draft)


def test_the_most_probable_tokens_tested_with_the_draft_s_softmax() -> None:
    growth, greedy = Static([2, 1]), Sampling()
    wrong = bias(DRAFTER, growth, 5, change=with_softmax, sampling=greedy)
    assert wrong > 0.036
    assert bias(DRAFTER, growth, 5, sampling=greedy) < EXACT


def without_duplicates(trees: DraftedTrees) -> DraftedTrees:
    """Drop the sampled first tokens that were also retrieved, with their subtrees."""
    dropped = (trees.tokens == 1) & (trees.parents == 0) & (trees.probs.kind == SAMPLED)
    below = (trees.tree.ancestor_mask & dropped[:, None]).any(-1)
    return replace(trees, parents=trees.parents.masked_fill(below, -1), tokens=trees.tokens.masked_fill(below, 0))


def test_a_fused_tree_that_drops_a_sampled_duplicate() -> None:
    drafter = FusedDrafter(DRAFTER, Retrieval([0, 1], [-1, 0]), least_share=0.0)
    assert bias(drafter, Static([2]), 4, change=without_duplicates) > 0.0014
    assert bias(drafter, Static([2]), 4) < EXACT


def in_order_of_tokens(trees: DraftedTrees) -> DraftedTrees:
    """Sort the sampled children of the root by token."""
    return replace(trees, tokens=torch.cat([trees.tokens[:, :1], trees.tokens[:, 1:].sort(1).values], 1))


def test_sampled_siblings_in_the_order_of_their_tokens() -> None:
    assert bias(DRAFTER, Static([2]), 3, change=in_order_of_tokens) > 0.043
    assert bias(DRAFTER, Static([2]), 3) < EXACT


@dataclass(frozen=True)
class LikelyBeam(RSDS):
    """Keeps the paths of the greatest probability at every level, not of the greatest perturbed one."""

    def acceptance_model(self, batch: int, device: torch.device) -> AcceptanceModel:
        return PathProbability()


def test_a_stochastic_beam_cut_by_probability() -> None:
    assert bias(DRAFTER, LikelyBeam(2, 2), 5) > 0.027
    assert bias(DRAFTER, RSDS(2, 2), 5) < EXACT


class Stuck:
    """Random numbers that stay those of one position."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def at(self, positions: Tensor) -> Stuck:
        return self

    def choice(self, purpose: str, probs: Tensor, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        return self.rng.choice(purpose, probs, offset, node)


@dataclass(frozen=True)
class SameNumbers(Drafter):
    """Draws the draft tokens of all steps with the numbers of the first one."""

    drafter: Drafter

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> DraftRun:
        return self.drafter.start(vocab_size, prompts, cast(Random, Stuck(rng)))


def test_one_draft_number_reused_in_every_step() -> None:
    emitted = joint_of_loop(TARGET, SameNumbers(DRAFTER), Chain(1), 2, PLAIN, "rejection", 2)
    assert float(emitted.sum()) == pytest.approx(1)
    assert total_variation(emitted, TARGET.joint(PLAIN, 2)) > 0.003


def with_one_number(tree: TokenTree, logits: Tensor, rng: Random, draft: DraftProbs | None) -> Acceptance:
    """Test the root's child with the number that draws the token after a rejection."""

    def bernoulli(purpose: str, probs: Tensor, offset: Tensor, node: Tensor) -> Tensor:
        return rng.bernoulli("target", probs, offset + 1)

    one: Any = SimpleNamespace(choice=rng.choice, bernoulli=bernoulli)
    return accept(tree, logits, PLAIN, one, draft, "rejection")


def test_the_number_of_a_test_reused_after_its_rejection() -> None:
    trees = [drafts_of(DRAFTER, Chain(1), 2, PLAIN, VOCAB, root) for root in range(VOCAB)]
    emitted = joint_of_steps([strings_of(TARGET, one, PLAIN, "rejection", with_one_number) for one in trees], LENGTH)
    assert float(emitted.sum()) == pytest.approx(1)
    assert total_variation(emitted, TARGET.joint(PLAIN, LENGTH)) > 0.0061


class Begun(Drafter):
    """A drafter one step on: verification of the root has left a distribution.

    Args:
        drafter: draws candidate tokens from it.
        left: float[vocab].
    """

    def __init__(self, drafter: TargetInitDrafter, left: Tensor) -> None:
        self.drafter, self.left = drafter, left

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> DraftRun:
        run = self.drafter.start(vocab_size, prompts, rng)
        nothing = torch.zeros(len(prompts), 1, dtype=torch.int32)
        run.propose(torch.zeros(len(prompts), dtype=torch.long), Chain(1), 1)
        left = self.left.expand(len(prompts), -1)
        run.observe(Acceptance(nothing, nothing[:, 0], nothing[:, 0].long(), left=left))
        return run


@pytest.mark.parametrize("width", [1, 2])
def test_the_longest_of_several_branches_that_begin_with_tokens_of_the_target(width: int) -> None:
    drafter, growth = Begun(TargetInitDrafter(DRAFTER.lm), TARGET_PROBS[0]), TargetInit(width, 1)
    trees = drafts_of(drafter, growth, 1 + 2 * width, PLAIN, VOCAB)
    emitted = torch.zeros(VOCAB**3, dtype=torch.float64)

    def verify(tree: TokenTree, logits: Tensor, rng: Random, draft: DraftProbs | None) -> Acceptance:
        return accept(tree, logits, PLAIN, rng, draft, LONGEST)

    for tokens, accepted, weight in every_outcome(TARGET, trees, PLAIN, "rejection", verify):
        assert accepted.left is not None
        last, left, is_long = accepted.next_token, accepted.left * weight[:, None], accepted.path_lengths == 2
        first = tokens.gather(1, accepted.path[:, 1:2].clamp(min=0).long()).squeeze(1)
        emitted.view(VOCAB**2, -1).index_add_(0, (first * VOCAB + last)[is_long], left[is_long])
        # One token was emitted; the next one follows ``left``, the third one the target.
        after = (left[:, :, None] * TARGET_PROBS).flatten(1)
        emitted.view(VOCAB, -1).index_add_(0, last[~is_long], after[~is_long])
    assert float(emitted.sum()) == pytest.approx(1)
    found = total_variation(emitted, TARGET.joint(PLAIN, 3))
    assert found < EXACT if width == 1 else found > 0.0079
