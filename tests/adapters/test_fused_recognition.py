"""Modules are recognised by what they compute; others are not fused."""

from __future__ import annotations

import copy
import inspect
import types
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.tiny_family_models import family_model
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHAttention
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridAttention

from stree.kernels.fused.tiles import MAX_NORM_WIDTH
from stree.models.fused import fused_layers, probing
from stree.models.fused.lazy_residual import LazyResidual
from stree.models.patching import is_patched, unpatched_forward, wrap_forward


class TwiceWeighted(LlamaRMSNorm):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * super().forward(x)  # type: ignore[no-any-return]


class Centred(LlamaRMSNorm):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))  # type: ignore[no-any-return]


class Widening(LlamaRMSNorm):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()  # type: ignore[no-any-return]


class Doubled(LlamaMLP):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)  # type: ignore[no-any-return]


NORMS: tuple[Callable[[int], nn.Module], ...] = (
    TwiceWeighted, Centred, Widening, nn.LayerNorm, partial(nn.LayerNorm, bias=False), nn.RMSNorm,
    partial(nn.RMSNorm, eps=1e-6),
)  # fmt: skip


@pytest.mark.parametrize("make", NORMS)
def test_norms_that_compute_something_else_are_not_fused(make: Callable[[int], nn.Module]) -> None:
    assert probing.norm_of_rows(make(24)) is None
    assert probing.norm_of_rows(LlamaRMSNorm(8)) == probing.Norm("variance_epsilon", 0.0)


class Scaled(LlamaRMSNorm):  # type: ignore[misc]
    def __init__(self, width: int, scale: float) -> None:
        super().__init__(width)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)  # type: ignore[no-any-return]


def test_norms_of_one_class_may_compute_different_things() -> None:
    norms = nn.Sequential(Scaled(8, 1.0), Scaled(8, 0.5))  # as by depth
    fused_layers.patch_fused_layers(norms)
    assert [is_patched(norm) for norm in norms] == [True, False]


def _scaled_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
    return self.scale * super(type(self), self).forward(hidden_states, top_k_index, top_k_weights)


def test_feed_forwards_and_experts_of_one_class_may_compute_different_things() -> None:
    class ScaledMLP(LlamaMLP):  # type: ignore[misc]
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * super().forward(x)  # type: ignore[no-any-return]

    first, second = (ScaledMLP(family_model("llama").config) for _ in range(2))
    second.scale = 0.5
    assert probing.feed_forward_of(first) is not None and probing.feed_forward_of(second) is None
    (experts,) = (
        m for m in family_model("qwen3_next").model.layers[0].mlp.modules() if type(m).__name__[-7:] == "Experts"
    )
    kind = type("ScaledExperts", (type(experts),), {"forward": _scaled_experts})
    pair = [copy.deepcopy(experts) for _ in range(2)]
    for one, scale in zip(pair, (1.0, 0.5), strict=True):
        one.__class__, one.scale = kind, scale
    assert [probing.experts_of(one) is None for one in pair] == [False, True]


def test_what_wraps_a_patched_norm_stays_when_the_model_is_patched_again() -> None:
    norm = LlamaRMSNorm(8)
    fused_layers.patch_fused_layers(nn.Sequential(norm))
    wrap_forward(norm, lambda module, inner, x: 2 * unpatched_forward(module, inner)(x))
    x = torch.ones(1, 8)
    before = norm(x)
    fused_layers.patch_fused_layers(nn.Sequential(norm))  # as by another thread's first state
    assert torch.equal(norm(x), before)


def test_a_norm_too_wide_for_its_kernel_is_not_fused() -> None:
    norms = [LlamaRMSNorm(width) for width in (MAX_NORM_WIDTH, MAX_NORM_WIDTH + 1)]
    fused_layers.patch_fused_layers(nn.Sequential(*norms))
    assert [is_patched(norm) for norm in norms] == [True, False]


def test_feed_forwards_that_compute_something_else_are_not_fused() -> None:
    config = family_model("llama").config
    assert probing.feed_forward_of(LlamaMLP(config)) is not None
    assert probing.feed_forward_of(Doubled(config)) is None
    exact = LlamaMLP(config)
    exact.act_fn = ACT2FN["gelu"]
    fused_layers.patch_fused_layers(nn.Sequential(exact))
    assert not is_patched(exact) and probing.activation_of(ACT2FN["gelu"]) is None
    scaled = next(module for module in family_model("falcon_h1").modules() if hasattr(module, probing.DOWN_FACTOR))
    assert probing.feed_forward_of(scaled) is not None
    assert (
        probing.activation_of(ACT2FN["gelu_pytorch_tanh"]) == "gelu_tanh" and probing.activation_of(nn.SiLU()) == "silu"
    )


class Learned(nn.SiLU):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(1, device="meta"))  # as on a device other than that of the small copy


def test_activations_with_weights_and_other_default_devices_do_not_disturb_patching() -> None:
    config = family_model("llama").config
    learned = LlamaMLP(config)
    learned.act_fn = Learned()
    assert probing.feed_forward_of(learned) is None and probing.activation_of(Learned()) is None
    model = family_model("granitemoehybrid")
    for module in model.modules():  # classes that were never probed before
        module.__class__ = type(type(module).__name__, (type(module),), {})
    rotary = apply_rotary_pos_emb
    unseen = types.FunctionType(rotary.__code__, rotary.__globals__, argdefs=rotary.__defaults__)
    with torch.device("meta"):
        fused_layers.patch_fused_layers(model)
        assert probing.keeps_rotary_dtype(unseen) is False
    names = {type(module).__name__ for module in model.modules() if is_patched(module)}
    assert names == {f"GraniteMoeHybrid{part}" for part in ("RMSNorm", "RMSNormGated", "MLP", "Experts")}


