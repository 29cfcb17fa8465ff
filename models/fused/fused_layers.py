"""Fused layers: modules of transformers that run as one Triton launch each while a tree is scored.

These are norms between layers together with the residual sum before them, gated norms of recurrent layers, rotary
positions, the middle of feed-forwards, and mixtures of experts; on a CPU the norms, by numba's code.  A module runs
unfused if its class was not recognised, another library has replaced its forward, a part that would be skipped has
hooks, or the call scores no tree.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stree.kernels import dispatch, ops
from stree.kernels.fused.tiles import MAX_NORM_WIDTH
from stree.models.fused import probing
from stree.models.fused.lazy_residual import LazyResidual, normalise_sum
from stree.models.patching import has_foreign_forward, has_patch, is_hooked, patch_forward, unpatched_forward

__all__ = [
    "FUSED", "Scope", "as_lazy_residual", "deferred_norm", "fused_scope", "patch_fused_layers", "scope",
    "with_fused_rotary",
]  # fmt: skip

FUSED = frozenset({"experts", "gated_activation", "gated_rms_norm", "rms_norm", "rms_norm_add", "rotary"})
ROTARY = "apply_rotary_pos_emb"
RENAMING = "transformers.utils.deprecation"  # its wrapper of a forward renames arguments that no model passes on
_patching = threading.Lock()


@dataclass(frozen=True, slots=True)
class Scope:
    """How layers run at present.

    Attributes:
        in_tree: whether the model scores a tree.
        operations: of ``FUSED``, which layers run then.
        may_defer: returns whether residual sums may be lazy.
    """

    in_tree: bool = False
    operations: Collection[str] = ()
    may_defer: Callable[[], bool] = lambda: False


_scope: ContextVar[Scope] = ContextVar("scope", default=Scope())  # noqa: B039 frozen
scope = _scope.get


@contextmanager
def fused_scope(operations: Collection[str], may_defer: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Score a tree with these operations of ``FUSED``; ``may_defer`` returns whether residual sums may be lazy."""
    token = _scope.set(Scope(True, operations, may_defer))
    try:
        yield
    finally:
        _scope.reset(token)


def patch_fused_layers(model: Any, operations: Collection[str] = FUSED) -> None:
    """Patch the recognised modules of a model that can run by some operations while a tree is scored.

    What is patched stays: calls of other threads may have wrapped it meanwhile, to record hidden states.
    """
    with _patching:
        for module in model.modules():
            _patch_layer(module, operations)


def _patch_layer(module: Any, operations: Collection[str]) -> None:
    if "rms_norm" in operations and (norm := probing.norm_of_rows(module)) is not None:
        if module.weight.shape[0] <= MAX_NORM_WIDTH:
            _patch(module, _norm_forward, norm)
    elif "gated_rms_norm" in operations and (options := probing.gated_norm_of(module)) is not None:
        _patch(module, _gated_norm_forward, options)
    elif "gated_activation" in operations and (feed_forward := probing.feed_forward_of(module)) is not None:
        act = None if feed_forward.activation is None else getattr(module, feed_forward.activation)
        activation = "silu" if act is None else probing.activation_of(act)
        if activation is not None:
            _patch(module, _feed_forward_forward, feed_forward, activation)
    elif "experts" in operations and (experts := probing.experts_of(module)) is not None:
        activation = probing.activation_of(module.act_fn)
        if activation is not None:
            _patch(module, _experts_forward, experts, activation)


def as_lazy_residual(output: Any) -> Any:
    """Wrap a layer's output, or the first of several, as a lazy residual if the next norm can add it up."""
    if isinstance(output, tuple):
        return (as_lazy_residual(output[0]), *output[1:])
    if isinstance(output, Tensor) and _runs("rms_norm_add", output) and scope().may_defer():
        return LazyResidual([(output, 1.0)])
    return output


