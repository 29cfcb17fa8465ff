"""Fused layers equal transformers' modules for every family and run only while a tree is scored."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module  # type: ignore[import-untyped]
from helpers.family_states import Decoding, verified
from helpers.fast_cases import slow_unless
from helpers.on_device import FUSED_OPS
from helpers.tiny_family_models import ROUTED, family_model, matrix
from helpers.tiny_models import fresh_node_logits, real_nodes, relative_error, tree_error
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from stree import TokenTree, TreeLM
from stree.kernels import ops
from stree.models.fused import fused_layers
from stree.models.packed_linear import pack_linears
from stree.models.patching import has_foreign_forward, is_patched

# Operations that a family's trees do not launch: some have no feed-forwards, or attention without positions.
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


FACTS = {  # by the wrong fact, the operation that hides it
    "offset": "rms_norm", "factor": "rms_norm_add", "activation": "gated_activation", "rotary": "rotary",
    "experts": "experts",
}  # fmt: skip


def has(family: str, op: str) -> bool:
    """Return whether a family's trees launch a fused operation."""
    return op not in WITHOUT.get(family, set()) and (op != "experts" or family in ROUTED)


def difference(tree: TokenTree, logits: Tensor, plain: Tensor) -> float:
    """Return the relative difference of logits at nodes that are not padding."""
    real = tree.parents.ge(0) | (torch.arange(tree.parents.shape[1]) == 0)
    return relative_error(logits[real], plain[real])


@pytest.mark.parametrize("family", matrix(fast=(), in_ci=("gemma", "qwen3_next")))
def test_fused_layers_change_no_logits_of_a_familys_tree(family: str, launched: Counter[str]) -> None:
    model = family_model(family)
    plain, texts, tree = verified(model, is_fused=False)
    assert not any(launched[name] for name in ("rms_norm", "rms_norm_add", "rotary", "experts"))
    launched.clear()
    logits, _, _ = verified(model, is_fused=True)
    assert difference(tree, logits, plain) < 2e-5
    assert [has(family, name) for name in FUSED_OPS] == [launched[name] > 0 for name in FUSED_OPS]
    # Fused or not, the float64 oracle is as near.
    oracle = family_model(family, torch.float64)
    errors = [tree_error(oracle, texts, tree, result.double()) for result in (plain, logits)]
    assert errors[1] < max(4 * errors[0], 1e-6)


