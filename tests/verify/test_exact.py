"""Every growth with every verifier gives the target's distribution of four tokens exactly, by enumeration.

Trees come from the drafters themselves and are verified by ``stree.accept``; the texts span several steps. STREE_FULL=1
runs all twelve seeds of both kinds of models.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import pytest
import torch
from helpers.enumerated_texts import Turns, drafts_of, joint_of_loop, joint_of_steps
from helpers.enumeration import EXACT, PLAIN, strings_of, total_variation
from helpers.table_models import TableModel, table_drafter

from stree import growth as growths
from stree.growth import Growth

VOCAB, LENGTH, SEEDS = 4, 4, 12
IS_FULL = os.environ.get("STREE_FULL", "0") == "1"

GROWTHS: dict[str, tuple[Growth, int]] = {
    "chain": (growths.Chain(2), 3),
    "static": (growths.Static([1, 2]), 4),
    "parents": (growths.Static([-1, 0, 0, 2]), 4),
    "rsdc": (growths.RSDC([3]), 4),
    "sequoia": (growths.Sequoia(depth=2, rates=(0.5, 0.2)), 4),
    "dyspec": (growths.DySpec(depth=2, ranks=2), 4),
    "dyspec-by-heap": (growths.DySpec(form="heap"), 3),
    "calibrated": (growths.Calibrated(depth=2, ranks=2), 4),
    "specinfer": (growths.SpecInfer([1, 2]), 4),
    "rsds": (growths.RSDS(2, 2), 5),
    "opt-tree": (growths.OptTree(depth=2), 4),
    "eagle2": (growths.Eagle2(depth=2, beam=2), 4),
    "depth-stop": (growths.DepthStop(growths.DySpec(depth=2, ranks=2), threshold=-0.5, layers=None), 4),
    "decision-stop": (growths.DecisionStop(growths.Static([1, 2]), weights=[[[100.0, *[0.0] * 10, -60.0]]]), 4),
}
# MATCH does not depend on how a tree was drawn, and its enumeration is slow.
MATCHED = ("chain", "static", "calibrated")
VERIFIERS = ("match", "rejection", "traversal", "block")
WAYS = [way for way in itertools.product(GROWTHS, VERIFIERS) if way[1] != "block" or way[0] == "chain"]
QUICK = [way for way in WAYS if way[1] != "match" or way[0] in MATCHED]


def random_pair(seed: int) -> tuple[TableModel, TableModel]:
    return TableModel.random(VOCAB, seed), TableModel.random(VOCAB, 100 + seed)


def adversarial_pair(seed: int) -> tuple[TableModel, TableModel]:
    """A target and an adversarial draft model, of one of six kinds."""
    target, other = random_pair(seed)
    logits, token = target.logits, torch.arange(VOCAB)
    if seed % 6 == 0:  # likely tokens are unlikely
        return target, TableModel(-2 * logits)
    if seed % 6 == 1:  # no drafted token has a probability above 0
        half = token % 2 == seed // 6 % 2
        return TableModel(logits.masked_fill(half, -torch.inf)), TableModel(other.logits.masked_fill(~half, -torch.inf))
    if seed % 6 == 2:  # both nearly one-hot, at different tokens
        return TableModel(12 * logits), TableModel(12 * other.logits)
    if seed % 6 == 3:  # the same distribution
        return target, TableModel(logits.clone())
    if seed % 6 == 4:  # a one-hot draft of a uniform target
        one_hot = torch.where(token == seed // 6, 0.0, -torch.inf)
        return TableModel(torch.zeros_like(logits)), TableModel(one_hot.double().repeat(VOCAB, 1))
    is_best = logits == logits.amax(1, True)  # the draft's top candidate is impossible
    return TableModel(logits.masked_fill(is_best, -torch.inf)), target


Pair = tuple[Callable[[int], tuple[TableModel, TableModel]], int]  # and a seed
PAIRS: list[Pair] = list(itertools.product((random_pair, adversarial_pair), range(SEEDS)))


def check(name: str, verifier: str, chosen: list[Pair]) -> None:
    """Require that what a growth's trees lead to under a verifier is the target's distribution."""
    growth, budget = GROWTHS[name]
    for make, seed in chosen:
        target, draft = make(seed)
        drafter, steps = table_drafter(draft), []
        for root in range(VOCAB):
            trees = drafts_of(drafter, growth, budget, PLAIN, VOCAB, root)
            steps.append(strings_of(target, trees, PLAIN, verifier))
        emitted = joint_of_steps(steps, LENGTH)
        assert total_variation(emitted, target.joint(PLAIN, LENGTH)) < EXACT, (make.__name__, seed)


@pytest.mark.parametrize(("name", "verifier"), QUICK)
def test_every_growth_with_every_verifier_emits_the_target_s_distribution(name: str, verifier: str) -> None:
    check(name, verifier, [PAIRS[13 * WAYS.index((name, verifier)) % len(PAIRS)]])  # each case has its own pair


@pytest.mark.slow
@pytest.mark.parametrize(("name", "verifier"), WAYS)
def test_so_it_does_with_a_random_and_with_an_adversarial_draft_model(name: str, verifier: str) -> None:
    seed = WAYS.index((name, verifier)) % SEEDS
    check(name, verifier, PAIRS if IS_FULL else [(random_pair, seed), (adversarial_pair, seed)])


def test_no_growth_is_left_out() -> None:
    public = {getattr(growths, name) for name in growths.__all__}
    policies = {one for one in public if isinstance(one, type) and hasattr(one, "plan") and hasattr(one, "bind")}
    policies -= {growths.Growth, growths.Limited, growths.TargetInit}  # TargetInit is lossy
    assert policies == {type(growth) for growth, _ in GROWTHS.values()}


@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
@pytest.mark.parametrize(("growth", "turns", "draws"), [(growths.Chain(1), 3, 1), (growths.Static([2]), 2, 2)])
def test_a_run_of_several_steps_emits_the_target_s_distribution(
    growth: Growth, turns: int, draws: int, verifier: str
) -> None:
    target, draft = random_pair(1)
    drafter, rng = table_drafter(draft), Turns.all(turns, draws, draws, VOCAB)
    emitted = joint_of_loop(target, drafter, growth, draws + 1, PLAIN, verifier, rng)
    assert total_variation(emitted, target.joint(PLAIN, turns)) < EXACT
