"""Models that are released, as they were before, and models changed since they were patched, which are refused."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module  # type: ignore[import-untyped]
from helpers.family_states import Decoding
from helpers.tiny_family_models import EVERY_STATE, family_model, matrix
from helpers.tiny_models import patched, tiny_model

from stree import TreeLM, custom_generate, generate
from stree.models.trimmed import TrimmedLM

PROMPT = torch.tensor([[1, 2, 3, 4, 5]])
RELEASED = "the model was released, which took its patches off; make a new TreeLM of it"


def contents(model: Any) -> dict[str, Any]:
    """List everything that the modules of a model and its configs hold, one level deep."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in {**vars(module), "class": type(module)}.items():
            found[f"{name}.{key}"] = value
            if isinstance(value, dict):  # parameters, buffers, modules and hooks
                found |= {f"{name}.{key}[{part}]": held for part, held in value.items()}
            elif key in ("config", "generation_config"):
                found[f"{name}.{key}.vars"] = dict(vars(value))
    return found


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    assert not [name for name, value in before.items() if value is not after[name] and value != after[name]]


def generated(model: Any) -> list[torch.Tensor]:
    """Generate with transformers alone; return the tokens and all logits."""
    out = model.generate(
        PROMPT, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0
    )
    return [out.sequences, *out.logits]


@pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")  # of transformers
@pytest.mark.parametrize("family", matrix(fast=EVERY_STATE, in_ci=EVERY_STATE))
def test_a_released_model_is_as_it_was(family: str) -> None:
    oracle, model = family_model(family), family_model(family)
    model.model_tag = model.base_model.layers[0].tag = "the user's own"
    model.train()
    model.base_model.layers[0].eval()
    before = contents(model)
    lm = TreeLM(model)
    Decoding(oracle, [7, 3], lm=lm).step([5, 5])
    model.generate(PROMPT, custom_generate=custom_generate, max_new_tokens=4, pad_token_id=0)
    assert lm.release() is model
    assert_same(before, contents(model))
    model.eval()
    assert all(map(torch.equal, generated(model), generated(oracle)))
    Decoding(oracle, [7, 3], lm=TreeLM(model)).step([5, 5])


def test_forwards_that_another_library_had_set_come_back() -> None:
    model = family_model("jamba")
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
    before, expected = contents(model), generated(model)
    lm = TreeLM(TreeLM(model).model)  # a patch over a patch
    lm.release()
    assert_same(before, contents(model))
    assert all(map(torch.equal, generated(model), expected))


def test_what_belongs_to_a_released_model_is_refused_until_it_is_patched_again() -> None:
    model = tiny_model("bamba")
    decoding, sibling = Decoding(tiny_model("bamba"), [4], lm=TreeLM(model)), TreeLM(model)
    lm, state, other = decoding.lm, decoding.state, sibling.new_state(1, 32, 8)
    tree = decoding.score([5])
    sibling.prefill(other, PROMPT)
    lm.cache["anything"] = 1
    lm.release()
    assert not lm.cache
    path = torch.tensor([[0]]), torch.tensor([1])
    calls: list[Callable[[], object]] = [
        lambda: lm.verify(state, tree), lambda: lm.commit(state, *path), lambda: lm.extend(state, PROMPT), lm.new_state,
        lambda: lm.prefill(state, PROMPT), lambda: lm.check_ready(), lambda: lm.prefill_row(state, 0, PROMPT),
        lambda: sibling.verify(other, tree), sibling.new_state,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match=RELEASED):
            call()
    assert lm.release() is model  # once more changes nothing
    again = TreeLM(model)
    Decoding(tiny_model("bamba"), [4], lm=again).score([5])
    with pytest.raises(ValueError, match=RELEASED):
        lm.new_state()
    with pytest.raises(ValueError, match="the state belongs to another TreeLM"):
        again.verify(state, tree)


def test_the_generate_hook_patches_a_released_model_again() -> None:
    model = tiny_model("bamba")
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(PROMPT, **options)
    for _ in range(2):
        assert torch.equal(model.generate(PROMPT, custom_generate=custom_generate, **options), expected)
        TreeLM(model).release()


def test_releasing_a_trimmed_model_gives_the_whole_one_back() -> None:
    model = tiny_model("bamba")
    before = contents(model)
    assert TrimmedLM(TreeLM(model), range(50)).release() is model
    assert_same(before, contents(model))


def test_copies_and_pickles_of_a_model_leave_its_captured_steps_out() -> None:
    lm = patched(tiny_model("bamba"))
    lm.cache["step_cache"] = lambda: None  # can be pickled no more than a graph
    for copied in (copy.deepcopy(lm), pickle.loads(pickle.dumps(lm))):
        assert copied.cache == {} and copied.model is not lm.model
        Decoding(tiny_model("bamba"), [6], lm=copied).score([5])
    assert "step_cache" in lm.cache


def test_a_model_that_the_generate_hook_has_patched_is_copied_and_pickled_without_captured_steps() -> None:
    model = tiny_model("bamba")
    options: dict[str, Any] = {"custom_generate": custom_generate, "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(PROMPT, pad_token_id=0, **options)
    patched_ones = [held for held in gc.get_objects() if type(held) is TreeLM and held.model is model]
    assert patched_ones
    for lm in patched_ones:
        lm.cache["step_cache"] = lambda: None  # can be pickled no more than a graph
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied.generate(PROMPT, pad_token_id=0, **options), expected)
        weights = zip(copied.parameters(), model.parameters(), strict=True)
        assert all(mine.data_ptr() != theirs.data_ptr() for mine, theirs in weights)


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
