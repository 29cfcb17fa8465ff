"""Target-initialised candidates: refused unless allowed, named lossy, exact with one candidate and biased with two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stree
from stree.drafters import NoDrafter, SuffixDrafter
from stree.drafters.target_init import TargetInitDrafter
from stree.growth import Chain, TargetInit
from stree.sampling import Random, Sampling
from stree.testing.tables import TableLM, TableModel, table_drafter
from stree.verify import LONGEST, VERIFIERS, Acceptance

TARGET, DRAFT = TableModel.random(4, 1), TableModel.random(4, 2)
PLAIN = Sampling(1.0)


def generate(growth: Any, prompts: list[list[int]], drafter: Any = None, **options: Any) -> stree.Generation:
    drafter = table_drafter(DRAFT) if drafter is None else drafter
    return stree.generate(TableLM(TARGET).as_lm(), prompts, drafter, growth=growth, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "TargetInit does not keep the target's distribution; it runs only with allow_lossy=True"),
        ({"allow_lossy": True, "drafter": SuffixDrafter()}, "TargetInit needs a ModelDrafter, got SuffixDrafter"),
        ({"allow_lossy": True, "budget": 12}, r"a tree of 13 nodes \(root included\) exceeds the budget of 12"),
        ({"allow_lossy": True, "budget": 1}, r"a tree of 13 nodes \(root included\) exceeds the budget of 1"),
        ({"allow_lossy": True, "verifier": "match"}, "leave verifier at 'auto', got 'match'"),
    ],
    ids=["not-allowed", "drafter", "budget", "plain", "verifier"],
)
def test_what_cannot_run_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(TargetInit(2), [[0]], **options)


def test_its_default_budget_is_its_own_size() -> None:
    options: dict[str, Any] = {"allow_lossy": True, "max_new_tokens": 8, "sampling": PLAIN}
    large = TargetInit(12, 7)  # 97 nodes
    found = generate(large, [[0]], **options)
    assert found.sequences == generate(large, [[0]], budget=97, **options).sequences
    assert found.stats["budget"] == "auto"


def test_its_verifier_cannot_be_chosen() -> None:
    assert LONGEST not in VERIFIERS
    with pytest.raises(ValueError, match="verifier must be one of auto"):
        generate(Chain(2), [[0]], verifier=LONGEST)


def test_statistics_name_it_lossy_and_others_not() -> None:
    out = generate(TargetInit(2, 2), [[0]], allow_lossy=True, max_new_tokens=8, sampling=PLAIN)
    assert out.stats["lossless"] is False
    assert out.stats["growth"] == "lossy: TargetInit(width=2, depth=2)"
    assert out.stats["verifier"] == LONGEST
    assert generate(Chain(2), [[0]], max_new_tokens=8, allow_lossy=True).stats["lossless"] is True


def test_one_candidate_gives_the_greedy_text_and_two_do_not() -> None:
    # The target goes 2 - 3 - 0 - 1 - 0, the draft errs after 1 alone; 3 is second best after 3 and 1, and lasts longer.
    target = torch.tensor([[0.0, 3, 2, 1], [3, 0, 1, 2], [0, 1, 2, 3], [3, 0, 1, 2]], dtype=torch.float64)
    draft = torch.tensor([[0.0, 3, 2, 1], [0, 1, 3, 2], [0, 1, 2, 3], [3, 0, 1, 2]], dtype=torch.float64)
    drafter, lm = table_drafter(TableModel(draft)), TableLM(TableModel(target)).as_lm()

    def text(width: int) -> list[int]:
        out = stree.generate(lm, [[2]], drafter, growth=TargetInit(width, 2), allow_lossy=True, max_new_tokens=8)
        return out.sequences[0]

    assert text(1) == stree.generate(lm, [[2]], NoDrafter(), budget=1, max_new_tokens=8).sequences[0]
    assert text(1) == [2, 3, 0, 1, 0, 1, 0, 1, 0]
    assert text(2) == [2, 3, 3, 0, 1, 3, 0, 1, 3]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_candidates_are_drawn_from_the_distribution_that_was_left_at_any_temperature(temperature: float) -> None:
    rng = Random(0, torch.arange(1), torch.ones(1, dtype=torch.long))
    run = TargetInitDrafter(table_drafter(DRAFT).lm).start(4, [[0]], rng)
    growth, pending = TargetInit(1, 1).bind(Sampling(temperature)), torch.zeros(1, dtype=torch.long)
    run.propose(pending, growth, 3)
    left, nothing = torch.tensor([[0.1, 0.2, 0.3, 0.4]]), torch.zeros(1, 3, dtype=torch.int32)
    run.observe(Acceptance(nothing, nothing[:, 0], pending, left=left))
    dists = run.propose(pending, growth, 3).probs
    assert dists is not None
    torch.testing.assert_close(dists.probs[:, 0], left, check_dtype=False)
