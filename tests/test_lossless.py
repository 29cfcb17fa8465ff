"""Sampled generation has the target's law: three consecutive tokens against exact enumeration by transformers.

The text is a prompt, one token from prefill and then the three tokens that are counted, so that a step's own tokens,
the bonus or recovered token after them and the next step's tokens all take part; a number that served twice is seen.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from scipy import stats
from tiny_models import fresh_logits, grafted, tiny_model
from torch import Tensor

import stree
from stree.drafters import Draft, Drafter, DraftRun, ModelDrafter, SuffixDrafter
from stree.growth import Chain, DySpec, Growth, Static
from stree.models.tree_lm import TreeLM
from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify import Acceptance

ALPHA = 1e-6  # false alarms a test; seeds are fixed, so it passes always or never
SAMPLES = 70_000
BATCH = 5_000
VOCAB = 4
COUNTED = 3  # consecutive tokens, after the one that prefill gives
PROMPT = [1, 2]
PLAIN = Sampling(1.0)


@cache
def target_model() -> Any:
    sizes: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}
    layers: dict[str, Any] = {"num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_chunk_size": 2}
    return tiny_model("bamba", vocab_size=VOCAB, hidden_size=16, **sizes, **heads, **layers)


@cache
def models() -> tuple[TreeLM, TreeLM]:
    """Give target and drafter."""
    sizes: dict[str, Any] = {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1}
    layers: dict[str, Any] = {"num_hidden_layers": 1, "chunk_size": 2}
    drafter = tiny_model("mamba2", seed=1, vocab_size=VOCAB, hidden_size=16, **sizes, **layers)
    return grafted(target_model()), TreeLM(drafter)


@cache
def exact_law(sampling: Sampling) -> Tensor:
    """Enumerate the law of the counted tokens by fresh forwards: float64[VOCAB ** COUNTED]."""
    joint = torch.ones(1, dtype=torch.float64)
    for size in range(COUNTED + 1):
        texts = [[*PROMPT, *text] for text in itertools.product(range(VOCAB), repeat=size)]
        laws = [sampling.law(fresh_logits(target_model(), text)[-1].double()) for text in texts]
        joint = (joint[:, None] * torch.stack(laws)).flatten()
    return joint.view(VOCAB, -1).sum(0)


def p_value(counts: Tensor, law: Tensor) -> float:
    """Test counts against a law by chi-square; cells of less than five expected samples are put together."""
    assert counts[law == 0].sum() == 0, "a text of probability zero was sampled"
    expected = law * counts.sum()
    small = expected < 5
    observed = torch.cat([counts[~small].double(), counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    kept = expected > 0
    return float(stats.chisquare(observed[kept].numpy(), expected[kept].numpy()).pvalue)


def sampled_counts(
    drafter: Drafter | None,
    growth: Growth | None,
    budget: int,
    verifier: str,
    sampling: Sampling = PLAIN,
    samples: int = SAMPLES,
) -> tuple[Tensor, list[dict[str, Any]]]:
    """Generate many texts and count the tokens after prefill's: int64[VOCAB ** COUNTED], and the statistics."""
    counts = torch.zeros(VOCAB**COUNTED, dtype=torch.long)
    reports = []
    for seed in range(samples // BATCH):
        out = stree.generate(
            models()[0],
            [PROMPT] * BATCH,
            drafter,
            growth,
            budget,
            verifier,
            sampling,
            max_new_tokens=COUNTED + 1,
            seed=seed,
        )
        tokens = torch.tensor(out.sequences)[:, len(PROMPT) + 1 :]
        numbers = (tokens * VOCAB ** torch.arange(COUNTED - 1, -1, -1)).sum(1)
        counts += torch.bincount(numbers, minlength=len(counts))
        reports.append(out.stats)
    return counts, reports


def policy(name: str) -> tuple[Drafter, Growth | None, int]:
    """Give drafter, growth and budget of a way to draft."""
    model = ModelDrafter(models()[1])
    ways: dict[str, tuple[Drafter, Growth | None, int]] = {
        "chain": (model, Chain(2), 3),
        "static": (model, Static([2, 2]), 7),
        "layers": (model, DySpec(depth=2, ranks=3), 6),
        "heap": (model, DySpec(form="heap"), 4),
        "suffix": (SuffixDrafter(), None, 6),
    }
    return ways[name]


def test_the_exact_law_is_not_flat_and_the_draft_differs_from_it() -> None:
    law = exact_law(PLAIN)
    assert float(law.sum()) == pytest.approx(1)
    assert float(law.max() / law.min()) > 20
    texts = [[*PROMPT, *text] for text in itertools.product(range(VOCAB), repeat=2)]
    pair = (target_model(), models()[1].model)
    laws = [torch.stack([fresh_logits(model, text)[-1].softmax(-1) for text in texts]) for model in pair]
    assert float((laws[0] - laws[1]).abs().sum(-1).mean() / 2) > 0.1


def test_a_total_variation_of_0_02_is_seen() -> None:
    # Of all laws at a total variation d from the exact one, chi-square sees the one worst whose difference is spread in
    # proportion to it: its non-centrality is 4 N d^2.
    freedom = VOCAB**COUNTED - 1
    critical = stats.chi2.isf(ALPHA, freedom)
    assert stats.ncx2.sf(critical, freedom, 4 * SAMPLES * 0.02**2) > 0.95


# Every growth and every verifier is in the fixed part; STREE_FULL=1 runs every pair of them.
GROWTHS, RULES = ("chain", "static", "layers", "heap", "suffix"), ("match", "rejection", "traversal")
FIXED_PAIRS = [
    ("chain", "traversal"),
    ("static", "rejection"),
    ("layers", "traversal"),
    ("layers", "match"),
    ("heap", "rejection"),
    ("suffix", "match"),
]
IS_FULL = os.environ.get("STREE_FULL", "0") == "1"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "verifier"), list(itertools.product(GROWTHS, RULES)) if IS_FULL else FIXED_PAIRS)
def test_three_consecutive_tokens_have_the_target_s_law(name: str, verifier: str) -> None:
    counts, reports = sampled_counts(*policy(name), verifier)
    assert int(counts.sum()) == SAMPLES
    assert all(report["steps"] >= 2 for report in reports), "the tokens should cross the border of a step"
    assert max(len(report["acceptance_by_depth"]) for report in reports) >= 2
    assert p_value(counts, exact_law(PLAIN)) > ALPHA


