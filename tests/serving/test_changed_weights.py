"""A target that changes under an engine: nothing that was computed with other weights is used again.

Run: python -m pytest tests/serving/test_changed_weights.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.captured import captured, launched
from helpers.fast_cases import slow_unless

import stree

PROMPT = [5, 6, 7, 8]


class Switched(torch.nn.Module):
    """A projection with an adapter that an attribute switches, as peft's ``set_adapter`` does."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.active = base, ["none"]

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) * (3 if "louder" in self.active else 1)


def louder(model: Any) -> None:
    model.model.layers[0].feed_forward.active = ["louder"]


def written_in_place(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)


def assigned(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())


def swapped_data(model: Any) -> None:
    model.lm_head.weight.data = -model.lm_head.weight.data


def hooked(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda _, __, output: -output)


CHANGES: list[Callable[[Any], None]] = [louder, written_in_place, assigned, swapped_data, hooked]


def switched(lm: stree.TreeLM) -> stree.TreeLM:
    """Insert an adapter, so far without effect."""
    layer: Any = lm.model.model.layers[0]
    layer.feed_forward = Switched(layer.feed_forward)
    return lm


@pytest.mark.parametrize("change", CHANGES)
def test_no_text_begins_from_a_state_of_other_weights(change: Callable[[Any], None]) -> None:
    lm, prompt = switched(launched()), PROMPT
    with stree.Engine(lm, "none", budget=1, max_batch=2, max_length=96, cache_bytes=10**8) as engine:
        before = engine.submit(prompt, max_new_tokens=9).result(60).sequences[0]
        assert engine.submit(prompt, max_new_tokens=9).result(60).stats["num_cached_tokens"] == len(prompt)
        change(lm.model)
        expected = stree.generate(lm, [prompt], "none", max_new_tokens=9).sequences[0]
        for num_cached in (0, len(prompt)):  # states of the new weights are kept
            after = engine.submit(prompt, max_new_tokens=9)
            assert after.result(60).sequences[0] == expected != before
            assert after.stats["num_cached_tokens"] == num_cached
        following = engine.submit([*before, 5], max_new_tokens=2).result(60)
        assert following.stats["num_cached_tokens"] == len(prompt), "not the old answer's state"


def test_a_text_that_ran_while_the_weights_changed_is_not_continued() -> None:
    lm = launched()
    with stree.Engine(lm, "none", budget=1, max_batch=2, max_length=96, cache_bytes=10**8) as engine:
        running = engine.submit(PROMPT, max_new_tokens=80, ignore_eos=True)
        next(iter(running))
        written_in_place(lm.model)
        engine.submit([8, 9], max_new_tokens=1).result(60)  # begins after the change
        text = running.result(60).sequences[0]
        assert engine.submit([*text, 4], max_new_tokens=1).result(60).stats["num_cached_tokens"] == 0


def test_the_cache_can_be_cleared() -> None:
    with stree.Engine(launched(), "none", budget=1, max_batch=2, max_length=96, cache_bytes=10**8) as engine:

        def cached() -> int:
            count: int = engine.submit(PROMPT, max_new_tokens=2).result(60).stats["num_cached_tokens"]
            return count

        assert (cached(), cached()) == (0, len(PROMPT))
        engine.clear_cache()
        running = engine.submit([7, 7], max_new_tokens=80, ignore_eos=True)
        next(iter(running))
        engine.clear_cache()
        text = running.result(60).sequences[0]
        assert (cached(), cached()) == (0, len(PROMPT))
        assert engine.submit([*text, 4], max_new_tokens=1).result(60).stats["num_cached_tokens"] == 0


@pytest.mark.parametrize("change", slow_unless(lambda change: change is louder, [louder, assigned]))
def test_captured_steps_of_other_weights_are_not_replayed(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, prompt = switched(captured(monkeypatch)), PROMPT
    options: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
    plain = switched(launched())
    with stree.Engine(lm, "none", budget=1, max_batch=2, max_length=96) as engine:
        before = stree.generate(plain, [prompt], "none", **options).sequences
        assert engine.submit(prompt, **options).result(120).sequences == before
        running = engine.submit(prompt, **{**options, "max_new_tokens": 60})
        next(iter(running))
        for model in (lm.model, plain.model):
            change(model)
        after = stree.generate(plain, [prompt], "none", **options).sequences
        assert engine.submit(prompt, **options).result(120).sequences == after != before
