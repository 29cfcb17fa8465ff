"""The hook samples: the distribution that transformers' own processors make, and seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.hooked_generate import PROMPTS, SMALL, hooked, new_tokens, small, target
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

# Sampling.  Joint frequencies of the first three tokens against their exact distribution, which transformers' own
# processors make of fresh forwards.  Seeds are fixed; the significance is 1e-3.  Each distribution has a control that
# must be rejected.
SAMPLES = {"temperature": 3000, "min-p": 3000}  # 2000 of the other distributions, whose controls are coarser
PROCESSORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "temperature": ({"temperature": 0.2, "top_k": 0}, {"temperature": 0.17}),
    "top-k": ({"temperature": 1.3, "top_k": 4}, {"top_k": 5}),
    "top-p": ({"temperature": 1.5, "top_k": 0, "top_p": 0.7}, {"top_p": 0.8}),
    "min-p": ({"temperature": 1.2, "top_k": 0, "min_p": 0.2}, {"min_p": 0.1}),
    "all": (
        {"temperature": 1.4, "top_k": 6, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.5},
        {"repetition_penalty": 1.0},
    ),
}


def probs_after(model: PreTrainedModel, texts: Tensor, options: dict[str, Any]) -> Tensor:
    """Return next-token distributions, float64[texts, vocab], by transformers' own processors in its own order."""
    known: dict[str, Callable[[Any], Any]] = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    chosen = LogitsProcessorList([make(options[name]) for name, make in known.items() if options.get(name)])
    with torch.no_grad():
        logits = model(texts, use_cache=False).logits[:, -1]
    probs: Tensor = chosen(texts, logits).softmax(-1).double()
    return probs


def joint_probs(model: PreTrainedModel, prompt: list[int], options: dict[str, Any]) -> Tensor:
    """Enumerate the distribution of the next three tokens: float64[vocab ** 3]."""
    probs, texts = torch.ones(1, dtype=torch.float64), torch.tensor([prompt])
    for _ in range(3):
        probs = (probs[:, None] * probs_after(model, texts, options)).flatten()
        texts = torch.cat([texts.repeat_interleave(SMALL, 0), torch.arange(SMALL).repeat(len(texts))[:, None]], 1)
    return probs


def p_value(counts: Tensor, probs: Tensor) -> float:
    """Test counts against a distribution, rare cells together."""
    expected = probs * counts.sum()
    assert float(probs.sum()) == pytest.approx(1, abs=1e-5)
    if bool(counts[probs == 0].any()):
        return 0.0
    is_rare = expected < 5  # the approximation by chi-square needs five a cell
    cells = [torch.cat([one[~is_rare], one[is_rare].sum()[None]]) for one in (counts, expected)]
    is_empty = cells[1] < 1e-9
    return float(chisquare(cells[0][~is_empty], cells[1][~is_empty] * (counts.sum() / cells[1].sum())).pvalue)


def sampled(options: dict[str, Any], prompts: list[list[int]], **arguments: Any) -> Tensor:
    """Count the first three tokens after every prompt: float64[vocab ** 3]."""
    out = hooked(small("bamba"), prompts, do_sample=True, max_new_tokens=3, seed=0, **options, **arguments)
    cells = out[:, -3] * SMALL**2 + out[:, -2] * SMALL + out[:, -1]
    return torch.bincount(cells, minlength=SMALL**3).double()


@pytest.mark.parametrize(
    ("name", "drafter"),
    slow_unless(
        lambda *_: False,
        [*((name, "rejection") for name in PROCESSORS), ("all", "match"), ("all", "suffix")],
        in_ci=lambda name, drafter: (name, drafter) in (("all", "rejection"), ("all", "suffix")),
    ),
)
def test_sampled_texts_follow_transformers_own_distribution(name: str, drafter: str) -> None:
    prompt, (options, change) = [3, 4, 5, 3, 4, 5, 3], PROCESSORS[name]
    arguments: dict[str, Any] = {"budget": 8}
    if drafter != "suffix":
        arguments |= {"drafter": small("mamba2"), "verifier": drafter}
    counts = sampled(options, [prompt] * SAMPLES.get(name, 2000), **arguments)
    assert p_value(counts, joint_probs(small("bamba"), prompt, options)) > 1e-3
    assert p_value(counts, joint_probs(small("bamba"), prompt, options | change)) < 1e-6, "the test has no power"


def test_a_seed_fixes_the_text_and_torch_s_seed_does_so_by_default() -> None:
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.2}

    def text(torch_seed: int, **arguments: Any) -> list[list[int]]:
        torch.manual_seed(torch_seed)
        return new_tokens(PROMPTS, hooked(target(), PROMPTS, **options, **arguments))

    assert text(1, seed=5) == text(2, seed=5) != text(2, seed=6)
    assert text(1) == text(1) != text(2)
    torch.manual_seed(1)
    first, second = (new_tokens(PROMPTS, hooked(target(), PROMPTS, **options)) for _ in range(2))
    assert first != second, "two calls in a row must not repeat each other"


def test_returned_sequences_are_sampled_independently() -> None:
    out = hooked(target(), PROMPTS[:1], do_sample=True, num_return_sequences=4, seed=1)
    assert len({tuple(row) for row in out.tolist()}) == 4
