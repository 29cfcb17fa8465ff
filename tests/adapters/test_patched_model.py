"""A patched model stays the user's own: plain calls are bit for bit those of an unpatched copy; it copies and saves."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_family_models import EVERY_ADAPTER, family_model
from helpers.tiny_models import (
    FAMILIES,
    TOLERANCE,
    as_commit,
    extended,
    patched,
    path_to,
    random_texts,
    random_tree,
    right_padded,
    tiny_model,
    tree_error,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from stree import TreeLM, custom_generate, generate

FLOAT32 = TOLERANCE[torch.float32]
SLOW = pytest.mark.slow
COPIED = ("recurrent_gemma", "zamba2")  # with copies of a module, and without


def left_padded() -> tuple[Tensor, Tensor]:
    """Give tokens and an attention mask of three prompts."""
    texts = [
        [0] * (13 - size) + text
        for size, text in zip((13, 5, 1), random_texts(random.Random(0), [13, 5, 1]), strict=True)
    ]
    return torch.tensor(texts), torch.tensor([[0] * (13 - size) + [1] * size for size in (13, 5, 1)])


def assert_plain_calls_are_equal(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Require bit-equal logits of forward with and without padding and cache, and bit-equal generation."""
    tokens, mask = left_padded()
    for kwargs in ({}, {"attention_mask": mask}):
        with torch.no_grad():
            expected, actual = model(tokens, **kwargs), other(tokens, **kwargs)
        assert torch.equal(actual.logits, expected.logits)
    for kwargs in ({"inputs": tokens, "attention_mask": mask}, {"inputs": tokens[:1]}):
        for sampling in ({"do_sample": False}, {"do_sample": True}):
            outputs: list[Any] = []
            for one in (model, other):
                torch.manual_seed(0)
                options = {
                    "max_new_tokens": 9,
                    "min_new_tokens": 9,
                    "output_logits": True,
                    "return_dict_in_generate": True,
                }
                outputs.append(one.generate(**kwargs, **sampling, **options))
            assert torch.equal(outputs[1].sequences, outputs[0].sequences)
            assert outputs[0].sequences.shape[1] == 13 + 9
            assert all(torch.equal(a, b) for a, b in zip(outputs[0].logits, outputs[1].logits, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_calls_of_a_patched_model_are_bit_equal(family: str) -> None:
    model = tiny_model(family)
    assert_plain_calls_are_equal(model, patched(model).model)


@pytest.mark.parametrize("family", ["bamba", "llama"])
def test_plain_calls_are_bit_equal_under_eager_attention_too(family: str) -> None:
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    lm = patched(model)
    assert_plain_calls_are_equal(model, lm.model)
    texts = random_texts(random.Random(1), [9])
    state = lm.new_state(1, 32, 16)
    lm.prefill(state, *right_padded(texts))
    tree = random_tree(random.Random(1), [12])
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_calls_and_a_pending_tree_do_not_disturb_each_other(family: str) -> None:
    rng = random.Random(2)
    model = tiny_model(family)
    lm, texts = patched(model), random_texts(rng, [9, 4])
    state = lm.new_state(2, 64, 16)
    lm.prefill(state, *right_padded(texts))
    tree = random_tree(rng, [12, 7])
    lm.verify(state, tree)
    assert_plain_calls_are_equal(model, lm.model)
    paths = [path_to(tree, 0, 11), [0]]
    lm.commit(state, *as_commit(paths))
    assert_plain_calls_are_equal(model, lm.model)
    texts = extended(texts, tree, paths)
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_cached_continuation_of_a_patched_model_is_bit_equal(family: str) -> None:
    model = tiny_model(family)
    lm = patched(model)
    tokens, outputs = torch.tensor(random_texts(random.Random(3), [9, 9])), []
    for one in (model, lm.model):
        cache = DynamicCache(config=one.config)
        with torch.no_grad():
            one(tokens[:, :8], **{lm.family.cache_argument: cache})
            outputs.append(one(tokens[:, 8:], **{lm.family.cache_argument: cache}).logits)
    assert torch.equal(outputs[0], outputs[1])


def test_a_prompt_gives_the_modules_back_what_they_kept_of_a_plain_text() -> None:
    model = family_model("recurrent_gemma")
    lm, tokens = patched(model), torch.tensor(random_texts(random.Random(4), [9]))
    blocks = [module for module in lm.model.modules() if hasattr(module, "conv1d_state")]
    with torch.no_grad():
        lm.model(tokens)
    held = [(block.conv1d_state, block.rg_lru.recurrent_states) for block in blocks]
    lm.prefill(lm.new_state(1, 16, 4), tokens[:, :5])
    assert held and all(window is not None and state is not None for window, state in held)
    for block, (window, state) in zip(blocks, held, strict=True):
        assert block.conv1d_state is window and block.rg_lru.recurrent_states is state


@pytest.mark.parametrize("family", FAMILIES)
def test_a_patch_adds_no_parameter_and_no_module(family: str) -> None:
    model = tiny_model(family)
    other = patched(model).model
    assert [name for name, _ in other.named_modules()] == [name for name, _ in model.named_modules()]
    assert other.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_deep_copy_of_a_patched_model_acts_on_its_own_weights(family: str) -> None:
    rng = random.Random(4)
    model = tiny_model(family)
    lm = patched(model)
    twin, changed = copy.deepcopy(lm), copy.deepcopy(model)
    for one in (twin.model, changed):
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape))
    texts = random_texts(rng, [9, 4])
    tree = random_tree(rng, [12, 7])
    for oracle, one, wrong in ((model, lm, changed), (changed, twin, model)):
        assert_plain_calls_are_equal(oracle, one.model)
        state = one.new_state(2, 64, 16)
        one.prefill(state, *right_padded(texts))
        logits = one.verify(state, tree)
        assert tree_error(oracle, texts, tree, logits) < FLOAT32
        assert tree_error(wrong, texts, tree, logits) > 1000 * FLOAT32


