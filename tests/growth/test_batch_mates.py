"""A seed names a text: with a budget that is a number, sampled text does not depend on what shares the batch.

Run: python -m pytest tests/growth/test_batch_mates.py
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from helpers.draft_steps import GROWTHS
from helpers.fast_cases import slow_unless
from helpers.tiny_heads import target_and_head
from helpers.tiny_models import patched, tiny_model

import stree
from stree.drafters import Drafter, FusedDrafter, HeadDrafter, ModelDrafter, SuffixDrafter
from stree.sampling import Sampling

PROMPTS = [[5, 17, 9, 33, 20], [4, 8, 9, 4, 8, 9, 4], [7], [1, 2, 3, 4, 1, 2, 3]]
TRUNCATIONS = {
    "whole": Sampling(1.0), "top-k": Sampling(1.0, top_k=3), "top-p": Sampling(0.9, top_p=0.4),
    "both": Sampling(1.1, top_k=5, top_p=0.6), "min-p": Sampling(1.0, min_p=0.4),
}  # fmt: skip


@cache
def case(name: str) -> tuple[stree.TreeLM, Drafter]:
    """Return a target in float64, so that there are no near-ties, and a drafter whose drafts are often accepted."""
    if name == "head":
        lm, head = target_and_head("qwen3_next", dtype=torch.float64)
        return lm, HeadDrafter(head)
    lm, near = patched(tiny_model("bamba", torch.float64)), tiny_model("bamba", torch.float64)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, dtype=torch.float64))
    model, suffix = ModelDrafter(patched(near)), SuffixDrafter()
    return lm, model if name == "model" else FusedDrafter(model, suffix)


DRAFTERS = ("model", "head", "fused")
CASES = [
    (drafter, growth, truncation, verifier)
    for drafter in DRAFTERS
    for growth in GROWTHS
    for truncation in TRUNCATIONS
    for verifier in ("traversal", "rejection")
    if growth != "none"
]


def is_fast(drafter: str, growth: str, truncation: str, verifier: str) -> bool:
    return (drafter, growth, truncation, verifier) == ("model", "eagle2", "both", "traversal")


def in_ci(drafter: str, growth: str, truncation: str, verifier: str) -> bool:
    """Whether a case is in a cover: each growth whose trees differ in size, with drafters and truncations in turn."""
    if growth in ("rsds", "opt-tree"):  # whose trees differ most
        return (drafter, truncation, verifier) == ("model", "both", "traversal")
    if growth in ("chain", "static", "sequoia", "specinfer"):
        return False
    place = [*GROWTHS].index(growth)
    own = DRAFTERS[place % len(DRAFTERS)], [*TRUNCATIONS][place % len(TRUNCATIONS)]
    return (drafter, truncation) == own and (verifier == "rejection") == (place % 4 == 0)


@pytest.mark.parametrize(("drafter", "growth", "truncation", "verifier"), slow_unless(is_fast, CASES, in_ci=in_ci))
def test_no_sampled_text_depends_on_its_batch(drafter: str, growth: str, truncation: str, verifier: str) -> None:
    lm, chosen = case(drafter)
    arguments: dict[str, Any] = {
        "growth": GROWTHS[growth], "budget": 14, "sampling": TRUNCATIONS[truncation], "max_new_tokens": 24, "seed": 3,
        "verifier": verifier,
    }  # fmt: skip
    together = stree.generate(lm, PROMPTS, chosen, **arguments)
    assert stree.generate(lm, PROMPTS, chosen, max_batch=1, **arguments).sequences == together.sequences
