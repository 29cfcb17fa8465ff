"""Patching a mixer or an attention module so that it scores a tree when it is called with a ``TreeStep``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stree.models.fused.fused_layers import as_lazy_residual, scope
from stree.models.patching import patch_forward, unpatched_forward
from stree.models.tree_step import TreeStep

__all__ = ["patch_mixer"]


def patch_mixer(module: Any, tree_forward: Callable[..., Any], plain_forward: Callable[..., Any] | None = None) -> None:
    """Make a module score a tree when a ``TreeStep`` is among the arguments of a call.

    Args:
        module: a part of a transformers model.
        tree_forward: called as ``tree_forward(module, step, *args, **kwargs)`` with that step.
        plain_forward: called as ``plain_forward(module, unpatched, *args, **kwargs)`` where there is no step; None to
            run the unpatched forward.
    """
    patch_forward(module, _forward, tree_forward, plain_forward)


def _forward(
    module: Any, before: Any, tree_forward: Callable[..., Any], plain_forward: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Run the tree forward if there is a step, else the plain one."""
    step = next((value for value in (*args, *kwargs.values()) if isinstance(value, TreeStep)), None)
    if step is not None:
        output = tree_forward(module, step, *args, **kwargs)
        return as_lazy_residual(output) if "rms_norm_add" in scope().operations else output
    unpatched = unpatched_forward(module, before)
    return unpatched(*args, **kwargs) if plain_forward is None else plain_forward(module, unpatched, *args, **kwargs)
