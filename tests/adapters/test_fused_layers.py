"""Fused layers equal transformers' own modules, family by family, and act while a tree is scored and nowhere else."""

from __future__ import annotations

import copy
import functools
import random
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module  # type: ignore[import-untyped]
from helpers.fused_launches import FUSED_OPS, count_fused_launches, verified
from helpers.tiny_family_models import family_model, matrix
from helpers.tiny_models import (
    TOLERANCE,
    fresh_node_logits,
    random_tree,
    real_nodes,
    relative_error,
    tree_error,
)
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from stree import TokenTree, TreeLM
from stree.kernels import ops
from stree.models.fused import fused_layers

WITH_EXPERTS = {
    "bailing_hybrid", "granitemoehybrid", "jamba", "kimi_linear", "lfm2_moe", "minimax", "nemotron_h",
    "qwen3_5_moe_text", "qwen3_next",
}  # fmt: skip
# What these families have none of that is known: some have no feed-forwards, or attention without positions.
WITHOUT = {
    "bailing_hybrid": {"rotary"},  # in pairs
    "falcon_mamba": {"rotary"},
    "gemma2": {"rms_norm_add"},  # normed before it is added
    "gemma3_text": {"rms_norm_add"},
    "jamba": {"rotary"},
    "kimi_linear": {"rotary"},
    "lfm3": {"rms_norm_add"},
    "mamba": {"rotary"},
    "mamba2": {"rotary", "gated_activation"},
    "minimax": {"gated_activation"},
    "nemotron_h": {"rotary"},
    "zamba": {"rotary"},
    "zamba2": {"gated_activation"},
}


def refuse(*_: Any, **__: Any) -> Tensor:
    """Stand for a module's forward that must not run."""
    raise AssertionError("the module's own forward ran")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return count_fused_launches(monkeypatch)


@pytest.mark.parametrize("family", matrix())
def test_fused_layers_change_no_logits_of_a_familys_tree(family: str, launched: Counter[str]) -> None:
    model = family_model(family)
    plain, texts, tree = verified(model, is_fused=False)
    assert not any(launched[name] for name in ("rms_norm", "rms_norm_add", "rotary", "experts"))
    launched.clear()
    logits, _, _ = verified(model, is_fused=True)
    kept = tree.parents.ge(0) | (torch.arange(tree.parents.shape[1]) == 0)
    assert relative_error(logits[kept], plain[kept]) < 2e-5
    expected = set(FUSED_OPS) - WITHOUT.get(family, set()) - (set() if family in WITH_EXPERTS else {"experts"})
    assert {name for name in FUSED_OPS if launched[name]} == expected
    # Fused or not, the float64 oracle is as near.
    oracle = family_model(family, torch.float64)
    errors = [tree_error(oracle, texts, tree, found.double()) for found in (plain, logits)]
    assert errors[1] < max(4 * errors[0], 1e-6)


