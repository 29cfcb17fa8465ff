"""Adapters, hooks and parametrizations on projections, as LoRA's: trees run them as the model does, or are refused."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.family_states import Decoding
from helpers.tiny_family_models import EVERY_ADAPTER, family_model, matrix
from helpers.tiny_models import TOLERANCE, Outer
from torch import Tensor, nn

import stree
from stree import TreeLM
from stree.models.families import family_of, stateful_modules
from stree.models.prefill_memory import prefill_bytes

FAMILIES = (*EVERY_ADAPTER, "bailing_hybrid", "falcon_mamba", "mamba2", "olmo_hybrid")


class Lora(nn.Module):
    """A projection with an update of low rank; its weight and bias are its base's, as those of peft's layers."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.A = nn.Parameter(0.3 * torch.randn(4, base.in_features).to(base.weight))
        self.B = nn.Parameter(0.3 * torch.randn(base.out_features, 4).to(base.weight))

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Any:
        return self.base_layer(x) + x @ self.A.T @ self.B.T


class Wrapped(nn.Module):
    """A module that computes twice what its weights do."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer, self.weight, self.bias = base, base.weight, base.bias

    def forward(self, x: Tensor) -> Any:
        return self.base_layer(x) * 2


class Rolled(nn.Module):
    """A parametrization, as weight norms and some adapters are."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.roll(1, 0)


def parts(model: Any) -> Iterator[tuple[Any, str, Any]]:
    """List parent, name and module of the parts of every layer that holds a state."""
    for _, mixer in stateful_modules(model, family_of(model.config)):
        for parent in [*mixer.modules()]:
            for name, part in [*parent.named_children()]:
                yield parent, name, part


class ParamWrapper(nn.Module):
    """A module one of whose parameters is another one during its calls, as with ``target_parameters`` of peft."""

    def __init__(self, base_layer: Any, parameter_name: str) -> None:
        super().__init__()
        self.base_layer, self.parameter_name = base_layer, parameter_name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        nn.utils.parametrize.register_parametrization(self.base_layer, self.parameter_name, Rolled())
        try:
            return self.base_layer(*args, **kwargs)
        finally:
            nn.utils.parametrize.remove_parametrizations(self.base_layer, self.parameter_name, leave_parametrized=False)


def check_trees(lm: TreeLM, model: Any, plain: Any = None) -> None:
    """Compare a ragged batch of trees with a model's forward, which is far from that of the plain one."""
    decoding = Decoding(model, [9, 3], lm=lm)
    tree = decoding.score([8, 8])
    assert plain is None or decoding.error(tree, plain) > 100 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("family", matrix(FAMILIES))
def test_trees_run_the_adapters_of_every_projection(family: str) -> None:
    plain = family_model(family)
    model = copy.deepcopy(plain)
    torch.manual_seed(1)
    for parent, name, part in parts(model):
        if type(part) is nn.Linear and not isinstance(parent, Lora):
            setattr(parent, name, Lora(part))
    check_trees(TreeLM(copy.deepcopy(model)), model, plain)


@pytest.mark.parametrize("family", ["falcon_mamba", "mamba"])
def test_trees_use_a_parametrization_that_is_there_during_calls_of_the_mixer_alone(family: str) -> None:
    model = family_model(family)
    for parent in [*model.modules()]:
        if hasattr(getattr(parent, "mixer", None), "A_log"):
            parent.mixer = ParamWrapper(parent.mixer, "A_log")
    check_trees(TreeLM(copy.deepcopy(model)), model, family_model(family))


@pytest.mark.parametrize("family", EVERY_ADAPTER)
def test_trees_use_the_parametrizations_of_weights(family: str) -> None:
    model = family_model(family)
    for _, _, part in parts(model):
        if type(part) in (nn.Linear, nn.Conv1d):
            nn.utils.parametrize.register_parametrization(part, "weight", Rolled())
    check_trees(TreeLM(model), model, family_model(family))


def add_hook(projection: Any, function: Callable[[Tensor], Tensor]) -> None:
    """Change the output of a projection by a hook."""
    projection.register_forward_hook(lambda _, __, y: function(y))


def replace_forward(projection: Any, function: Callable[[Tensor], Tensor]) -> None:
    """Change the output of a projection by another forward, which a deep copy of the module can have, too."""
    projection.forward = functools.partial(changed_linear, projection, function)


