"""Layers on several devices; the second one here is "meta", which computes shapes and refuses tensors of the CPU."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module  # type: ignore[import-untyped]
from helpers.family_states import Decoding
from helpers.fast_cases import slow_unless
from helpers.tiny_family_models import EVERY_ADAPTER, EVERY_STATE, family_model
from helpers.tiny_models import as_commit, path_to, random_texts, random_tree, right_padded
from torch import Tensor
from transformers import PreTrainedModel

from stree import TreeLM
from stree.models.families import family_of, stateful_modules

META = torch.device("meta")


def moved(value: Any, device: torch.device) -> Any:
    """Move tensors, lists, tuples and dicts of them; caches stay, as accelerate leaves them."""
    if isinstance(value, Tensor):
        return value.to(device) if value.device != device and value.device != META else value
    if type(value) in (list, tuple):
        return type(value)(moved(part, device) for part in value)
    return {name: moved(part, device) for name, part in value.items()} if type(value) is dict else value


def split_model(family: str) -> PreTrainedModel:
    """Move everything from the second layer on to another device, with hooks such as accelerate's."""
    model = family_model(family, torch.bfloat16)  # the only dtype of torch's grouped products on "meta"
    base = getattr(model, model.base_model_prefix)
    rest = [*base.layers[1:], *(child for name, child in base.named_children() if "norm" in name), model.lm_head]
    if model.lm_head.weight is model.get_input_embeddings().weight:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for part in rest:
        part.to(META)
        part.register_forward_pre_hook(
            lambda _, args, kwargs: (moved(args, META), moved(kwargs, META)), with_kwargs=True
        )
    return model


@pytest.mark.parametrize(
    ("family", "defers_commit"),
    slow_unless(
        lambda family, _: family in (*EVERY_STATE, "kimi_linear"),
        [(family, family == "kimi_linear") for family in EVERY_ADAPTER],
        in_ci=lambda *_: False,
    ),
)
def test_no_layer_meets_a_tensor_of_another_device(family: str, defers_commit: bool) -> None:
    rng = random.Random(0)
    lm = TreeLM(split_model(family))
    lm.defers_commit = defers_commit
    state = lm.new_state(2, 64, 16)
    lm.prefill(state, *right_padded(random_texts(rng, [9, 4])))
    for _ in range(2):
        tree = random_tree(rng, [9, 7])
        logits, hidden = lm.verify(state, tree, hidden_layers=[0, 1, -1])
        assert logits.device == hidden.device == META
        assert logits.shape == (2, 9, 97) and hidden.shape == (2, 9, 3, lm.model.config.hidden_size)
        lm.commit(state, *as_commit([path_to(tree, 0, 8), [0]]))
        state = state.select(torch.tensor([1, 0]))
    logits, hidden = lm.extend(state, *right_padded(random_texts(rng, [18, 2])), hidden_layers=[-1])
    assert logits.device == hidden.device == META and hidden.shape[1] == 18
    assert META in {tensor.device for stack in state.stacks.values() for _, tensor in stack.tensors()}


def test_plain_calls_of_a_model_on_several_devices_run_its_own_code() -> None:
    model = split_model("bamba")
    lm = TreeLM(copy.deepcopy(model))
    tokens = torch.tensor([[1, 2, 3]])
    assert lm.model(tokens).logits.shape == model(tokens).logits.shape
    assert not any("forward" in vars(module) for module in lm.release().modules())


@pytest.mark.parametrize("family", EVERY_STATE)
def test_forwards_that_accelerate_has_replaced_do_not_hide_the_tree(family: str) -> None:
    model = family_model(family)
    hooked = copy.deepcopy(model)
    for module in hooked.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
    TreeLM(hooked)  # a patch over a patch
    decoding = Decoding(model, [9, 4], lm=TreeLM(hooked))
    decoding.score([9, 7])
    plain, tokens = {"max_new_tokens": 3, "do_sample": False}, torch.tensor(decoding.texts[:1])
    assert torch.equal(decoding.lm.model.generate(tokens, **plain), model.generate(tokens, **plain))


def test_plain_calls_run_the_forwards_that_accelerate_has_put_on_mixers() -> None:
    model, calls = family_model("jamba"), []
    mixers = [mixer for _, mixer in stateful_modules(model, family_of(model.config))]

    def pre_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(module)
        return args, kwargs

    for mixer in mixers:
        add_hook_to_module(mixer, AlignDevicesHook(execution_device="cpu"))
        mixer._hf_hook.pre_forward = pre_forward
    TreeLM(model).model(torch.tensor([[1, 2, 3]]))
    assert calls == mixers


def test_an_offloaded_mixer_is_refused() -> None:
    model = family_model("mistral")
    model.model.layers[1].self_attn.v_proj._hf_hook = SimpleNamespace(offload=True)  # as accelerate's hooks say it
    with pytest.raises(NotImplementedError, match="MistralAttention is offloaded; layers that keep a state must be in"):
        TreeLM(model)
