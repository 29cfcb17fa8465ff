"""Requests of different kinds, and the texts that each of them gets alone."""

from __future__ import annotations

from typing import Any

import stree
from helpers.captured import near_drafter
from helpers.draft_steps import GROWTHS
from stree.drafters import FusedDrafter, NoDrafter, SuffixDrafter
from stree.sampling import Sampling
from stree.serving import RequestHandle

PROMPTS = [[5, 6, 7, 8], [9, 4, 9, 4, 9], [4, 5, 6, 4, 5, 6, 4], [8, 8, 3], [7, 1, 2], [3] * 20, [11, 12], [1, 2, 1, 2]]
KINDS = [
    Sampling(), Sampling(0.8), Sampling(1.0, top_k=5), Sampling(), Sampling(1.2, top_p=0.8), Sampling(0.7, min_p=0.05),
    Sampling(0.9), Sampling(),
]  # fmt: skip
LIMITS = [12, 9, 24, 1, 14, 8, 17, 30]
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "none": (NoDrafter(), {"budget": 1}),
    "suffix": (SuffixDrafter(), {"budget": 9}),
    "fused": (FusedDrafter(near_drafter(), SuffixDrafter()), {"budget": 13}),
    "named": (near_drafter(), {"growth": "calibrated:12x3"}),
    **{name: (near_drafter(), {"budget": 12, "growth": growth}) for name, growth in GROWTHS.items()},
}


def options(place: int) -> dict[str, Any]:
    """Return the parameters of a request."""
    return {"sampling": KINDS[place], "max_new_tokens": LIMITS[place], "seed": place // 2, "ignore_eos": True}


def alone(lm: stree.TreeLM, way: tuple[Any, dict[str, Any]], place: int) -> list[int]:
    """Return the text of a request that runs alone, without the engine."""
    return stree.generate(lm, [PROMPTS[place]], way[0], **way[1], **options(place)).sequences[0]


def submit(engine: stree.Engine, place: int, **changed: Any) -> RequestHandle:
    """Submit a request."""
    return engine.submit(PROMPTS[place], **{**options(place), **changed})
