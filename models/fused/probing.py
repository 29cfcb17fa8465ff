"""Recognition of norms, feed-forwards, experts and rotary functions by running a small copy of the module.

A module is recognised by its results, not by its name, so a release may rename classes, and one that computes
something else is left unpatched.  Small copies share no memory with the module and run on the CPU.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stree.kernels.fused import reference
from stree.kernels.ops import ACTIVATIONS

__all__ = [
    "Experts",
    "FeedForward",
    "Norm",
    "activation_of",
    "experts_of",
    "feed_forward_of",
    "gated_norm_of",
    "keeps_rotary_dtype",
    "norm_of_rows",
]

EPS_NAMES = ("variance_epsilon", "eps")
CLOSE = 1e-5


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of rows: x / sqrt(mean(x^2) + eps) * (weight + offset); ``eps`` names the attribute."""

    eps: str
    offset: float


@dataclass(frozen=True, slots=True)
class FeedForward:
    """A feed-forward: down(act(gate(x)) * up(x)), by the names of its parts.

    Attributes:
        gate: projection under the activation.
        up: projection beside it; "" where the gate's output holds both halves; None where there is none.
        down: last projection.
        activation: the activation's attribute, or None for SiLU as a function.
    """

    gate: str
    up: str | None
    down: str
    activation: str | None


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts without biases: `stree.kernels.ops.experts` on its weights; ``up`` names the first."""

    up: str
    gated: bool


FEED_FORWARDS = (
    FeedForward("gate_proj", "up_proj", "down_proj", "act_fn"),
    FeedForward("w1", "w3", "w2", None),
    FeedForward("input_linear", "", "output_linear", "activation"),
    FeedForward("up_proj", None, "down_proj", "act_fn"),
)
GATE_FACTOR, DOWN_FACTOR = "gate_multiplier", "down_multiplier"  # Falcon-H1's

R = TypeVar("R")
_results: dict[tuple[Callable[..., Any], Any], Any] = {}


def _run(probe: Callable[..., R], *args: Any) -> R | None:
    """Return ``probe(*args)``, or None if a small copy does not run."""
    with suppress(Exception):  # as of torch.nn.RMSNorm, which takes rows of its own width alone
        return probe(*args)
    return None


def _once(probe: Callable[..., R], key: Any, *args: Any) -> R | None:
    """Return what ``_run`` does, once for each key."""
    if (probe, key) not in _results:
        _results[probe, key] = _run(probe, *args)
    result: R | None = _results[probe, key]
    return result


def norm_of_rows(module: Any) -> Norm | None:
    """Return which norm of rows a module is, or None."""
    kind = type(module)
    names = [name for name in EPS_NAMES if isinstance(getattr(module, name, None), float)]
    parameters = dict(module.named_parameters(recurse=True))
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1 or len(names) != 1 or not _takes_rows(kind):
        return None
    return _run(_probe_norm, module, names[0])


def gated_norm_of(module: Any) -> dict[str, Any] | None:
    """Return the options with which `stree.kernels.ops.gated_rms_norm` is a module of rows and gates, or None."""
    if not isinstance(getattr(module, EPS_NAMES[0], None), float) or not hasattr(module, "weight"):
        return None
    options: dict[str, Any] = {}  # of transformers below 5.23
    if hasattr(module, "group_size"):  # Mamba-2, Bamba, Granite-4.0-H, Nemotron-H, Zamba2
        options = {"groups": module.weight.shape[0] // module.group_size}
    elif hasattr(module, "n_groups"):  # Falcon-H1
        options = {"groups": module.n_groups, "norm_before_gate": module.norm_before_gate}
    elif getattr(module, "activation", None) in ("silu", "sigmoid"):  # the delta rules
        options = {"norm_before_gate": True, "activation": module.activation}
    return options if _once(_probe_gated_norm, (type(module), *options.values()), module, options) else None


def feed_forward_of(module: Any) -> FeedForward | None:
    """Return which feed-forward a module is, or None."""
    kind = type(module)
    children = {name for name, _ in module.named_children()}
    names = next((names for names in FEED_FORWARDS if children == _parts(names)), None)
    if names is None or not _takes_rows(kind) or not _is_free(getattr(module, names.activation or "", None)):
        return None
    return names if _run(_probe_feed_forward, module, names) else None


def experts_of(module: Any) -> Experts | None:
    """Return which mixture of experts a module is, or None."""
    kind, parameters = type(module), dict(module.named_parameters())
    up = next((name for name in ("gate_up_proj", "up_proj") if parameters.keys() == {name, "down_proj"}), None)
    if up is None or any(p.dim() != 3 for p in parameters.values()) or not callable(getattr(module, "act_fn", None)):
        return None
    if [*inspect.signature(kind.forward).parameters][1:] != ["hidden_states", "top_k_index", "top_k_weights"]:
        return None
    names = Experts(up, up == "gate_up_proj")
    return names if _run(_probe_experts, module, names) else None


def activation_of(function: Callable[[Tensor], Tensor]) -> str | None:
    """Return the name that `stree.kernels.ops.gated_activation` has for an activation, or None."""
    if not _is_free(function):
        return None
    x = torch.linspace(-6, 6, 49, device="cpu")[None]
    with torch.no_grad():
        y = function(x)
    for name in ACTIVATIONS:
        if _is_close(y, reference.gated_activation(x, None, activation=name)):
            return name
    return None


def keeps_rotary_dtype(function: Callable[..., Any]) -> bool | None:
    """Return whether a function rotates halves of queries and keys as `stree.kernels.ops.rotary` does.

    Returns:
        None if it does something else; else whether its results have the dtype of q where that of cos is wider.
    """
    return _once(_probe_rotary, function, function)


def _is_free(activation: Any) -> bool:
    """Return whether an activation has no weights and so runs on any device."""
    return not isinstance(activation, nn.Module) or not any(True for _ in activation.parameters())


def _takes_rows(kind: type) -> bool:
    """Return whether a module takes one tensor."""
    return len(inspect.signature(kind.forward).parameters) == 2  # type: ignore[attr-defined]


def _is_close(found: Tensor, expected: Tensor) -> bool:
    """Compare results in the dtype of the expected one."""
    return torch.allclose(found.to(expected.dtype), expected, rtol=0, atol=CLOSE)


def _draw(*shape: int, seed: int) -> Tensor:
    """Draw normal numbers, the same at every call."""
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")


def _small_copy(module: Any, **parts: Any) -> Any:
    """Copy a module and replace parameters, children and attributes."""
    small = copy.copy(module)
    small.__dict__ |= {"_parameters": dict(module._parameters), "_modules": dict(module._modules)}
    for name, part in parts.items():
        if isinstance(part, nn.Parameter):
            small._parameters[name] = part
        elif isinstance(part, nn.Module):
            small._modules[name] = part
        else:
            small.__dict__[name] = part
    return small


@torch.no_grad()
def _probe_norm(module: Any, eps: str) -> Norm | None:
    """Run a small copy with a large eps and compare it with both kinds of norm."""
    x, weight = _draw(3, 8, seed=0), _draw(8, seed=1)
    narrow = nn.Parameter(weight.bfloat16())
    small = _small_copy(module, weight=narrow, **{eps: 0.25})
    if type(module).forward(small, x.bfloat16()).dtype != torch.bfloat16:
        return None
    y = type(module).forward(_small_copy(module, weight=nn.Parameter(weight), **{eps: 0.25}), x)
    for offset in (0.0, 1.0):
        if _is_close(y, reference.rms_norm(x, weight, eps=0.25, offset=offset)):
            return Norm(eps, offset)
    return None


@torch.no_grad()
def _probe_gated_norm(module: Any, options: dict[str, Any]) -> bool:
    """Run a small copy with a large eps, of groups of four, and compare it with the reference."""
    width = 4 * options.get("groups", 2)
    x, gate, weight = _draw(3, width, seed=0), _draw(3, width, seed=1), _draw(width, seed=2)
    small = _small_copy(module, weight=nn.Parameter(weight), group_size=4, **{EPS_NAMES[0]: 0.25})
    expected = reference.gated_rms_norm(x, gate, weight, eps=0.25, **options)
    is_norm = dict(module.named_parameters()).keys() == {"weight"}
    return is_norm and _is_close(type(module).forward(small, x, gate), expected)


def _parts(names: FeedForward) -> set[str]:
    """Return the names of a feed-forward's children."""
    return {name for name in (names.gate, names.up, names.down, names.activation) if name}