def pickled(model: Any) -> Any:
    """Pickle a model or its TreeLM, and load it."""
    return pickle.loads(pickle.dumps(model))


def saved(model: Any) -> Any:
    """Write a model or its TreeLM with torch.save, and load it."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("family", [one if one in COPIED else pytest.param(one, marks=SLOW) for one in EVERY_ADAPTER])
@pytest.mark.parametrize("passed_on", [pickled, saved, copy.deepcopy])
def test_a_pickled_or_copied_patch_acts_on_its_own_weights(family: str, passed_on: Callable[[Any], Any]) -> None:
    model = family_model(family)
    changed, lm = copy.deepcopy(model), patched(model)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    lm.model.generate(torch.tensor([[1, 2, 3]]), custom_generate=custom_generate, **options)
    text, tree = random_texts(random.Random(0), [7]), random_tree(random.Random(0), [7])
    for again in (passed_on(lm), TreeLM(passed_on(lm.model)), TreeLM(passed_on(TreeLM(passed_on(lm.model)).model))):
        with torch.no_grad():
            for one in (again.model, changed):
                for mine, theirs in zip(one.parameters(), model.parameters(), strict=True):
                    mine.copy_(1.1 * theirs)
            assert torch.equal(again.model(torch.tensor(text)).logits, changed(torch.tensor(text)).logits)
        state = again.new_state(1, 32, 8)
        again.prefill(state, torch.tensor(text))
        assert tree_error(changed, text, tree, again.verify(state, tree)) < FLOAT32
        plain = changed.generate(torch.tensor(text), **options)
        assert torch.equal(again.model.generate(torch.tensor(text), custom_generate=custom_generate, **options), plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_may_be_patched_twice(family: str) -> None:
    rng = random.Random(6)
    model = tiny_model(family)
    first = patched(model)
    second = TreeLM(first.model)
    assert second.model is first.model
    assert_plain_calls_are_equal(model, second.model)
    texts, tree = random_texts(rng, [9]), random_tree(rng, [12])
    for lm in (first, second):
        state = lm.new_state(1, 64, 16)
        lm.prefill(state, *right_padded(texts))
        assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32


@pytest.mark.parametrize("family", FAMILIES)
def test_two_patched_models_in_turn_keep_their_states_apart(family: str) -> None:
    rng = random.Random(7)
    models = [tiny_model(family, seed=seed) for seed in (0, 1)]
    lms, texts = [patched(model) for model in models], random_texts(rng, [9])
    states = [lm.new_state(1, 64, 16) for lm in lms]
    tree = random_tree(rng, [12])
    for lm, state in zip(lms, states, strict=True):
        lm.prefill(state, *right_padded(texts))
    for lm, state in zip(lms, states, strict=True):
        lm.verify(state, tree)
    path = path_to(tree, 0, 11)
    for lm, state in zip(lms, states, strict=True):
        lm.commit(state, *as_commit([path]))
    texts = extended(texts, tree, [path])
    for model, lm, state in zip(models, lms, states, strict=True):
        assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32


@pytest.mark.parametrize("family", FAMILIES)
def test_a_patched_model_saves_and_loads_as_the_plain_one_does(family: str, tmp_path: Path) -> None:
    rng = random.Random(8)
    model = tiny_model(family)
    patched(model).model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert plain.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(plain.state_dict()[name], weight) for name, weight in model.state_dict().items())
    lm, texts = TreeLM.from_pretrained(tmp_path, device="cpu"), random_texts(rng, [9])
    state = lm.new_state(1, 64, 16)
    lm.prefill(state, *right_padded(texts))
    tree = random_tree(rng, [12])
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32


def test_a_model_in_training_mode_is_put_into_evaluation_mode() -> None:
    model = tiny_model("llama").train()
    assert not TreeLM(model).model.training


def test_a_model_that_is_put_back_into_training_mode_is_refused_until_it_is_not() -> None:
    lm, prompt = patched(tiny_model("bamba")), torch.tensor([[1, 2, 3]])
    state, tree = lm.new_state(1, 16, 8), random_tree(random.Random(0), [5])
    message = r"the model is in training mode, in which its logits are random; call its eval\(\) first"
    lm.model.train()
    with pytest.raises(RuntimeError, match=message):
        lm.prefill(state, prompt)
    lm.model.eval()
    lm.prefill(state, prompt)
    lm.model.train()
    with pytest.raises(RuntimeError, match=message):
        lm.verify(state, tree)
    lm.model.eval()
    lm.verify(state, tree)


def test_autocast_is_refused_before_anything_runs() -> None:
    lm, prompt = patched(tiny_model("bamba")), torch.tensor([[1, 2, 3]])
    state, tree = lm.new_state(1, 16, 8), random_tree(random.Random(0), [5])
    lm.prefill(state, prompt)
    calls: list[Callable[[], object]] = [
        lambda: lm.prefill(lm.new_state(1, 16, 8), prompt),
        lambda: lm.verify(state, tree),
        lambda: generate(lm, prompt.tolist()),
        lambda: lm.model.generate(prompt, custom_generate=custom_generate, max_new_tokens=2),
    ]
    for call in calls:
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast is on, .*; leave it"):
            call()
    lm.verify(state, tree)


@pytest.mark.parametrize("family", FAMILIES)
def test_moving_a_patched_model_to_another_dtype_moves_what_the_patches_use(family: str) -> None:
    rng = random.Random(9)
    model, texts = tiny_model(family), random_texts(rng, [9])
    lm = TreeLM(patched(model).model.to(torch.bfloat16))
    state = lm.new_state(1, 64, 16)
    logits = lm.prefill(state, *right_padded(texts))
    tree = random_tree(rng, [12])
    assert logits.dtype == torch.float32
    # 0.1: bfloat16 has 8 bits of mantissa, and the text runs through every layer of wide random weights.
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < 0.1


@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_a_model_whose_layers_were_replaced_since_it_was_patched_is_refused(family: str) -> None:
    """A new layer of attention would take the tree for a text, and say nothing."""
    lm, prompt = patched(tiny_model(family)), torch.tensor([[1, 2, 3]])
    state, layers = lm.new_state(1, 16, 8), lm.model.model.layers
    layers[1] = tiny_model(family, seed=1).model.layers[1]
    for call in (lm.new_state, lm.check_ready, lambda: lm.prefill(state, prompt)):
        with pytest.raises(ValueError, match="layers of the model were replaced, .* make a new TreeLM of it"):
            call()
    expected = lm.model(prompt).logits[:, -1]
    again = TreeLM(lm.model)
    torch.testing.assert_close(again.prefill(again.new_state(1, 16, 8), prompt), expected)


@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_a_model_with_more_or_fewer_layers_than_when_it_was_patched_is_refused(family: str) -> None:
    longer, shorter = patched(tiny_model(family)), patched(tiny_model(family))
    longer.model.model.layers.append(tiny_model(family).model.layers[0])
    del shorter.model.model.layers[-1]
    for lm in (longer, shorter):
        with pytest.raises(ValueError, match="layers of the model were replaced, added or removed since it was"):
            lm.check_ready()


@pytest.mark.parametrize("family", ["jamba", "gemma3_text"])
def test_a_model_that_was_moved_since_it_was_patched_is_refused(family: str) -> None:
    lm, prompt = TreeLM(family_model(family)), torch.tensor([[1, 2, 3]])
    state = lm.new_state(1, 16, 8)
    lm.model.to(torch.bfloat16)
    message = "moved since it was patched: torch.bfloat16 on cpu, was torch.float32 on cpu; make a new TreeLM of it"
    with pytest.raises(ValueError, match=message):
        lm.new_state(1, 16, 8)
    with pytest.raises(ValueError, match=message):
        lm.prefill(state, prompt)
    again = TreeLM(lm.model)
    assert again.prefill(again.new_state(1, 16, 8), prompt).isfinite().all()
    lm.model.to(torch.float32)
    lm.prefill(state, prompt)


@pytest.mark.parametrize(("family", "positions"), [("mamba2", None), ("bamba", 500), ("llama", 500)])
def test_a_tree_lm_knows_the_sizes_of_its_model(family: str, positions: int | None) -> None:
    lm = patched(tiny_model(family, torch.bfloat16, **({"max_position_embeddings": 500} if positions else {})))
    assert (lm.vocab_size, lm.max_length, lm.num_layers) == (97, positions, lm.model.config.num_hidden_layers)
    assert (lm.dtype, lm.device.type) == (torch.bfloat16, "cpu")
