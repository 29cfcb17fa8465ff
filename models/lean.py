"""Lean layers: what transformers' modules do in many small launches, in one each, while a tree is scored.

Norms between layers with the residual sums that they read, gated norms of recurrent layers, rotary positions, the
middle of feed-forwards, and mixtures of experts.  Only where Triton runs; a module whose facts are not known, or
whose forward somebody has replaced, runs its own, and so does every module in any other call of the model, and one of
which a launch would leave out a part that has hooks.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from stree.kernels import dispatch, ops
from stree.kernels.tiles import MAX_NORM_WIDTH
from stree.models import laws
from stree.models.forwards import is_hooked, is_patched, own_forward, put_forward
from stree.models.waiting import WaitingSum, norm_of

__all__ = ["gated_norm", "graft_lean", "scoring", "waiting", "with_lean_rotary"]

ROTARY = "apply_rotary_pos_emb"
_is_scoring: ContextVar[bool] = ContextVar("is_scoring", default=False)
_may_wait: ContextVar[Callable[[], bool]] = ContextVar("may_wait")


@contextmanager
def scoring(is_scoring: bool, may_wait: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Say whether what the model runs inside is a tree, whose layers may be lean; ``may_wait`` tells of their sums."""
    tokens = _is_scoring.set(is_scoring), _may_wait.set(may_wait)
    try:
        yield
    finally:
        _is_scoring.reset(tokens[0])
        _may_wait.reset(tokens[1])


def graft_lean(model: Any) -> None:
    """Make the norms, feed-forwards and experts of a model that are known run lean while a tree is scored."""
    for module in model.modules():
        norm, feed_forward = laws.norm_of_rows(module), laws.feed_forward_of(module)
        if norm is not None and module.weight.shape[0] <= MAX_NORM_WIDTH:
            _override(module, _norm_forward, norm)
        elif feed_forward is not None:
            act = None if feed_forward.activation is None else getattr(module, feed_forward.activation)
            activation = "silu" if act is None else laws.activation_of(act)
            if activation is not None:
                _override(module, _feed_forward_forward, (feed_forward, activation))
        else:
            experts = laws.experts_of(module)
            activation = None if experts is None else laws.activation_of(module.act_fn)
            if activation is not None:
                _override(module, _experts_forward, (experts, activation))


def waiting(output: Any) -> Any:
    """Let a layer's output, or the first of several, wait for the sum that it is a part of and the norm after it."""
    if isinstance(output, tuple):
        return (waiting(output[0]), *output[1:])
    if isinstance(output, Tensor) and _runs("rms_norm_add", output) and _may_wait.get()():
        return WaitingSum([(output, 1.0)])
    return output


@functools.cache
def with_lean_rotary(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Give an attention module's forward with rotary positions in one launch; itself if it has none that are known."""
    if not isinstance(forward, types.FunctionType) or ROTARY not in forward.__code__.co_names:
        return forward
    own = forward.__globals__[ROTARY]
    keeps_dtype = laws.keeps_rotary_dtype(own)
    if keeps_dtype is None:
        return forward

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        fits = q.dim() == 4 and cos.dim() == 3 and (keeps_dtype or cos.dtype == q.dtype)
        if fits and not args and not kwargs and _runs("rotary", q):
            return ops.rotary(q, k, cos, sin)
        return own(q, k, cos, sin, *args, **kwargs)

    lean = types.FunctionType(
        forward.__code__.replace(), forward.__globals__ | {ROTARY: rotary}, forward.__name__, forward.__defaults__,
        forward.__closure__,
    )  # fmt: skip
    lean.__kwdefaults__ = forward.__kwdefaults__
    return lean


def gated_norm(norm: Any, x: Tensor, gate: Tensor) -> Tensor:
    """Normalise and gate float[..., c] rows as ``norm``, a gated RMSNorm of transformers, does.

    Where the Triton versions run, it is they who do it; elsewhere, and for a class with other facts than those that are
    known, it is the module's own forward.
    """
    if is_patched(norm) or is_hooked(norm) or not dispatch.has_triton("gated_rms_norm", x.device, x.dtype):
        return norm(x, gate)  # type: ignore[no-any-return]
    if hasattr(norm, "group_size"):  # Mamba-2, Bamba, Granite-4.0-H, Nemotron-H, Zamba2
        facts: dict[str, Any] = {"groups": x.shape[-1] // norm.group_size}
    elif hasattr(norm, "n_groups"):  # Falcon-H1
        facts = {"groups": norm.n_groups, "norm_before_gate": norm.norm_before_gate}
    elif getattr(norm, "activation", None) in ("silu", "sigmoid"):  # the delta rules
        facts = {"norm_before_gate": True, "activation": norm.activation}
    elif laws.gates_whole_rows(norm):  # Mamba-2, Bamba, Granite-4.0-H of transformers below 5.23
        facts = {}
    else:
        return norm(x, gate)  # type: ignore[no-any-return]
    return ops.gated_rms_norm(x, gate, norm.weight, eps=norm.variance_epsilon, **facts)


def _runs(op: str, like: Any) -> bool:
    """Tell whether a tree is scored where an operation runs in Triton."""
    return _is_scoring.get() and dispatch.has_triton(op, like.device, like.dtype)


def _override(module: Any, forward: Callable[..., Any], facts: Any) -> None:
    """Put a forward in front of a module's own, unless somebody has replaced that."""
    if not is_patched(module):
        module.__dict__["lean_facts"] = facts
        put_forward(module, forward)


def _norm_forward(norm: Any, before: Any, x: Any) -> Any:
    """Normalise rows in one launch, with the sum that they are."""
    weight = norm.weight
    if not _runs("rms_norm", x) or weight.device != x.device:
        return own_forward(norm, before)(x)
    if torch.promote_types(weight.dtype, x.dtype) != x.dtype:  # some classes then widen their output
        return own_forward(norm, before)(x)
    return norm_of(x, weight, eps=getattr(norm, norm.lean_facts.eps), offset=norm.lean_facts.offset)


def _feed_forward_forward(module: Any, before: Any, x: Any) -> Any:
    """Run the projections, and what stands between them in one launch."""
    names, activation = module.lean_facts
    if not _runs("gated_activation", x) or is_hooked(getattr(module, names.activation or "", None)):
        return own_forward(module, before)(x)
    gate, up = getattr(module, names.gate)(x), None
    if names.up == "":
        gate, up = gate.chunk(2, dim=-1)
    elif names.up is not None:
        up = getattr(module, names.up)(x)
    scale = getattr(module, laws.GATE_FACTOR, 1.0)
    hidden = ops.gated_activation(gate, up, activation=activation, scale=scale)
    return waiting(getattr(module, names.down)(hidden)) * getattr(module, laws.DOWN_FACTOR, 1.0)


def _experts_forward(
    module: Any, before: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Any:
    """Run the experts in three launches, whatever the routing."""
    names, activation = module.lean_facts
    up, down = getattr(module, names.up), module.down_proj
    fits = up.dtype == hidden_states.dtype and up.device == hidden_states.device and hidden_states.dim() == 2
    fits &= not (is_hooked(module.act_fn) or getattr(module, "_is_expert_parallel", False))
    if not (_runs("experts", hidden_states) and fits):
        return own_forward(module, before)(hidden_states, top_k_index, top_k_weights)
    return ops.experts(
        hidden_states, top_k_index.long(), top_k_weights, up, down, activation=activation, gated=names.gated
    )
