"""A target, its texts by transformers' own generate, and ways to draft for it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from helpers.tiny_models import patched, tiny_model
from stree.drafters import ModelDrafter, NoDrafter, SuffixDrafter
from stree.growth import Chain, DySpec, Growth, Static
from stree.models.tree_lm import TreeLM

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3, 4, 2], [9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 21], [1]]
NEW_TOKENS = 24

GROWTHS: dict[str, tuple[Growth | None, int]] = {
    "chain": (Chain(4), 5),
    "static": (Static([3, 2, 1]), 16),
    "stree": (Static.stree(), 13),
    "layers": (None, 16),
    "heap": (DySpec(form="heap"), 5),
}


@cache
def target_model() -> PreTrainedModel:
    return tiny_model("bamba")


@cache
def lm() -> TreeLM:
    return patched(target_model())


@cache
def draft_lm(name: str) -> TreeLM:
    return patched(target_model()) if name == "self" else patched(tiny_model(name))


@cache
def greedy_texts() -> list[list[int]]:
    """Run every prompt alone through transformers."""
    return [transformers_text(target_model(), prompt, NEW_TOKENS) for prompt in PROMPTS]


def transformers_text(model: Any, prompt: list[int], new_tokens: int, **arguments: Any) -> list[int]:
    inputs = torch.tensor([prompt])
    out = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **arguments,
    )
    text: list[int] = out[0].tolist()
    return text


def way(name: str) -> dict[str, Any]:
    """Return drafter, growth and budget as arguments of ``generate``."""
    if name in ("none", "suffix"):
        return {"drafter": NoDrafter(), "budget": 1} if name == "none" else {"drafter": SuffixDrafter(), "budget": 16}
    drafter, growth = name.split("-")
    shape, budget = GROWTHS[growth]
    return {"drafter": ModelDrafter(draft_lm(drafter)), "growth": shape, "budget": budget}