@pytest.mark.parametrize("family", matrix(["gemma", "granitemoehybrid", "qwen3_next", "mamba2"]))
@pytest.mark.parametrize("broken", ["offset", "factor", "activation", "rotary", "experts"])
def test_a_wrong_fact_is_seen_in_the_logits(
    family: str, broken: str, launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family_model(family)
    plain, _, tree = verified(model, is_fused=False)
    real = {name: getattr(ops, name) for name in FUSED_OPS}
    if broken == "offset":
        monkeypatch.setattr(ops, "rms_norm", lambda *a, offset, **k: real["rms_norm"](*a, offset=1 - offset, **k))
    elif broken == "factor":
        monkeypatch.setattr(ops, "rms_norm_add", lambda *a, scale, **k: real["rms_norm_add"](*a, scale=1.01, **k))
        if family == "granitemoehybrid":
            assert model.config.residual_multiplier != 1.01
    elif broken == "activation":
        monkeypatch.setattr(ops, "gated_activation", lambda gate, up, **k: gate if up is None else gate * up)
    elif broken == "experts":
        monkeypatch.setattr(ops, "experts", lambda x, index, *a, **k: real["experts"](x, index.flip(1), *a, **k))
    else:
        monkeypatch.setattr(ops, "rotary", lambda q, k, *_: (q, k))
    logits, _, _ = verified(model, is_fused=True)
    kept = tree.parents.ge(0) | (torch.arange(tree.parents.shape[1]) == 0)
    has_it = {"activation": "gated_activation", "rotary": "rotary"}.get(broken) not in WITHOUT.get(family, set())
    has_it = has_it and (broken != "experts" or family in WITH_EXPERTS)
    assert (relative_error(logits[kept], plain[kept]) > 1e-4) == has_it


@pytest.mark.parametrize("family", matrix())
def test_a_patched_model_runs_its_own_code_in_every_other_call(family: str, launched: Counter[str]) -> None:
    model = family_model(family)
    patched = TreeLM(copy.deepcopy(model)).model
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(patched(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)
    assert not launched


@pytest.mark.parametrize("family", ["bamba", "falcon_h1", "mamba2", "qwen3_5_text"])  # without experts near a tie
def test_half_precision_stays_as_near_to_float64_as_without(
    family: str, launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FUSED_OPS:  # the interpreter cuts bfloat16 off instead of rounding it
        monkeypatch.setattr(ops, name, functools.partial(getattr(ops, name), backend="reference"))
    squares = [0.0, 0.0]
    for seed in range(4):
        model = family_model(family, torch.bfloat16, seed)
        oracle = copy.deepcopy(model).double()
        for place, is_fused in enumerate((False, True)):
            logits, texts, tree = verified(model, is_fused=is_fused, seed=seed)
            for row, text in enumerate(texts):
                exact = fresh_node_logits(oracle, text, tree, row)
                squares[place] += float((logits[row, real_nodes(tree, row)] - exact).square().mean())
    assert squares[1] < 1.1 * squares[0]  # 0.8 to 1.04: a launch rounds once where several rounded each


def test_a_failing_forward_leaves_no_layer_fused(launched: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lm = TreeLM(family_model("llama"))
    state = lm.new_state(1, 32, 4)
    lm.prefill(state, torch.arange(5)[None])
    with monkeypatch.context() as patch:
        patch.setattr(ops, "attention_step", refuse)
        with pytest.raises(AssertionError, match="the module's own forward ran"):
            lm.verify(state, TokenTree.chain([1, 2]))
    launched.clear()
    with torch.no_grad():
        lm.model(torch.arange(5)[None], use_cache=False)
    assert not launched


def test_another_thread_is_not_scoring(launched: Counter[str]) -> None:
    norm = nn.Sequential(LlamaRMSNorm(8))
    fused_layers.patch_fused_layers(norm)
    with fused_layers.fused_scope(True):
        thread = threading.Thread(target=norm, args=(torch.ones(1, 8),))
        thread.start()
        thread.join()
        assert not launched
        norm(torch.ones(1, 8))
    norm(torch.ones(1, 8))
    assert launched["rms_norm"] == 1


def test_a_model_can_be_patched_again_and_copied(launched: Counter[str]) -> None:
    model = family_model("bamba")
    once = TreeLM(model)
    again = TreeLM(copy.deepcopy(once.model))
    twice = TreeLM(once.model)
    norms: list[Any] = [
        next(part for part in lm.model.modules() if hasattr(part, "fused_facts")) for lm in (again, twice)
    ]
    assert all(norm.forward.args == (norm, None) for norm in norms)  # itself, and no forward before ours


def test_a_forward_that_was_put_on_a_module_before_stays_its_own(launched: Counter[str]) -> None:
    norm: Any = LlamaRMSNorm(8)
    norm.forward = lambda x: LlamaRMSNorm.forward(norm, x) + 1
    fused_layers.patch_fused_layers(nn.Sequential(norm))
    assert "fused_facts" not in norm.__dict__
    with fused_layers.fused_scope(True), torch.no_grad():
        assert torch.equal(norm(torch.ones(1, 8)), LlamaRMSNorm.forward(norm, torch.ones(1, 8)) + 1)
    assert not launched


def test_accelerates_forward_of_a_module_runs_in_plain_calls_alone(launched: Counter[str]) -> None:
    norm = LlamaRMSNorm(8)
    hook = AlignDevicesHook(execution_device="cpu")
    add_hook_to_module(norm, hook)
    calls: list[Any] = []

    def post_forward(_: Any, output: Tensor) -> Tensor:
        calls.append(output)
        return output

    hook.post_forward = post_forward
    for _ in range(2):
        fused_layers.patch_fused_layers(nn.Sequential(norm))
        norm(torch.ones(1, 8))
    assert len(calls) == 2
    with fused_layers.fused_scope(True):
        norm(torch.ones(1, 8))
    assert len(calls) == 2 and launched["rms_norm"] == 1


def test_a_norm_whose_weights_are_fetched_for_each_call_runs_its_own_forward(launched: Counter[str]) -> None:
    norm, x = LlamaRMSNorm(8), torch.arange(8.0)[None]
    expected = 3 * norm(x)
    hook = AlignDevicesHook(execution_device="cpu", offload=True, weights_map={"weight": torch.full((8,), 3.0)})
    add_hook_to_module(norm, hook)
    assert norm.weight.device.type == "meta"
    fused_layers.patch_fused_layers(nn.Sequential(norm))
    with fused_layers.fused_scope(True), torch.no_grad():
        assert torch.allclose(norm(x), expected)
    assert "fused_facts" in norm.__dict__ and not launched


@pytest.mark.parametrize("family", ["jamba", "llama"])
def test_trees_run_the_hooks_of_activations(family: str, launched: Counter[str]) -> None:
    model = family_model(family)
    lm, tree = TreeLM(copy.deepcopy(model)), random_tree(random.Random(0), [6])
    for module in (*model.modules(), *lm.model.modules()):
        if isinstance(getattr(module, "act_fn", None), nn.Module):
            module.act_fn.register_forward_hook(lambda _, __, y: y * y)
    assert tree_error(model, [[]], tree, lm.verify(lm.new_state(1, 8, 8), tree)) < TOLERANCE[torch.float32]


def shift(_: Any, __: Any, output: Tensor) -> None:
    assert isinstance(output, Tensor)
    output += 1  # in place, and nothing is returned


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_hooks_of_layers_are_given_tensors(family: str, launched: Counter[str]) -> None:
    model = family_model(family)
    lm, tree = TreeLM(copy.deepcopy(model)), random_tree(random.Random(0), [6])
    for layer in (*model.base_model.layers, *lm.model.base_model.layers):
        layer.register_forward_hook(shift)
    assert tree_error(model, [[]], tree, lm.verify(lm.new_state(1, 8, 8), tree)) < TOLERANCE[torch.float32]
    assert launched["rms_norm"] and not launched["rms_norm_add"]


def test_a_hook_of_a_module_that_was_inserted_later_is_given_tensors(launched: Counter[str]) -> None:
    class Around(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.layer(*args, **kwargs)

    model = family_model("llama")
    lm, tree = TreeLM(copy.deepcopy(model)), random_tree(random.Random(0), [6])
    for layers in (model.model.layers, lm.model.model.layers):
        layers[0] = Around(layers[0])
        layers[0].register_forward_hook(shift)
    assert tree_error(model, [[]], tree, lm.verify(lm.new_state(1, 8, 8), tree)) < TOLERANCE[torch.float32]
    assert launched["rms_norm"] and not launched["rms_norm_add"]