def changed_linear(projection: nn.Linear, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(nn.Linear.forward(projection, x))


def shift(y: Tensor) -> Tensor:
    return y + 0.5


def shift_of_many(y: Tensor) -> Tensor:
    return y + 0.5 * (y.shape[1] > 1)  # a single token does not show it


def double(y: Tensor) -> Tensor:
    return 2 * y


@pytest.mark.parametrize(
    ("change", "function"), [(add_hook, shift), (add_hook, shift_of_many), (replace_forward, shift)]
)
@pytest.mark.parametrize(
    ("family", "name"), [("kimi_linear", "v_proj"), ("mamba2", "in_proj"), ("qwen3_5_text", "in_proj_qkv")]
)
def test_prompts_of_different_lengths_are_exact_where_a_projection_of_zeros_is_not_zero(
    family: str, name: str, change: Callable[..., None], function: Callable[..., Tensor]
) -> None:
    model = family_model(family)
    lm = TreeLM(copy.deepcopy(model))
    for module in (*model.modules(), *lm.model.modules()):
        if hasattr(module, "layer_idx") and hasattr(module, name):
            change(getattr(module, name), function)
    check_trees(lm, model)


@pytest.mark.parametrize(
    ("family", "change"),
    [("bailing_hybrid", "bias"), *(("kimi_linear", change) for change in ("wrapped-bias", "forward", "hook"))],
)
def test_trees_run_what_else_the_expansion_of_latents_computes(family: str, change: str) -> None:
    plain = family_model(family)
    model = copy.deepcopy(plain)
    for module in [module for module in model.modules() if hasattr(module, "kv_b_proj")]:
        projection = module.kv_b_proj
        if change in ("hook", "forward"):
            (add_hook if change == "hook" else replace_forward)(projection, double)
        else:
            projection.bias = nn.Parameter(torch.randn(projection.out_features))
            module.kv_b_proj = Lora(projection) if change == "wrapped-bias" else projection
    check_trees(TreeLM(model), model, plain)


@pytest.mark.parametrize("name", ["conv_1d", "rg_lru"])
def test_an_adapter_on_a_part_of_a_recurrent_block_whose_weights_trees_use_is_refused(name: str) -> None:
    model = family_model("recurrent_gemma")
    block = model.model.layers[0].temporal_block
    setattr(block, name, ParamWrapper(getattr(block, name), name))
    with pytest.raises(NotImplementedError, match=rf"block.{name} \(ParamWrapper\) is not the model's, whose"):
        TreeLM(model)


def test_trees_run_the_hooks_of_a_recurrent_unit_and_refuse_those_of_its_convolution() -> None:
    model = family_model("recurrent_gemma")
    lm = TreeLM(copy.deepcopy(model))
    for layers in (model.model.layers, lm.model.model.layers):
        add_hook(layers[0].temporal_block.rg_lru, double)
    check_trees(lm, model)
    add_hook(lm.model.model.layers[0].temporal_block.conv_1d, double)
    with pytest.raises(NotImplementedError, match="conv_1d of a recurrent block has a forward hook, which trees do"):
        check_trees(lm, model)


@pytest.mark.parametrize(("family", "name"), [("bamba", "conv1d"), ("lfm2", "conv"), ("jamba", "dt_proj")])
def test_trees_use_the_weights_of_a_wrapped_module_where_the_model_does(family: str, name: str) -> None:
    plain = family_model(family)
    model, text = copy.deepcopy(plain), torch.tensor([[1, 2, 3, 4, 5]])
    for module in [module for module in model.modules() if hasattr(getattr(module, name, None), "weight")]:
        setattr(module, name, Wrapped(getattr(module, name)))
    with torch.no_grad():
        assert torch.equal(model(text).logits, plain(text).logits)
    check_trees(TreeLM(model), model)


def test_hidden_states_and_the_self_check_are_those_of_the_model_inside_another() -> None:
    text = torch.tensor([[1, 2, 3, 4, 5]])
    wanted = family_model("falcon_h1")(text, output_hidden_states=True).hidden_states
    lm = TreeLM(Outer(family_model("falcon_h1")).eval())
    _, hidden = lm.prefill(lm.new_state(1, 16, 4), text, hidden_layers=[1, -1])
    torch.testing.assert_close(hidden, torch.stack([wanted[1], wanted[-1]], 2))
    lm.self_check()
    assert prefill_bytes(lm, 1, 64) == prefill_bytes(TreeLM(family_model("falcon_h1")), 1, 64) > 0


@pytest.mark.parametrize("config", [{"is_prompt_learning": True}, {"alora_invocation_tokens": [5, 6]}])
def test_adapters_of_peft_that_change_more_than_modules_are_refused(config: dict[str, Any]) -> None:
    text, model = torch.tensor([[1, 2, 3]]), family_model("llama")
    holder = types.SimpleNamespace(peft_config={"soft": types.SimpleNamespace(peft_type="A_TYPE", **config)})
    model.generate(text, max_new_tokens=1, custom_generate=stree.custom_generate)  # keeps a TreeLM
    prepare = type(model).prepare_inputs_for_generation
    model.prepare_inputs_for_generation = types.MethodType(lambda _, *args, **kw: prepare(model, *args, **kw), holder)
    with pytest.raises(NotImplementedError, match=r"the adapter 'soft' of peft \(A_TYPE\) learns virtual tokens or is"):
        model.generate(text, max_new_tokens=1, custom_generate=stree.custom_generate)
    del model.prepare_inputs_for_generation
    model.peft_config = holder.peft_config
    with pytest.raises(NotImplementedError, match="adapters that change modules, as plain LoRA, are supported"):
        TreeLM(model)