@pytest.mark.slow
def test_three_consecutive_tokens_have_the_law_after_top_k_and_top_p() -> None:
    sampling = Sampling(0.8, top_k=3, top_p=0.9)
    law = exact_law(sampling)
    assert (law == 0).any()
    counts, _ = sampled_counts(*policy("layers"), "auto", sampling)
    assert p_value(counts, law) > ALPHA


class SortedDrafter:
    """Two drawn children, put in descending order of probability before the test, as STree's released sampler does."""

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> SortedDrafter:
        self.run: DraftRun = ModelDrafter(models()[1]).start(vocab_size, prompts, rng)
        return self

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        draft = self.run.propose(pending, growth, budget)
        assert draft.laws is not None
        probs = draft.laws.probs[:, 0].gather(1, draft.tree.tokens)
        is_wrong = (probs[:, 2] > probs[:, 1])[:, None]
        tokens = draft.tree.tokens.clone()
        tokens[:, 1:] = torch.where(is_wrong, tokens[:, 1:].flip(1), tokens[:, 1:])
        return replace(draft, tree=TokenTree.unchecked(tokens, draft.tree.parents))

    def observe(self, acceptance: Acceptance) -> None:
        # The drafter's own tree has the other order, but one that is out of step would still be tested without bias.
        self.run.observe(acceptance)


@pytest.mark.slow
def test_siblings_sorted_by_probability_before_the_test_are_found_out() -> None:
    growth = Static([2])
    counts, _ = sampled_counts(SortedDrafter(), growth, 3, "rejection", samples=4 * BATCH)
    assert p_value(counts, exact_law(PLAIN)) < ALPHA
    counts, _ = sampled_counts(policy("static")[0], growth, 3, "rejection", samples=4 * BATCH)
    assert p_value(counts, exact_law(PLAIN)) > ALPHA


@pytest.mark.slow
def test_random_numbers_used_again_in_the_next_step_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Random, "at", lambda rng, positions: rng)
    counts, _ = sampled_counts(*policy("chain"), "match", samples=2 * BATCH)
    assert p_value(counts, exact_law(PLAIN)) < ALPHA
