"""Sampled generation has the target's distribution: three consecutive tokens against exact enumeration by transformers.

The text is a prompt, one token from prefill and then the three tokens that are counted, so that a step's own tokens,
the bonus or recovered token after them and the next step's tokens all take part; a number that served twice is seen.
Every pair of growth and verifier is measured by ``benchmarks/studies/lossless.py``, whose models and counts these are.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.tiny_models import fresh_logits
from scipy import stats

import stree
from benchmarks.studies.lossless import (
    ALPHA,
    BATCH,
    COUNTED,
    PROMPT,
    SAMPLES,
    TEMPERATURES,
    VOCAB,
    WAYS,
    exact_probs,
    models,
    p_value,
    pairs,
    policy,
    sampled_counts,
    target_model,
)  # fmt: skip
from stree.drafters import Drafter, NoDrafter
from stree.growth import Growth
from stree.kernels.step.texts import Seen, Texts
from stree.sampling import Sampling

PLAIN = Sampling(1.0)


def test_the_exact_distribution_is_not_flat_and_the_draft_differs_from_it() -> None:
    dist = exact_probs(PLAIN)
    assert float(dist.sum()) == pytest.approx(1)
    assert float(dist.max() / dist.min()) > 20
    texts = [[*PROMPT, *text] for text in itertools.product(range(VOCAB), repeat=2)]
    pair = (target_model(), models()[1].model)
    dists = [torch.stack([fresh_logits(model, text)[-1].softmax(-1) for text in texts]) for model in pair]
    assert float((dists[0] - dists[1]).abs().sum(-1).mean() / 2) > 0.1


# Both sampled verifiers, with trees that are drawn and trees that are searched; "layers" is sampled below, and match
# is compared token by token.  STREE_FULL=1 runs all pairs.
FIXED_PAIRS = [("rsds", "traversal"), pytest.param("static", "rejection", marks=pytest.mark.exhaustive)]
IS_FULL = os.environ.get("STREE_FULL", "0") == "1"
FEWER = SAMPLES if IS_FULL else 4 * BATCH


@pytest.mark.parametrize(("samples", "bias"), [(SAMPLES, 0.02), (4 * BATCH, 0.04)])
def test_a_bias_is_seen_in_so_many_samples(samples: int, bias: float) -> None:
    # Of all distributions at a total variation d from the exact one, chi-square sees the one worst whose difference is
    # spread in proportion to it: its non-centrality is 4 N d^2.
    freedom = VOCAB**COUNTED - 1
    critical = stats.chi2.isf(ALPHA, freedom)
    assert stats.ncx2.sf(critical, freedom, 4 * samples * bias**2) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES if IS_FULL else [1.0])
@pytest.mark.parametrize(("name", "verifier"), list(pairs()) if IS_FULL else FIXED_PAIRS)
def test_three_consecutive_tokens_have_the_target_s_distribution(name: str, verifier: str, temperature: float) -> None:
    counts, reports = sampled_counts(*policy(name), verifier, Sampling(temperature), FEWER)
    assert int(counts.sum()) == FEWER
    assert all(report["steps"] >= 2 for report in reports), "the tokens should cross the border of a step"
    assert max(len(report["acceptance_by_depth"]) for report in reports) >= 2
    assert p_value(counts, exact_probs(Sampling(temperature))) > ALPHA


@pytest.mark.slow
def test_three_consecutive_tokens_have_the_distribution_after_top_k_and_top_p() -> None:
    sampling = Sampling(0.8, top_k=3, top_p=0.9)
    dist = exact_probs(sampling)
    assert (dist == 0).any()
    counts, _ = sampled_counts(*policy("layers"), "auto", sampling, FEWER)
    assert p_value(counts, dist) > ALPHA


@pytest.mark.parametrize("name", slow_unless(lambda name: [*WAYS].index(name) % 2 == 0, WAYS))
def test_match_gives_the_tokens_of_plain_sampling_with_every_growth(name: str) -> None:
    def texts(drafter: Drafter, growth: Growth | None, budget: int) -> list[list[int]]:
        prompts = [PROMPT, [3], [0, 0, 1, 3, 2]] * 2
        options: dict[str, Any] = {"verifier": "match", "sampling": Sampling(0.9), "max_new_tokens": 12, "seed": 3}
        return stree.generate(models()[0], prompts, drafter, growth=growth, budget=budget, **options).sequences

    assert texts(*policy(name)) == texts(NoDrafter(), None, 1)


@pytest.mark.slow
def test_random_numbers_used_again_in_the_next_step_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Seen.update

    def without_lengths(seen: Seen, texts: Texts) -> None:
        if int(seen.lengths.min()):
            seen.pending.copy_(texts.pending)
        else:  # the first step
            update(seen, texts)

    monkeypatch.setattr(Seen, "update", without_lengths)
    counts, _ = sampled_counts(*policy("chain"), "match", PLAIN, 2 * BATCH)
    assert p_value(counts, exact_probs(PLAIN)) < ALPHA
