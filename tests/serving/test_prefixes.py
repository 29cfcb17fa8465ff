"""Prompts that begin as earlier ones start from kept states, of the target and of the draft model.

Run: python -m pytest tests/serving/test_prefixes.py
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from helpers.http_served import Served
from helpers.tiny_models import patched, random_texts, tiny_model

import stree
from stree.drafters import ModelDrafter
from stree.growth import Chain
from stree.models.prefix_cache import PrefixCache
from stree.sampling import Sampling

FAMILIES = [pytest.param("mamba2", marks=pytest.mark.slow), "bamba", pytest.param("llama", marks=pytest.mark.slow)]
SHARED, *ENDS = random_texts(random.Random(0), [180, 9, 9, 9, 9])
EDITED = [*SHARED[:100], *ENDS[3], *SHARED[109:]]
# With the tokens that are shared for certain, and those that are not run.
REQUESTS: list[tuple[list[int], int, int]] = [
    (SHARED + ENDS[0], 180, 0),
    (SHARED + ENDS[1], 180, 180),
    (EDITED + ENDS[0], 0, 0),  # goes another way behind 100 tokens, of which there is no state: it is kept from now on
    ([*SHARED[:100], *ENDS[2]], 0, 100),
    (EDITED + ENDS[1], 0, 100),  # and another way behind the edited text
    (EDITED + ENDS[2], 0, 180),
    (SHARED + ENDS[0], 0, 189),  # all of it
]
KINDS = Sampling(), Sampling(0.9)
NUM_NEW = 6


@cache
def target(family: str) -> stree.TreeLM:
    return patched(tiny_model(family))


@cache
def drafter(family: str) -> ModelDrafter:
    """A model near the target."""
    model = tiny_model(family)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    return ModelDrafter(patched(model))


def plain(family: str, prompt: list[int], sampling: Sampling) -> list[int]:
    """Decode without trees and states of other texts; greedily by forwards of the whole text by an unpatched model."""
    if sampling.is_greedy:
        model, text = tiny_model(family), torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(NUM_NEW):
                text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        return [*map(int, text[0])]
    options: dict[str, Any] = {"max_new_tokens": NUM_NEW, "ignore_eos": True, "seed": 5}
    return stree.generate(target(family), [prompt], "none", sampling=sampling, **options).sequences[0]


def served(family: str, sampling: Sampling, requests: list[tuple[list[int], int, int]] = REQUESTS) -> list[Any]:
    """Decode one request after the other in an engine that keeps states; return what ``result`` does."""
    options: dict[str, Any] = {"growth": Chain(4), "budget": 5, "verifier": "match", "cache_bytes": 10**8}
    with stree.Engine(target(family), drafter(family), max_batch=2, max_length=256, **options) as engine:
        return [
            engine.submit(
                prompt, sampling=sampling, seed=5, max_new_tokens=NUM_NEW, ignore_eos=True, num_shared=num_shared
            ).result(60)
            for prompt, num_shared, _ in requests
        ]


@pytest.mark.parametrize(
    "sampling", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.slow)], ids=["greedy", "match"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_without_kept_states(family: str, sampling: Sampling) -> None:
    for (prompt, _, num_cached), one in zip(REQUESTS, served(family, sampling), strict=True):
        assert one.sequences[0] == plain(family, prompt, sampling)
        assert one.stats["num_cached_tokens"] == num_cached


def test_an_answer_of_one_token_leaves_the_state_of_its_prompt() -> None:
    with stree.Engine(target("bamba"), "none", max_batch=2, max_length=256, cache_bytes=10**8) as engine:
        cached = [engine.submit(ENDS[0], max_new_tokens=1).result(60).stats["num_cached_tokens"] for _ in range(3)]
    assert cached == [0, 9, 9]


def test_a_state_of_another_text_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = PrefixCache.longest

    def another(cache: PrefixCache, *args: Any, **options: Any) -> Any:
        kept, branch = longest(cache, *args, **options)
        if kept is not None:
            state = kept.state.clone()
            state.reset()
            state.lengths += len(kept.tokens)
            kept = replace(kept, state=state)
        return kept, branch

    monkeypatch.setattr(PrefixCache, "longest", another)
    first, second = served("bamba", KINDS[0], REQUESTS[:2])
    assert first.sequences[0] == plain("bamba", REQUESTS[0][0], KINDS[0])
    assert second.sequences[0] != plain("bamba", REQUESTS[1][0], KINDS[0])


def test_a_draft_model_starts_from_kept_states_and_drafts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = list[int]()
    model, whole = drafter("mamba2").lm, stree.TreeLM.forward

    def counted(lm: stree.TreeLM, input_ids: Any, *args: Any, **options: Any) -> Any:
        if lm is model and input_ids.shape[1] > 64:
            lengths.append(input_ids.shape[1])
        return whole(lm, input_ids, *args, **options)

    monkeypatch.setattr(stree.TreeLM, "forward", counted)
    tau = list[float]()
    for cache_bytes in (0, 10**8):
        options: dict[str, Any] = {"growth": Chain(4), "budget": 5, "cache_bytes": cache_bytes}
        with stree.Engine(target("mamba2"), ModelDrafter(model), max_batch=2, max_length=256, **options) as engine:
            for end in ENDS[:2]:
                handle = engine.submit(SHARED + end, max_new_tokens=15, ignore_eos=True, num_shared=180)
                tau.append(handle.result(60).stats["tau"])
    assert lengths == [188, 188, 180], "the second prompt runs 8 tokens"
    assert tau[:2] == tau[2:]


def test_chats_with_one_system_prompt_share_its_state(served: Served) -> None:
    system = {"role": "system", "content": "Answer with one number and nothing else. " * 4}
    cached = list[int]()
    for text in ("What is 2 + 3?", "And how much is 9 - 4?"):
        messages: list[Any] = [system, {"role": "user", "content": text}]
        found = served.client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, temperature=0)
        prompt = f"system: {system['content']}\nuser: {text}\nassistant:"
        assert found.choices[0].message.content == served.alone(prompt, max_new_tokens=5)
        assert found.usage is not None and found.usage.prompt_tokens_details is not None
        cached.append(found.usage.prompt_tokens_details.cached_tokens or 0)
    shared = len(served.tokenizer(f"system: {system['content']}\nuser:")["input_ids"])
    assert cached == [0, shared]
