"""Replacing the forward of one module so that copies and pickles keep the patch and plain calls run the old forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

__all__ = [
    "PatchedForward",
    "has_foreign_forward",
    "has_patch",
    "is_hooked",
    "is_linear",
    "is_patched",
    "is_sharded",
    "num_features",
    "num_local_outputs",
    "patch_forward",
    "unpatch_forward",
    "unpatched_forward",
    "wrap_forward",
]

MOVER = "AlignDevicesHook"  # of accelerate; it moves tensors and computes nothing


class PatchedForward(functools.partial[Any]):
    """A function of this package with the module and the replaced forward as its first arguments.

    A bound method would be unpickled by its name, which a module of transformers does not have.
    """


def patch_forward(module: Any, function: Callable[..., Any], *arguments: Any) -> None:
    """Make a module run ``function(module, before, *arguments, *args, **kwargs)``; an earlier patch is replaced.

    ``before`` is the forward that another library has set on the module, or None: see ``unpatched_forward``.
    """
    module.forward = PatchedForward(function, module, _foreign(module.__dict__.get("forward")), *arguments)


def wrap_forward(module: Any, function: Callable[..., Any], *arguments: Any) -> None:
    """Make a module run ``function(module, inner, *arguments, *args, **kwargs)``; an earlier such wrapper is replaced.

    ``inner`` is the forward that the module has now, patched or not, or None for that of its class.
    """
    inner = module.__dict__.get("forward")
    if isinstance(inner, PatchedForward) and inner.func is function:
        inner = inner.args[1]
    module.forward = PatchedForward(function, module, inner, *arguments)


def unpatch_forward(module: Any) -> None:
    """Give a module the forward that it had before it was patched; one that was set over a patch stays."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, PatchedForward):
        del module.forward
        if _foreign(forward) is not None:
            module.forward = _foreign(forward)


def is_patched(module: Any) -> bool:
    """Return whether a module that was patched still is: calls reach the patch, maybe through another library's."""
    name = "_old_forward" if type(module.__dict__.get("_hf_hook")).__name__ == MOVER else "forward"
    forward = module.__dict__.get(name)
    return isinstance(module.__dict__.get("forward"), PatchedForward) or (
        forward is not None and getattr(forward, "__func__", None) is not type(module).forward
    )


def has_patch(module: Any, function: Callable[..., Any]) -> bool:
    """Return whether a module runs a function by ``patch_forward`` or ``wrap_forward``, maybe inside others."""
    forward = module.__dict__.get("forward")
    while isinstance(forward, PatchedForward) and forward.func is not function:
        forward = forward.args[1]
    return isinstance(forward, PatchedForward)


def unpatched_forward(module: Any, before: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the forward that a module had before it was patched."""
    return functools.partial(type(module).forward, module) if before is None else before


def is_hooked(module: Any) -> bool:
    """Return whether a module has forward hooks or forward pre-hooks, or all modules have; a function has none."""
    of_all = _global_forward_hooks or _global_forward_pre_hooks
    return bool(of_all or getattr(module, "_forward_hooks", None) or getattr(module, "_forward_pre_hooks", None))


def has_foreign_forward(module: Any) -> bool:
    """Return whether another library has set a forward that may compute something else than the module's class."""
    forward = _foreign(module.__dict__.get("forward"))
    if forward is not None and type(module.__dict__.get("_hf_hook")).__name__ == MOVER:
        forward = _foreign(module.__dict__.get("_old_forward"))
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def is_linear(module: Any) -> bool:
    """Return whether a module is a plain ``nn.Linear``: no adapter, no replaced forward, no hook."""
    return type(module).forward is nn.Linear.forward and not has_foreign_forward(module) and not is_hooked(module)


def is_sharded(module: Any) -> bool:
    """Return whether processes hold parts of a module's weights, as under a ``tp_plan``."""
    return any(isinstance(weight, DTensor) for weight in module.parameters())


def num_features(projection: Any) -> tuple[int, int]:
    """Return the numbers of inputs and of outputs of a linear module, which may be quantised, or wrapped as by LoRA."""
    if hasattr(projection, "in_features"):
        return projection.in_features, projection.out_features
    outputs, inputs = projection.weight.shape
    return inputs, outputs


def num_local_outputs(module: Any, name: str) -> int:
    """Return the number of outputs of a module's projection in this process, which may hold some of its rows only."""
    projection = getattr(module, name)
    weight, outputs = getattr(projection, "weight", None), num_features(projection)[1]
    plan = getattr(module.config, "base_model_tp_plan", None) or {}
    if any(place.endswith(f".{name}") and kind == "colwise_gather_output" for place, kind in plan.items()):
        return outputs
    return outputs * weight.to_local().shape[0] // weight.shape[0] if isinstance(weight, DTensor) else outputs


def _foreign(forward: Any) -> Any:
    """Return the forward under this package's patches, or None."""
    while isinstance(forward, PatchedForward):
        forward = forward.args[1]
    return forward