@pytest.mark.parametrize(
    ("family", "broken"),
    slow_unless(
        lambda *_: False,
        itertools.product(("gemma", "granitemoehybrid", "qwen3_next", "mamba2"), FACTS),
        in_ci=lambda family, broken: family == "gemma" and broken != "experts",
    ),
)
def test_a_wrong_fact_is_seen_in_the_logits(
    family: str, broken: str, launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family_model(family)
    plain, _, tree = verified(model, is_fused=False)
    op = FACTS[broken]
    real = getattr(ops, op)
    wrong: dict[str, Callable[..., Any]] = {
        "offset": lambda *args, offset, **kwargs: real(*args, offset=1 - offset, **kwargs),
        "factor": lambda *args, scale, **kwargs: real(*args, scale=1.01, **kwargs),
        "activation": lambda gate, up, **_: gate if up is None else gate * up,
        "experts": lambda x, index, *args, **kwargs: real(x, index.flip(1), *args, **kwargs),
        "rotary": lambda q, k, *_: (q, k),
    }
    monkeypatch.setattr(ops, op, wrong[broken])
    logits, _, _ = verified(model, is_fused=True)
    assert (difference(tree, logits, plain) > 1e-4) == has(family, op)


@pytest.mark.parametrize("family", matrix())
def test_a_patched_model_runs_unfused_in_every_other_call(family: str, launched: Counter[str]) -> None:
    model = family_model(family)
    patched = TreeLM(copy.deepcopy(model)).model
    launched.clear()  # layers may have been compared
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(patched(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)
    assert not launched


def test_modules_take_their_argument_by_its_name() -> None:
    lm = TreeLM(family_model("granitemoehybrid"))
    fused_layers.patch_fused_layers(lm.model)
    pack_linears(lm.model)
    layer, x = lm.model.model.layers[0], torch.randn(1, 3, 32)
    named = {layer.input_layernorm: "hidden_states", layer.shared_mlp: "hidden_states", lm.model.lm_head: "input"}
    for module, name in named.items():
        assert is_patched(module)
        with torch.no_grad():
            assert torch.equal(module(**{name: x}), module(x))


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
    assert squares[1] < 1.5 * squares[0]  # 0.88 to 1.36; 0.76 to 1.17 over 16 seeds


def test_a_failing_forward_leaves_no_layer_fused(launched: Counter[str]) -> None:
    lm = TreeLM(family_model("llama"))
    state = lm.new_state(1, 32, 4)
    lm.prefill(state, torch.arange(5)[None])
    handle = lm.model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lm.verify(state, TokenTree.chain([1, 2]))
    handle.remove()
    launched.clear()
    with torch.no_grad():
        lm.model(torch.arange(5)[None], use_cache=False)
    assert not launched


def test_another_thread_is_not_scoring(launched: Counter[str]) -> None:
    norm = nn.Sequential(LlamaRMSNorm(8))
    fused_layers.patch_fused_layers(norm)
    with fused_layers.fused_scope(fused_layers.FUSED):
        thread = threading.Thread(target=norm, args=(torch.ones(1, 8),))
        thread.start()
        thread.join()
        assert not launched
        norm(torch.ones(1, 8))
    norm(torch.ones(1, 8))
    assert launched["rms_norm"] == 1


def test_a_model_can_be_patched_again_and_copied(launched: Counter[str]) -> None:
    once = TreeLM(family_model("llama"))
    tree, launches = TokenTree.chain([1, 2]), []
    for lm in (once, TreeLM(copy.deepcopy(once.model)), TreeLM(once.model)):
        launched.clear()
        lm.verify(lm.new_state(1, 8, 4), tree)
        launches.append(dict(launched))
    assert launches[0] and launches == launches[:1] * 3


def test_a_replaced_forward_is_not_fused(launched: Counter[str]) -> None:
    norm: Any = LlamaRMSNorm(8)
    norm.forward = lambda x: LlamaRMSNorm.forward(norm, x) + 1
    fused_layers.patch_fused_layers(nn.Sequential(norm))
    assert has_foreign_forward(norm)
    with fused_layers.fused_scope(fused_layers.FUSED), torch.no_grad():
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
    with fused_layers.fused_scope(fused_layers.FUSED):
        norm(torch.ones(1, 8))
    assert len(calls) == 2 and launched["rms_norm"] == 1


def test_a_norm_whose_weights_are_fetched_for_each_call_is_not_fused(launched: Counter[str]) -> None:
    norm, x = LlamaRMSNorm(8), torch.arange(8.0)[None]
    expected = 3 * norm(x)
    hook = AlignDevicesHook(execution_device="cpu", offload=True, weights_map={"weight": torch.full((8,), 3.0)})
    add_hook_to_module(norm, hook)
    assert norm.weight.device.type == "meta"
    fused_layers.patch_fused_layers(nn.Sequential(norm))
    with fused_layers.fused_scope(fused_layers.FUSED), torch.no_grad():
        assert torch.allclose(norm(x), expected)
    assert is_patched(norm) and not launched


def with_hooks(family: str, add: Callable[[Any], object]) -> Decoding:
    """Add hooks to a model and to its patched copy, and require exact trees."""
    model = family_model(family)
    lm = TreeLM(copy.deepcopy(model))
    for one in (model, lm.model):
        add(one)
    decoding = Decoding(model, [0], lm=lm)
    decoding.score([6])
    return decoding


@pytest.mark.parametrize("family", ["jamba", "llama"])
def test_trees_run_the_hooks_of_activations(family: str, launched: Counter[str]) -> None:
    def add(model: Any) -> None:
        for module in model.modules():
            if isinstance(getattr(module, "act_fn", None), nn.Module):
                module.act_fn.register_forward_hook(lambda _, __, y: y * y)

    with_hooks(family, add)


def shift(_: Any, __: Any, output: Tensor) -> None:
    assert isinstance(output, Tensor)
    output += 1  # in place, and nothing is returned


class Around(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


@pytest.mark.parametrize("is_inserted", [False, True])
@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_hooks_of_layers_receive_tensors(family: str, is_inserted: bool, launched: Counter[str]) -> None:
    def add(model: Any) -> None:
        layers = model.base_model.layers
        if is_inserted:  # after the model was patched
            layers[0] = Around(layers[0])
        for layer in layers[: 1 if is_inserted else None]:
            layer.register_forward_hook(shift)

    with_hooks(family, add)
    assert launched["rms_norm"] and not launched["rms_norm_add"]