@torch.no_grad()
def _probe_feed_forward(module: Any, names: FeedForward) -> bool:
    """Run a small copy and compare it with the reference."""
    halves = 2 if names.up == "" else 1
    shapes = {names.gate: (4, 6 * halves), names.up: (4, 6), names.down: (6, 4)}
    # Without weights of their own: drawing them would advance the caller's random numbers.
    make = functools.partial(nn.utils.skip_init, nn.Linear, device="cpu")
    parts: dict[str, Any] = {name: make(*sizes) for name, sizes in shapes.items() if name}
    for seed, part in enumerate(parts.values()):
        part.weight.copy_(_draw(*part.weight.shape, seed=seed))
        part.bias.copy_(_draw(*part.bias.shape, seed=9 + seed))
    factors = {name: f for name, f in ((GATE_FACTOR, 0.75), (DOWN_FACTOR, 1.5)) if hasattr(module, name)}
    x = _draw(3, 4, seed=20)
    y = type(module).forward(_small_copy(module, **parts, **factors), x)
    gate = parts[names.gate](x)
    gate, up = gate.chunk(2, -1) if names.up == "" else (gate, parts[names.up](x) if names.up else 1)
    act = F.silu if names.activation is None else getattr(module, names.activation)
    hidden = act(gate * factors.get(GATE_FACTOR, 1)) * up
    expected = parts[names.down](hidden) * factors.get(DOWN_FACTOR, 1)
    return isinstance(y, Tensor) and y.shape == expected.shape and _is_close(y, expected)


