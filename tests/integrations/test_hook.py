"""``model.generate(custom_generate=stree.custom_generate)``: transformers' greedy text in fewer forwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from helpers.calls import together
from helpers.fast_cases import slow_unless
from helpers.hooked_generate import (
    NEW_TOKENS,
    PROMPTS,
    Copying,
    count_forwards,
    draft_model,
    hooked,
    new_tokens,
    plain,
    target,
)  # fmt: skip
from helpers.tiny_family_models import family_model, matrix
from transformers import LogitsProcessorList

import stree
from stree.drafters import FusedDrafter, ModelDrafter, SuffixDrafter
from stree.growth import Chain, Static
from stree.integrations.transformers import tree_lm


@pytest.mark.parametrize("family", matrix(fast=("mamba", "qwen3_next")))
def test_greedy_text_is_that_of_every_prompt_alone(family: str) -> None:
    model, draft = family_model(family), draft_model()
    expected = [plain(model, prompt) for prompt in PROMPTS]
    for drafter, rows in (("suffix", 1), (draft, 3)):
        out = hooked(model, PROMPTS[:rows], drafter=drafter, budget=8)
        assert new_tokens(PROMPTS[:rows], out) == expected[:rows], (rows, drafter)
    assert plain(model, PROMPTS[0]) == expected[0], "the hook changed plain generate"


@pytest.mark.slow
def test_threads_that_generate_with_a_fresh_model_at_once_get_one_patch_and_their_texts() -> None:
    model, draft = family_model("bamba"), draft_model()
    expected = [plain(model, prompt) for prompt in PROMPTS[:3]]
    found = together(lambda row: hooked(model, PROMPTS[row : row + 1], drafter=draft, budget=8), 3)
    assert [new_tokens(PROMPTS[row : row + 1], out)[0] for row, out in enumerate(found)] == expected
    other = family_model("bamba").train()
    lms = together(lambda _: tree_lm(other), 4)
    assert len({*map(id, lms)}) == 1
    assert all(module.training for module in lms[0].release().modules()), "what one patch noted is lost in another"


@pytest.mark.parametrize("family", ["bamba", "qwen3_next"])
def test_a_copying_text_takes_fewer_forwards_than_tokens(family: str) -> None:
    model = family_model(family)
    arguments: dict[str, Any] = {"logits_processor": LogitsProcessorList([Copying()])}
    expected = plain(model, PROMPTS[0], **arguments)
    assert expected[:5] == [8, 5, 6, 7, 8]
    for drafter in ("suffix", draft_model()):
        arguments |= {"drafter": drafter, "budget": 16}
        out, forwards = count_forwards(model, partial(hooked, model, PROMPTS[:1], **arguments))
        assert new_tokens(PROMPTS[:1], out) == [expected]
        assert forwards < NEW_TOKENS / 2


DRAFTERS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": lambda: {"drafter": "none"},
    "suffix-object": lambda: {"drafter": SuffixDrafter(), "budget": 7},
    "tree-lm": lambda: {"drafter": stree.TreeLM(draft_model()), "growth": Static([3, 2])},
    "stree-drafter": lambda: {"drafter": ModelDrafter(stree.TreeLM(draft_model())), "growth": Chain(4), "budget": 5},
    "itself": lambda: {"drafter": target(), "growth": Chain(3)},
    "fused": lambda: {"drafter": FusedDrafter(ModelDrafter(stree.TreeLM(draft_model())), SuffixDrafter())},
    "auto": lambda: {"drafter": draft_model(), "budget": "auto"},
}


@pytest.mark.parametrize("name", slow_unless(("tree-lm", "stree-drafter", "auto").__contains__, DRAFTERS))
def test_every_kind_of_drafter_gives_the_same_text(name: str) -> None:
    expected = [plain(target(), prompt) for prompt in PROMPTS]
    assert new_tokens(PROMPTS, hooked(target(), PROMPTS, **DRAFTERS[name]())) == expected


def test_a_model_is_patched_once_and_again_only_when_its_weights_move_or_its_layers_change() -> None:
    model = copy.deepcopy(target("mamba2"))

    def patch_of(model: Any) -> Any:
        assert new_tokens(PROMPTS[:1], hooked(model, PROMPTS[:1])) == [plain(model, PROMPTS[0])]
        return model.__dict__["_stree"]

    first = patch_of(model)
    assert patch_of(model) is first
    copied = copy.deepcopy(model)
    assert patch_of(copied).model is copied
    second = patch_of(model.double())
    assert second is not first
    model.backbone.layers = model.backbone.layers[1:]
    model.config.num_hidden_layers = len(model.backbone.layers)
    model.backbone.layers[0].mixer.layer_idx = 0
    assert patch_of(model) is not second
    assert not any("stree" in name for name in model.state_dict())
