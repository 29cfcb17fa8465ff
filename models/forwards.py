"""A forward of ours on a module: plain calls run what the module ran before it, copies and pickles keep it.

It knows no trees and no layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["OwnForward", "is_hooked", "is_linear", "is_patched", "own_forward", "put_forward"]

MOVER = "AlignDevicesHook"  # accelerate's, which moves tensors and computes nothing


class OwnForward(functools.partial[Any]):
    """A function of this package with the module and the forward that it stands before as its first arguments.

    A bound method would be unpickled by its name, under which a module of transformers has nothing.
    """


def put_forward(module: Any, function: Callable[..., Any], *facts: Any) -> None:
    """Make a module run ``function(module, before, *facts, *args, **kwargs)``, in place of one of ours that it has.

    ``before`` is the forward that somebody else has put on the module, or None: see ``own_forward``.
    """
    module.forward = OwnForward(function, module, _theirs(module.__dict__.get("forward")), *facts)


def own_forward(module: Any, before: Callable[..., Any] | None) -> Callable[..., Any]:
    """Give what the module ran without us."""
    return functools.partial(type(module).forward, module) if before is None else before


def is_hooked(module: Any) -> bool:
    """Tell whether a forward hook looks at what goes into a module or comes out of it; a function has none."""
    return bool(getattr(module, "_forward_hooks", None) or getattr(module, "_forward_pre_hooks", None))


def is_patched(module: Any) -> bool:
    """Tell whether somebody has put a forward on a module that may compute something else than its class's."""
    forward = _theirs(module.__dict__.get("forward"))
    if forward is not None and type(module.__dict__.get("_hf_hook")).__name__ == MOVER:
        forward = _theirs(module.__dict__.get("_old_forward"))
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def is_linear(module: Any) -> bool:
    """Tell whether a module computes what its weight and bias say, and nothing else."""
    return type(module).forward is nn.Linear.forward and not is_patched(module) and not is_hooked(module)


def _theirs(forward: Any) -> Any:
    """Find the forward under those of ours."""
    while isinstance(forward, OwnForward):
        forward = forward.args[1]
    return forward
