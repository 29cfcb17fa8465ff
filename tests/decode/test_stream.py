"""``stream`` gives the tokens of ``generate`` one by one, and ends where it is closed.

Run: python -m pytest tests/decode/test_stream.py
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import sleep
from typing import Any

import pytest
import torch
from helpers.captured import TEXTS, captured, launched, near_drafter
from helpers.fast_cases import slow_unless
from torch import Tensor
from transformers import AutoTokenizer

import stree
from stree.decode.text import text_of
from stree.drafters import NoDrafter, SuffixDrafter
from stree.growth import Chain
from stree.inputs import ASSETS
from stree.models.state import DecodeState
from stree.sampling import Sampling

PROMPT = TEXTS[0]
WAYS: list[dict[str, Any]] = [
    {"drafter": NoDrafter()},
    {"drafter": SuffixDrafter(), "sampling": Sampling(0.8), "seed": 5, "verifier": "match"},
    {"drafter": near_drafter(), "growth": "chain:4", "budget": 5, "logprobs": 1},
    {"drafter": near_drafter(), "growth": Chain(2), "budget": 4, "repetition_penalty": 1.4},
]


@pytest.mark.parametrize(
    "options", slow_unless(lambda way: way in (WAYS[0], WAYS[3]), WAYS), ids=["plain", "suffix", "chain", "penalty"]
)
def test_tokens_are_those_of_generate_whatever_runs_between_them(options: dict[str, Any]) -> None:
    expected = stree.generate(launched(), [PROMPT], max_new_tokens=14, **options)
    streams = [stree.stream(launched(), prompt, max_new_tokens=14, **options) for prompt in (PROMPT, [PROMPT])]
    together = list(zip(*streams, strict=True))  # two states, one model
    assert [list(text) for text in zip(*together, strict=True)] == [expected.sequences[0][len(PROMPT) :]] * 2
    result = streams[0].result
    assert result.sequences == expected.sequences and result.stats["tau"] == expected.stats["tau"]
    assert result.logprobs == expected.logprobs and next(streams[0], None) is None


def test_text_comes_in_pieces_of_whole_characters() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target")
    prompt = tokenizer("caf")["input_ids"]
    options: dict[str, Any] = {"drafter": NoDrafter(), "max_new_tokens": 12, "sampling": Sampling(3.0), "seed": 2}
    lm = stree.TreeLM.from_pretrained(ASSETS / "target", "cpu")
    tokens = stree.stream(lm, prompt, **options)
    new = [*stree.stream(lm, prompt, **options)]
    pieces = [*tokens.text(tokenizer)]
    assert len(pieces) > 1 and all(pieces) and tokens.result.new_tokens == [new]
    assert "".join(pieces) == text_of(tokenizer, prompt, new)
    later = stree.stream(lm, prompt, **options)
    next(later)
    assert "".join(later.text(tokenizer)) == text_of(tokenizer, [*prompt, new[0]], new[1:])


def test_threads_share_the_tokens_of_a_stream_and_any_of_them_closes_it() -> None:
    def slow(_: Tensor, logits: Tensor) -> Tensor:
        sleep(0.01)  # the others ask for a token while a step runs
        return logits

    options: dict[str, Any] = {"drafter": NoDrafter(), "logits_processor": slow}
    whole = stree.generate(launched(), [PROMPT], max_new_tokens=20, **options).new_tokens[0]
    tokens = stree.stream(launched(), PROMPT, max_new_tokens=20, **options)
    closed = stree.stream(launched(), PROMPT, max_new_tokens=150, **options)
    with ThreadPoolExecutor(3) as threads:
        assert sorted(sum(threads.map(list, [tokens] * 3), [])) == sorted(whole)
        taken = threads.submit(list, closed)
        next(closed)
        closed.close()
        assert len(taken.result()) < 150 and closed.stats["finish_reasons"] == ["cancelled"]


@pytest.mark.parametrize("is_captured", slow_unless(bool, [False, True]))
@pytest.mark.slow
def test_a_stream_that_is_closed_is_cancelled_and_frees_its_memory(
    is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[weakref.ref[DecodeState]] = []
    new_state = stree.TreeLM.new_state

    def noted(self: Any, *arguments: Any) -> DecodeState:
        states.append(weakref.ref(state := new_state(self, *arguments)))
        return state

    lm = captured(monkeypatch) if is_captured else launched()
    whole = stree.generate(lm, [PROMPT], NoDrafter(), max_new_tokens=30).sequences[0]
    monkeypatch.setattr(stree.TreeLM, "new_state", noted)
    tokens = stree.stream(lm, PROMPT, NoDrafter(), max_new_tokens=30)
    taken = [next(tokens) for _ in range(4)]
    tokens.close()
    assert [*tokens] == [] and tokens.stats["finish_reasons"] == ["cancelled"]
    assert tokens.result.sequences == [[*PROMPT, *taken]] == [whole[: len(PROMPT) + 4]]
    dropped = stree.stream(lm, PROMPT, NoDrafter(), max_new_tokens=30)
    next(dropped)
    del dropped
    gc.collect()
    assert is_captured or (states and not any(state() for state in states))
    if is_captured:
        lm.cache["step_cache"].release()
        gc.collect()
        assert not any(state() for state in states)
    assert stree.generate(lm, [PROMPT], NoDrafter(), max_new_tokens=30).sequences == [whole]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_a_thread_or_generator_holds_cannot_be_copied(duplicate: Callable[[Any], Any]) -> None:
    stream = stree.stream(launched(), PROMPT, max_new_tokens=3)
    with stree.Engine(launched(), max_batch=1, max_length=64) as engine:
        for held in (engine, engine.submit(PROMPT, max_new_tokens=3), stream):
            with pytest.raises(TypeError, match=f"{type(held).__name__} cannot be copied or pickled"):
                duplicate(held)
    assert [*stream] == stree.generate(launched(), [PROMPT], max_new_tokens=3).new_tokens[0]


def test_arguments_are_checked_by_the_call_and_failures_come_with_the_text() -> None:
    for prompt, options, error, message in [
        (TEXTS, {}, ValueError, "a stream takes one prompt, got 2"),
        (iter(TEXTS), {}, ValueError, "a stream takes one prompt, got an iterator of them"),
        (PROMPT, {"num_samples": 2}, TypeError, "stream takes generate's options for one text, got num_samples"),
        (PROMPT, {"budget": 0}, ValueError, "budget must be at least 1, got 0"),
    ]:
        with pytest.raises(error, match=message):
            stree.stream(launched(), prompt, **options)  # type: ignore[arg-type]
    calls: list[int] = []

    def failing(_: Tensor, logits: Tensor) -> Tensor:
        calls.append(1)
        return logits if len(calls) < 4 else torch.full_like(logits, torch.nan)

    tokens, taken = stree.stream(launched(), PROMPT, NoDrafter(), logits_processor=failing), []
    with pytest.raises(stree.GenerationError) as caught:
        for token in tokens:
            taken.append(token)
    assert caught.value.output.sequences == [[*PROMPT, *taken]] and len(taken) == 3
    assert tokens.stats["finish_reasons"] == ["error"]
