"""Adapters on projections, as LoRA's: trees see them wherever the model does, or are refused."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import pytest
import torch
from helpers.tiny_family_models import EVERY_ADAPTER, family_model, matrix
from helpers.tiny_models import TOLERANCE, patched, random_texts, random_tree, right_padded, tree_error
from torch import Tensor, nn

from stree import TreeLM
from stree.models.families import family_of, stateful_modules

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


def adapted(model: Any) -> Any:
    """Wrap every projection of the layers that keep a state."""
    torch.manual_seed(1)
    for _, mixer, _ in stateful_modules(model, family_of(model.config)):
        for parent in [*mixer.modules()]:
            for name, part in [*parent.named_children()]:
                if type(part) is nn.Linear and not isinstance(parent, Lora):
                    setattr(parent, name, Lora(part))
    return model


def check_trees(lm: TreeLM, model: Any, plain: Any) -> None:
    """Compare a ragged batch of trees with a model's own forward, which is far from that of the plain one."""
    rng = random.Random(0)
    texts, tree = random_texts(rng, [6, 9]), random_tree(rng, [8, 8])
    state = lm.new_state(2, 32, 8)
    lm.prefill(state, *right_padded(texts))
    logits = lm.verify(state, tree)
    assert tree_error(model, texts, tree, logits) < TOLERANCE[torch.float32]
    assert tree_error(plain, texts, tree, logits) > 100 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("family", matrix(FAMILIES))
def test_trees_see_the_adapters_of_every_projection(family: str) -> None:
    plain = family_model(family)
    model = adapted(copy.deepcopy(plain))
    check_trees(patched(model), model, plain)


class Rolled(nn.Module):
    """A parametrization, as weight norms and some adapters are."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.roll(1, 0)


@pytest.mark.parametrize("family", EVERY_ADAPTER)
def test_trees_see_the_parametrizations_of_weights(family: str) -> None:
    model = family_model(family)
    for _, mixer, _ in stateful_modules(model, family_of(model.config)):
        for part in [*mixer.modules()]:
            if type(part) in (nn.Linear, nn.Conv1d):
                nn.utils.parametrize.register_parametrization(part, "weight", Rolled())
    check_trees(TreeLM(model), model, family_model(family))


@pytest.mark.parametrize("change", ["hook", "hook-of-many", "forward"])
@pytest.mark.parametrize(
    ("family", "name"), [("kimi_linear", "v_proj"), ("mamba2", "in_proj"), ("qwen3_5_text", "in_proj_qkv")]
)
def test_prompts_of_different_lengths_are_exact_where_a_projection_makes_something_of_nothing(
    family: str, name: str, change: str
) -> None:
    rng, model = random.Random(0), family_model(family)
    lm, texts, tree = TreeLM(copy.deepcopy(model)), random_texts(rng, [9, 3]), random_tree(rng, [6, 6])
    for module in (*model.modules(), *lm.model.modules()):
        if not hasattr(module, "layer_idx") or not hasattr(module, name):
            continue
        projection = getattr(module, name)
        if change == "hook":
            projection.register_forward_hook(lambda _, __, y: y + 0.5)
        elif change == "hook-of-many":  # which a single token would not show
            projection.register_forward_hook(lambda _, __, y: y + 0.5 * (y.shape[1] > 1))
        else:
            projection.forward = functools.partial(shifted, projection)
    state = lm.new_state(2, 32, 8)
    lm.prefill(state, *right_padded(texts))
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("family", ["bailing_hybrid", "kimi_linear"])
@pytest.mark.parametrize("change", ["bias", "wrapped-bias", "forward", "hook"])
def test_trees_see_what_else_the_expansion_of_latents_computes(family: str, change: str) -> None:
    rng, plain = random.Random(0), family_model(family)
    model = copy.deepcopy(plain)
    for module in [module for module in model.modules() if hasattr(module, "kv_b_proj")]:
        projection = module.kv_b_proj
        if change == "hook":
            projection.register_forward_hook(lambda _, __, out: 2 * out)
            continue
        if change == "forward":
            projection.forward = functools.partial(doubled, projection)
            continue
        projection.bias = nn.Parameter(torch.randn(projection.out_features))
        module.kv_b_proj = Lora(projection) if change == "wrapped-bias" else projection
    lm, texts, tree = TreeLM(model), random_texts(rng, [6]), random_tree(rng, [8])
    state = lm.new_state(1, 32, 8)
    lm.prefill(state, *right_padded(texts))
    logits = lm.verify(state, tree)
    assert tree_error(model, texts, tree, logits) < TOLERANCE[torch.float32]
    assert tree_error(plain, texts, tree, logits) > 100 * TOLERANCE[torch.float32]


def doubled(projection: nn.Linear, x: Tensor) -> Tensor:
    """Compute twice what a projection does."""
    return 2 * nn.Linear.forward(projection, x)


def shifted(projection: nn.Linear, x: Tensor) -> Tensor:
    """Compute what a projection does, and something of nothing."""
    return nn.Linear.forward(projection, x) + 0.5


class Wrapped(nn.Module):
    """A module that computes something else than its weights say."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer, self.weight, self.bias = base, base.weight, base.bias

    def forward(self, x: Tensor) -> Any:
        return self.base_layer(x) * 2


def test_an_adapter_on_a_convolution_that_the_model_calls_is_refused() -> None:
    model = family_model("recurrent_gemma")
    block = model.model.layers[0].temporal_block
    block.conv_1d = Wrapped(block.conv_1d)
    with pytest.raises(
        NotImplementedError, match=r"block.conv_1d \(Wrapped\) is not a plain Conv1d, whose weights trees"
    ):
        TreeLM(model)


def test_trees_run_the_hooks_of_a_recurrent_unit_and_refuse_those_of_its_convolution() -> None:
    rng, model = random.Random(0), family_model("recurrent_gemma")
    lm, texts, tree = TreeLM(copy.deepcopy(model)), random_texts(rng, [6]), random_tree(rng, [8])
    for layers in (model.model.layers, lm.model.model.layers):
        layers[0].temporal_block.rg_lru.register_forward_hook(lambda _, __, out: 2 * out)
    state = lm.new_state(1, 32, 8)
    lm.prefill(state, torch.tensor(texts))
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < TOLERANCE[torch.float32]
    lm.model.model.layers[0].temporal_block.conv_1d.register_forward_hook(lambda _, __, out: 2 * out)
    with pytest.raises(NotImplementedError, match="conv_1d of a recurrent block has a forward hook, which trees do"):
        lm.verify(state, tree)


@pytest.mark.parametrize(("family", "name"), [("bamba", "conv1d"), ("lfm2", "conv"), ("jamba", "dt_proj")])
def test_an_adapter_that_the_model_looks_through_is_looked_through_by_trees(family: str, name: str) -> None:
    rng, plain = random.Random(0), family_model(family)
    model = copy.deepcopy(plain)
    for module in [module for module in model.modules() if hasattr(getattr(module, name, None), "weight")]:
        setattr(module, name, Wrapped(getattr(module, name)))
    text, tree = torch.tensor([[1, 2, 3, 4, 5]]), random_tree(rng, [8])
    lm = TreeLM(model)
    state = lm.new_state(1, 32, 8)
    lm.prefill(state, text)
    with torch.no_grad():
        assert torch.equal(model(text).logits, plain(text).logits)
    assert tree_error(model, text.tolist(), tree, lm.verify(state, tree)) < TOLERANCE[torch.float32]
