"""Plain calls of a patched model are bit for bit those of an unpatched copy; it copies, pickles and saves."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.family_states import Decoding
from helpers.fast_cases import slow_unless
from helpers.tiny_family_models import EVERY_ADAPTER, family_model
from helpers.tiny_models import FAMILIES, patched, random_texts, tiny_model
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from stree import TreeLM, custom_generate

EVERY = pytest.mark.parametrize("family", FAMILIES)


def assert_plain_calls_are_equal(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """Require bit-equal logits of forward with and without padding, and bit-equal generation."""
    texts = random_texts(random.Random(0), [13, 5, 1])
    tokens = torch.tensor([[0] * (13 - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (13 - len(text)) + [1] * len(text) for text in texts])
    for kwargs in ({}, {"attention_mask": mask}):
        with torch.no_grad():
            assert torch.equal(other(tokens, **kwargs).logits, model(tokens, **kwargs).logits)
    sizes = {"max_new_tokens": 9, "min_new_tokens": 9, "output_logits": True, "return_dict_in_generate": True}
    for kwargs in ({"inputs": tokens, "attention_mask": mask}, {"inputs": tokens[:1]}):
        for do_sample in (False, True):
            outputs: list[Any] = []
            for one in (model, other):
                torch.manual_seed(0)
                outputs.append(one.generate(**kwargs, **sizes, do_sample=do_sample))
            assert torch.equal(outputs[1].sequences, outputs[0].sequences)
            assert outputs[0].sequences.shape[1] == 13 + 9
            assert all(torch.equal(a, b) for a, b in zip(outputs[0].logits, outputs[1].logits, strict=True))


@pytest.mark.parametrize("family", ["bamba", "llama"])
def test_plain_calls_are_bit_equal_under_eager_attention_too(family: str) -> None:
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    decoding = Decoding(model, [9])
    assert_plain_calls_are_equal(model, decoding.lm.model)
    decoding.score([12])


@EVERY
def test_a_plain_cached_continuation_of_a_patched_model_is_bit_equal(family: str) -> None:
    model = tiny_model(family)
    lm, outputs = patched(model), []
    tokens = torch.arange(18).view(2, 9)
    for one in (model, lm.model):
        cache = DynamicCache(config=one.config)
        with torch.no_grad():
            one(tokens[:, :8], **{lm.cache_argument: cache})
            outputs.append(one(tokens[:, 8:], **{lm.cache_argument: cache}).logits)
    assert torch.equal(outputs[0], outputs[1])


def pickled(model: Any) -> Any:
    """Pickle a model or its TreeLM, and load it."""
    return pickle.loads(pickle.dumps(model))


def saved(model: Any) -> Any:
    """Write a model or its TreeLM with torch.save, and load it."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIERS = (pickled, saved, copy.deepcopy)


@pytest.mark.parametrize(
    ("family", "copier"),
    slow_unless(
        lambda *_: False,
        itertools.product(EVERY_ADAPTER, COPIERS),
        in_ci=lambda family, copier: EVERY_ADAPTER.index(family) % len(COPIERS) == COPIERS.index(copier),
    ),
)
def test_a_pickled_or_copied_patch_uses_its_own_weights(family: str, copier: Callable[[Any], Any]) -> None:
    model = family_model(family)
    changed, lm = copy.deepcopy(model), patched(model)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    lm.model.generate(torch.tensor([[1, 2, 3]]), custom_generate=custom_generate, **options)
    for again in (copier(lm), TreeLM(copier(lm.model)), TreeLM(copier(TreeLM(copier(lm.model)).model))):
        with torch.no_grad():
            for one in (again.model, changed):
                for ours, original in zip(one.parameters(), model.parameters(), strict=True):
                    ours.copy_(1.1 * original)
        decoding = Decoding(changed, [7], lm=again)
        decoding.score([7])
        text = torch.tensor(decoding.texts)
        with torch.no_grad():
            assert torch.equal(again.model(text).logits, changed(text).logits)
    plain = changed.generate(text, **options)
    assert torch.equal(again.model.generate(text, custom_generate=custom_generate, **options), plain)


@EVERY
def test_a_model_may_be_patched_twice(family: str) -> None:
    model = tiny_model(family)
    first = patched(model)
    second = TreeLM(first.model)
    assert second.model is first.model
    assert_plain_calls_are_equal(model, second.model)
    for lm in (first, second):
        Decoding(model, [9], lm=lm).score([12])


@EVERY
def test_a_patched_model_saves_and_loads_as_the_plain_one_does(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    patched(model).model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert plain.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(plain.state_dict()[name], weight) for name, weight in model.state_dict().items())
    Decoding(model, [9], lm=TreeLM.from_pretrained(tmp_path, device="cpu")).score([12])


@EVERY
def test_moving_a_patched_model_to_another_dtype_moves_what_the_patches_use(family: str) -> None:
    decoding = Decoding(tiny_model(family), [9], lm=TreeLM(patched(tiny_model(family)).model.to(torch.bfloat16)))
    assert decoding.logits.dtype == torch.float32
    # 0.1: bfloat16 has 8 bits of mantissa, and the text runs through every layer of wide random weights.
    assert decoding.error(decoding.tree([12])) < 0.1


@pytest.mark.parametrize(("family", "positions"), [("mamba2", None), ("bamba", 500), ("llama", 500)])
def test_a_tree_lm_has_the_sizes_of_its_model(family: str, positions: int | None) -> None:
    lm = patched(tiny_model(family, torch.bfloat16, **({"max_position_embeddings": 500} if positions else {})))
    assert (lm.vocab_size, lm.max_length, lm.num_layers) == (97, positions, lm.model.config.num_hidden_layers)
    assert (lm.dtype, lm.device.type) == (torch.bfloat16, "cpu")