@torch.no_grad()
def _probe_experts(module: Any, names: Experts) -> bool:
    """Run a small copy of three experts, expert by expert, and compare it with the reference, in two dtypes."""
    wide = 2 if names.gated else 1
    up, down = _draw(3, 5 * wide, 4, seed=0), _draw(3, 4, 5, seed=1)
    x, weights, index = (
        _draw(4, 4, seed=2),
        _draw(4, 2, seed=3),
        torch.tensor([[0, 2], [2, 1], [1, 0], [2, 0]], device="cpu"),
    )
    config = types.SimpleNamespace(_experts_implementation="eager")
    parts: dict[str, Any] = {"num_experts": 3, "config": config, "act_fn": nn.SiLU()}

    def run(dtype: torch.dtype) -> Tensor:
        own = {names.up: nn.Parameter(up.to(dtype)), "down_proj": nn.Parameter(down.to(dtype))}
        y: Tensor = type(module).forward(_small_copy(module, **parts, **own), x.to(dtype), index, weights)
        return y

    expected = reference.experts(x, index, weights, up, down, activation="silu", gated=names.gated)
    return _is_close(run(torch.float32), expected) and run(torch.bfloat16).dtype == torch.bfloat16


@torch.no_grad()
def _probe_rotary(function: Callable[..., Any]) -> bool | None:
    """Rotate a few rows, with fewer angles than columns if the function takes that."""
    parameters = [*inspect.signature(function).parameters]
    if parameters[:4] != ["q", "k", "cos", "sin"]:
        return None
    q, k, (cos, sin) = _draw(2, 3, 5, 8, seed=0), _draw(2, 1, 5, 8, seed=1), _draw(2, 2, 5, 8, seed=2)
    expected = reference.rotary(q, k, cos, sin)
    found = function(q, k, cos, sin)
    if not all(_is_close(a, b) for a, b in zip(found, expected, strict=True)):
        return None
    return function(q.bfloat16(), k.bfloat16(), cos, sin)[0].dtype == torch.bfloat16  # type: ignore[no-any-return]
