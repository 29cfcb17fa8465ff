"""Greedy text through the hook is transformers' own under everything that reads or forces the text.

Run: python -m pytest tests/integrations/test_hook_processors.py (720 cases; CI runs those that are not exhaustive)
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
from helpers.fast_cases import slow_unless
from helpers.hooked_generate import PROMPTS, Copying, draft_model, hooked, new_tokens, plain
from helpers.tiny_heads import target_and_block_head
from helpers.tiny_models import VOCAB, patched

from stree.drafters import Drafter, FusedDrafter, HeadDrafter, ModelDrafter, SuffixDrafter

# Matrix states beside attention, diagonal states, gated DeltaNet, convolutions, attention alone.
FAMILIES = ("bamba", "mamba", "qwen3_5_text", "lfm2", "llama")
DRAFTERS = ("model", "head", "suffix", "fused")
STOP = 13
WHAT: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 2.0},
    "own processor, of another dtype": {"logits_processor": [Copying(), lambda _, scores: scores.double()]},
    "no repeated n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[84], [87, 10], [18], [52]]},
    "min new tokens": {"min_new_tokens": 8, "eos_token_id": [STOP, 84, 18, 52, 87]},
    "forced tokens": {"forced_eos_token_id": STOP, "forced_bos_token_id": 5},
    "suppressed tokens": {"suppress_tokens": [*range(50)], "begin_suppress_tokens": [60, 61]},
    "decay": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": [10, 11, 12]},
    "allowed prefixes": {
        "prefix_allowed_tokens_fn": lambda _, text: [(int(text[-1]) * 7 + place) % VOCAB for place in range(9)]
    },
}


@cache
def drafter(family: str, name: str) -> Drafter:
    if name == "head":
        return HeadDrafter(target_and_block_head(family)[1])
    model, suffix = ModelDrafter(patched(draft_model())), SuffixDrafter()
    return {"model": model, "suffix": suffix, "fused": FusedDrafter(model, suffix)}[name]


@cache
def expected(family: str, what: str, place: int) -> list[int]:
    return plain(target_and_block_head(family)[0].model, PROMPTS[place], **WHAT[what])


def is_fast(what: str, name: str, count: int, budget: Any, family: str) -> bool:
    is_one = family == "llama" and budget == "auto" and count == 3
    return is_one and name == ("model" if what.startswith(("own", "allowed", "forced")) else "fused")


def in_ci(what: str, name: str, count: int, budget: Any, family: str) -> bool:
    """Whether a case is one of a cover of pairs."""
    place = [*WHAT].index(what) + DRAFTERS.index(name)
    return budget == "auto" and count == 3 and FAMILIES[place % len(FAMILIES)] == family


@pytest.mark.parametrize(
    ("what", "name", "count", "budget", "family"),
    slow_unless(is_fast, itertools.product(WHAT, DRAFTERS, (1, 3), (16, "auto"), FAMILIES), in_ci=in_ci),
)
def test_greedy_text_is_that_of_transformers(what: str, name: str, count: int, budget: Any, family: str) -> None:
    model, prompts = target_and_block_head(family)[0].model, PROMPTS[:count]
    out = hooked(model, prompts, drafter=drafter(family, name), budget=budget, **WHAT[what])
    for place, found in enumerate(new_tokens(prompts, out)):
        wanted = expected(family, what, place)
        assert found[: len(wanted)] == wanted and not any(found[len(wanted) :])
