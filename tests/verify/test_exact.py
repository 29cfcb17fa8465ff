"""Every growth with every verifier gives the target's distribution of four tokens exactly, by enumeration.

Trees come from the drafters themselves and are verified by ``stree.accept``; the texts span several steps. STREE_FULL=1
runs all twelve seeds of both kinds of models.
"""

from __future__ import annotations

import itertools
import os

import pytest
from helpers.exact_growths import GROWTHS, WAYS
from helpers.fast_cases import slow_unless
from helpers.text_enumeration import joint_of_loop, joint_of_steps

from stree import growth as growths
from stree.growth import Growth
from stree.testing import check_growth
from stree.testing.enumeration import EXACT, PLAIN, drafts_of, strings_of, total_variation
from stree.testing.tables import PAIRS, table_drafter

VOCAB, LENGTH, SEEDS = 4, 4, 12
IS_FULL = os.environ.get("STREE_FULL", "0") == "1"

# MATCH does not depend on how a tree was drawn, and its enumeration is slow.
MATCHED = ("chain", "static", "calibrated")
CHECKED = [name if name == "stopped" else pytest.param(name, marks=pytest.mark.slow) for name in GROWTHS]
QUICK = [way for way in WAYS if way[1] != "match" or way[0] in MATCHED][::2]


Chosen = tuple[str, int]  # kind of the models, and a seed
CHOSEN: list[Chosen] = list(itertools.product(PAIRS, range(SEEDS)))


def check(name: str, verifier: str, chosen: list[Chosen]) -> None:
    """Require that what a growth's trees lead to under a verifier is the target's distribution."""
    growth, budget = GROWTHS[name]
    for kind, seed in chosen:
        target, draft = PAIRS[kind](VOCAB, seed)
        drafter, steps = table_drafter(draft), []
        for root in range(VOCAB):
            trees = drafts_of(drafter, growth, budget, PLAIN, VOCAB, root)
            steps.append(strings_of(target, trees, PLAIN, verifier))
        emitted = joint_of_steps(steps, LENGTH)
        assert total_variation(emitted, target.joint(PLAIN, LENGTH)) < EXACT, (kind, seed)


@pytest.mark.parametrize(("name", "verifier"), slow_unless(lambda *case: QUICK.index(case) % 2 == 0, QUICK))
def test_every_growth_with_every_verifier_emits_the_target_s_distribution(name: str, verifier: str) -> None:
    check(name, verifier, [CHOSEN[13 * WAYS.index((name, verifier)) % len(CHOSEN)]])  # each case has its own pair


@pytest.mark.parametrize(
    ("name", "verifier"), slow_unless(lambda *_: False, WAYS, in_ci=lambda *way: WAYS.index(way) % 2 == 0)
)
def test_so_it_does_with_a_random_and_with_an_adversarial_draft_model(name: str, verifier: str) -> None:
    seed = WAYS.index((name, verifier)) % SEEDS
    check(name, verifier, CHOSEN if IS_FULL else [(kind, seed) for kind in PAIRS])


def test_no_growth_is_left_out() -> None:
    public = [getattr(growths, name) for name in growths.__all__]
    policies = {one for one in public if isinstance(one, type) and hasattr(one, "plan") and hasattr(one, "bind")}
    policies -= {growths.Growth, growths.TargetInit}  # TargetInit is lossy
    assert policies == {type(growth) for growth, _ in GROWTHS.values()}


@pytest.mark.parametrize("name", CHECKED)
def test_every_growth_passes_the_check_for_authors(name: str) -> None:
    growth, budget = GROWTHS[name]
    assert check_growth(growth, budget=budget, seeds=(0,)).worst < EXACT


@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
@pytest.mark.parametrize(("growth", "budget", "length"), [(growths.Chain(1), 2, 3), (growths.Static([2]), 3, 2)])
def test_a_run_of_several_steps_emits_the_target_s_distribution(
    growth: Growth, budget: int, length: int, verifier: str
) -> None:
    target, draft = PAIRS["random"](VOCAB, 1)
    emitted = joint_of_loop(target, table_drafter(draft), growth, budget, PLAIN, verifier, length)
    assert total_variation(emitted, target.joint(PLAIN, length)) < EXACT