def test_experts_that_compute_something_else_are_not_fused(launched: Counter[str]) -> None:
    (experts,) = (
        m for m in family_model("qwen3_next").model.layers[0].mlp.modules() if type(m).__name__[-7:] == "Experts"
    )
    assert probing.experts_of(experts) == probing.Experts("gate_up_proj", True)

    class Halved(type(experts)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
            return super().forward(hidden_states, top_k_index, top_k_weights / 2)

    class Widened(type(experts)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
            return super().forward(hidden_states, top_k_index, top_k_weights).float()

    for kind in (Halved, Widened):
        experts.__class__ = kind
        assert probing.experts_of(experts) is None
    experts.__class__ = Halved.__mro__[1]
    fused_layers.patch_fused_layers(nn.Sequential(experts))
    experts._is_expert_parallel = True  # this process has only a part of the experts
    x, index = torch.randn(3, 32), torch.tensor([[0, 1], [2, 3], [1, 2]])
    with fused_layers.fused_scope(fused_layers.FUSED), torch.no_grad():
        experts(x, index, torch.ones(3, 2))
        experts._is_expert_parallel = False
        experts(x.double(), index, torch.ones(3, 2))  # which their weights are not
        assert not launched
        experts(x, index, torch.ones(3, 2))
    assert launched["experts"] == 1


def test_rotations_that_compute_something_else_are_not_fused() -> None:
    def in_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        turned = [torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) for x in (q, k)]
        return q * cos[:, None] + turned[0] * sin[:, None], k * cos[:, None] + turned[1] * sin[:, None]

    assert probing.keeps_rotary_dtype(in_pairs) is None
    assert fused_layers.with_fused_rotary(NemotronHAttention.forward) is NemotronHAttention.forward
    own = LlamaAttention.forward
    fused = fused_layers.with_fused_rotary(own)
    assert fused is not own and fused.__code__ == inspect.unwrap(own).__code__


def test_a_fused_forward_and_the_one_that_it_was_made_of_can_both_be_compiled() -> None:
    names: dict[str, Any] = {"apply_rotary_pos_emb": apply_rotary_pos_emb}
    exec("def forward(q, k, cos, sin, *, by=2):\n    return apply_rotary_pos_emb(by * q, k, cos, sin)", names)
    forwards = names["forward"], fused_layers.with_fused_rotary(names["forward"])
    q, angles, found = torch.randn(1, 2, 3, 8), torch.randn(1, 3, 8), []

    def both() -> None:
        for forward in forwards:
            torch._dynamo.graph_break()
            found.append(forward(q, q, angles, angles)[0])

    torch.compile(both, backend="eager")()
    assert found[0].equal(found[1]) and found[0].equal(forwards[0](q, q, angles, angles)[0])


@pytest.mark.parametrize(("attention", "keeps"), [(LlamaAttention, False), (OlmoHybridAttention, True)])
def test_angles_that_are_wider_than_queries_widen_them_only_where_the_family_does(
    attention: Any, keeps: bool, launched: Counter[str]
) -> None:
    rotary = fused_layers.with_fused_rotary(attention.forward).__globals__["apply_rotary_pos_emb"]
    q, angles = torch.ones(1, 2, 3, 8, dtype=torch.bfloat16), torch.ones(1, 3, 8)
    with fused_layers.fused_scope(fused_layers.FUSED):
        turned, _ = rotary(q, q, angles, angles)
    assert (turned.dtype == torch.bfloat16) == keeps and launched["rotary"] == keeps


def test_queries_and_angles_of_another_layout_are_rotated_by_the_familys_function(launched: Counter[str]) -> None:
    rotary = fused_layers.with_fused_rotary(LlamaAttention.forward).__globals__["apply_rotary_pos_emb"]
    q, cos, sin = (
        torch.randn(1, 3, *sizes, generator=torch.Generator().manual_seed(0)) for sizes in ((3, 8), (8,), (8,))
    )
    with fused_layers.fused_scope(fused_layers.FUSED):
        for given, named in (((q, q, cos, sin), {"unsqueeze_dim": 2}), ((q[0], q[0], cos[0], sin[0]), {})):
            assert torch.equal(rotary(*given, **named)[0], apply_rotary_pos_emb(*given, **named)[0])
    assert not launched


def test_a_norm_whose_weights_are_wider_than_its_rows_is_not_fused(launched: Counter[str]) -> None:
    norm = LlamaRMSNorm(8)
    fused_layers.patch_fused_layers(nn.Sequential(norm))
    with fused_layers.fused_scope(fused_layers.FUSED), torch.no_grad():
        assert norm(torch.ones(1, 8, dtype=torch.bfloat16)).dtype == torch.float32
    assert not launched


def test_only_tensors_of_a_scored_tree_become_lazy(launched: Counter[str]) -> None:
    x = torch.ones(1, 8)
    assert fused_layers.as_lazy_residual(x) is x
    with fused_layers.fused_scope(fused_layers.FUSED):
        assert (
            isinstance(fused_layers.as_lazy_residual(x), LazyResidual)
            and fused_layers.as_lazy_residual("rest") == "rest"
        )
        first, rest = fused_layers.as_lazy_residual((x, None))
        assert isinstance(first, LazyResidual) and rest is None
