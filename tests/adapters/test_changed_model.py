"""A model that was changed since it was patched, or that is not in evaluation mode, is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.family_states import Decoding
from helpers.tiny_family_models import family_model
from helpers.tiny_models import patched, tiny_model

from stree import TreeLM, custom_generate, generate

PROMPT = torch.tensor([[1, 2, 3]])


def test_a_model_in_training_mode_is_put_into_evaluation_mode() -> None:
    assert not TreeLM(tiny_model("llama").train()).model.training


def test_a_model_that_is_put_back_into_training_mode_is_refused_until_it_is_not() -> None:
    decoding = Decoding(tiny_model("bamba"), [3])
    lm, empty = decoding.lm, decoding.lm.new_state(1, 16, 8)
    lm.model.train()
    calls: list[Callable[[], object]] = [lambda: lm.prefill(empty, PROMPT), lambda: decoding.score([5])]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"the model is in training mode, .* random; call its eval\(\) first"):
            call()
    lm.model.eval()
    for call in calls:
        call()


def test_autocast_is_refused_before_anything_runs() -> None:
    decoding = Decoding(tiny_model("bamba"), [3])
    lm = decoding.lm
    calls: list[Callable[[], object]] = [
        lambda: lm.prefill(lm.new_state(1, 16, 8), PROMPT),
        lambda: decoding.score([5]),
        lambda: generate(lm, PROMPT.tolist()),
        lambda: lm.model.generate(PROMPT, custom_generate=custom_generate, max_new_tokens=2),
    ]
    for call in calls:
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast is on, .*; leave it"):
            call()
    decoding.score([5])


@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_a_model_with_other_layers_than_when_it_was_patched_is_refused(family: str) -> None:
    """A new attention layer would read the tree as a chain."""
    replaced, longer, shorter = (patched(tiny_model(family)) for _ in range(3))
    states = {lm: lm.new_state(1, 16, 8) for lm in (replaced, longer, shorter)}
    replaced.model.model.layers[1] = tiny_model(family, seed=1).model.layers[1]
    longer.model.model.layers.append(tiny_model(family).model.layers[0])
    del shorter.model.model.layers[-1]
    for lm, state in states.items():
        for call in (lm.new_state, lm.check_ready, lambda lm=lm, state=state: lm.prefill(state, PROMPT)):
            with pytest.raises(ValueError, match="layers of the model were replaced, .* make a new TreeLM of it"):
                call()
    again = TreeLM(replaced.model)
    expected = replaced.model(PROMPT).logits[:, -1]
    torch.testing.assert_close(again.prefill(again.new_state(1, 16, 8), PROMPT), expected)


@pytest.mark.parametrize("family", ["jamba", "gemma3_text"])
def test_a_model_that_was_moved_since_it_was_patched_is_refused(family: str) -> None:
    lm = TreeLM(family_model(family))
    state = lm.new_state(1, 16, 8)
    lm.model.to(torch.bfloat16)
    message = "moved since it was patched: torch.bfloat16 on cpu, was torch.float32 on cpu; make a new TreeLM of it"
    for call in (lm.new_state, lambda: lm.prefill(state, PROMPT)):
        with pytest.raises(ValueError, match=message):
            call()
    again = TreeLM(lm.model)
    assert again.prefill(again.new_state(1, 16, 8), PROMPT).isfinite().all()
    lm.model.to(torch.float32)
    lm.prefill(state, PROMPT)