@functools.cache
def with_fused_rotary(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention module's forward with rotary positions in one launch, or unchanged if unrecognised."""
    own: Any = forward
    while getattr(own, "__globals__", {}).get("__name__") == RENAMING:
        own = own.__wrapped__
    if not isinstance(own, types.FunctionType) or ROTARY not in own.__code__.co_names:
        return forward
    unpatched = own.__globals__[ROTARY]
    keeps_dtype = probing.keeps_rotary_dtype(unpatched)
    if keeps_dtype is None:
        return forward

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        fits = q.dim() == 4 and cos.dim() == 3 and (keeps_dtype or cos.dtype == q.dtype)
        if fits and not args and not kwargs and _runs("rotary", q):
            return ops.rotary(q, k, cos, sin)
        return unpatched(q, k, cos, sin, *args, **kwargs)

    fused = types.FunctionType(
        own.__code__.replace(), own.__globals__ | {ROTARY: rotary}, own.__name__, own.__defaults__, own.__closure__
    )
    fused.__kwdefaults__ = own.__kwdefaults__
    return fused


def deferred_norm(norm: Any, projection: Any, gate: Tensor) -> float | None:
    """Return eps of a gated norm whose factor a row may be applied behind the projection that follows, else None.

    Those norms have one group and gate first, and the projection is a plain matrix without bias.  In float16 rows
    without their factor could overflow.
    """
    if not (_runs("rms_norm_add", gate) and gate.dtype != torch.float16 and scope().may_defer()):
        return None
    is_plain = type(projection) is nn.Linear and projection.bias is None and not has_foreign_forward(projection)
    if not (is_plain and has_patch(norm, _gated_norm_forward)):
        return None
    options = probing.gated_norm_of(norm)
    is_factor = options in ({}, {"groups": 1}, {"groups": 1, "norm_before_gate": False})
    return float(norm.variance_epsilon) if is_factor else None


def _runs(op: str, like: Any) -> bool:
    """Return whether an operation is among those of the scope, and has its own version for the tensor's device."""
    return op in scope().operations and dispatch.has_own(op, like.device, like.dtype)


def _patch(module: Any, forward: Callable[..., Any], *facts: Any) -> None:
    """Patch a module's forward once, unless another library has it; ``facts`` are arguments of the new one."""
    if not has_foreign_forward(module) and not has_patch(module, forward):
        patch_forward(module, forward, *facts)


def _norm_forward(norm: Any, before: Any, facts: probing.Norm, /, x: Any = None, **named: Any) -> Any:
    """Add up a lazy residual and normalise its rows in one launch."""
    weight = norm.weight
    if named:  # x by the name that its class has for it
        return unpatched_forward(norm, before)(**named)
    if not _runs("rms_norm", x) or weight.device != x.device:
        return unpatched_forward(norm, before)(x)
    if torch.promote_types(weight.dtype, x.dtype) != x.dtype:  # some classes then return a wider dtype
        return unpatched_forward(norm, before)(x)
    normalise = normalise_sum if isinstance(x, LazyResidual) else ops.rms_norm
    return normalise(x, weight, eps=getattr(norm, facts.eps), offset=facts.offset)


def _gated_norm_forward(norm: Any, before: Any, options: dict[str, Any], /, *args: Any, **named: Any) -> Any:
    """Normalise and gate rows in one launch."""
    weight = norm.weight
    if len(args) != 2 or named or not _runs("gated_rms_norm", args[0]) or weight.device != args[0].device:
        return unpatched_forward(norm, before)(*args, **named)
    x, gate = args
    return ops.gated_rms_norm(x, gate, weight, eps=norm.variance_epsilon, **options)


def _feed_forward_forward(
    module: Any, before: Any, names: probing.FeedForward, activation: str, /, x: Any = None, **named: Any
) -> Any:
    """Run the projections, and everything between them in one launch."""
    if named:  # x by the name that its class has for it
        return unpatched_forward(module, before)(**named)
    if not _runs("gated_activation", x) or is_hooked(getattr(module, names.activation or "", None)):
        return unpatched_forward(module, before)(x)
    gate, up = getattr(module, names.gate)(x), None
    if names.up == "":
        gate, up = gate.chunk(2, dim=-1)
    elif names.up is not None:
        up = getattr(module, names.up)(x)
    scale = getattr(module, probing.GATE_FACTOR, 1.0)
    hidden = ops.gated_activation(gate, up, activation=activation, scale=scale)
    return as_lazy_residual(getattr(module, names.down)(hidden)) * getattr(module, probing.DOWN_FACTOR, 1.0)


def _experts_forward(
    module: Any,
    before: Any,
    names: probing.Experts,
    activation: str,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Any:
    """Run the experts in three launches for any routing."""
    up, down = getattr(module, names.up), module.down_proj
    fits = up.dtype == hidden_states.dtype and up.device == hidden_states.device and hidden_states.dim() == 2
    fits &= not (is_hooked(module.act_fn) or getattr(module, "_is_expert_parallel", False))
    if not (_runs("experts", hidden_states) and fits):
        return unpatched_forward(module, before)(hidden_states, top_k_index, top_k_weights)
    return ops.experts(
        hidden_states, top_k_index.long(), top_k_weights, up, down, activation=activation, gated=names.gated
    )
