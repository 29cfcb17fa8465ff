"""``model.generate(custom_generate=stree.custom_generate)``: transformers' greedy text in fewer forwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from helpers.calls import together
from helpers.hooked_generate import (
    LANDED,
    NEW_TOKENS,
    PROMPTS,
    REFUSED_BY_TRANSFORMERS,
    Copying,
    count_forwards,
    draft_model,
    hooked,
    new_tokens,
    plain,
    target,
)  # fmt: skip
from helpers.tiny_family_models import family_model, matrix
from helpers.tiny_models import VOCAB
from transformers import LogitsProcessorList

import stree
from stree.drafters import FusedDrafter, ModelDrafter, SuffixDrafter
from stree.growth import Chain, Static
from stree.integrations.transformers import tree_lm


@pytest.mark.parametrize("family", matrix(LANDED, ("bamba", "mamba", "qwen3_next", "zamba2")))
def test_greedy_text_is_that_of_every_prompt_alone(family: str) -> None:
    model, draft = family_model(family), draft_model()
    expected = [plain(model, prompt) for prompt in PROMPTS]
    for drafter, rows in (("suffix", 1), (draft, 3)):
        out = hooked(model, PROMPTS[:rows], drafter=drafter, budget=8)
        assert new_tokens(PROMPTS[:rows], out) == expected[:rows], (rows, drafter)
    assert plain(model, PROMPTS[0]) == expected[0], "the hook changed plain generate"


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


@pytest.mark.parametrize("family", REFUSED_BY_TRANSFORMERS)
def test_transformers_itself_refuses_speculation_on_recurrent_families(family: str) -> None:
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        plain(family_model(family), PROMPTS[0], prompt_lookup_num_tokens=3)


DRAFTERS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": lambda: {"drafter": "none"},
    "suffix-object": lambda: {"drafter": SuffixDrafter(), "budget": 7},
    "tree-lm": lambda: {"drafter": stree.TreeLM(draft_model()), "growth": Static([3, 2])},
    "stree-drafter": lambda: {"drafter": ModelDrafter(stree.TreeLM(draft_model())), "growth": Chain(4), "budget": 5},
    "itself": lambda: {"drafter": target(), "growth": Chain(3)},
    "fused": lambda: {"drafter": FusedDrafter(ModelDrafter(stree.TreeLM(draft_model())), SuffixDrafter())},
    "auto": lambda: {"drafter": draft_model(), "budget": "auto"},
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_kind_of_drafter_gives_the_same_text(name: str) -> None:
    expected = [plain(target(), prompt) for prompt in PROMPTS]
    assert new_tokens(PROMPTS, hooked(target(), PROMPTS, **DRAFTERS[name]())) == expected


PROCESSED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.8},
    "min-new-tokens": {"min_new_tokens": 9, "eos_token_id": [*range(60)]},
    "no-repeat-ngram": {"no_repeat_ngram_size": 1},
    "forced-eos": {"forced_eos_token_id": 4},
    "suppressed": {"suppress_tokens": [*range(50)], "begin_suppress_tokens": [60, 61]},
    "bad-words": {"bad_words_ids": [[8, 9], *([token] for token in range(10, 60))], "remove_invalid_values": True},
    "decay": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": [10, 11, 12]},
    "prefix": {"prefix_allowed_tokens_fn": lambda _, text: [(int(text[-1]) * 7 + place) % VOCAB for place in range(9)]},
}  # fmt: skip


@pytest.mark.parametrize(("name", "drafter"), [*zip(PROCESSED, ["suffix", "model"] * 4, strict=True)])
def test_processors_of_the_config_act_along_each_path(name: str, drafter: str) -> None:
    model, arguments = target(), PROCESSED[name]
    # The padding token occurs in every prompt, for some processors of older transformers take the padding for text.
    prompts = [[5, 0, 7, 8, 5, 0, 7, 8, 5, 0, 7], [3, 0, 2], [9, 1, 2, 0, 4, 9, 1]]
    expected = [plain(model, prompt, **arguments) for prompt in prompts]
    assert expected != [plain(model, prompt) for prompt in prompts]
    out = hooked(model, prompts, drafter=draft_model() if drafter == "model" else drafter, **arguments)
    for found, text in zip(new_tokens(prompts, out), expected, strict=True):
        assert found[: len(text)] == text
        assert not any(found[len(text) :])


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
