"""Patches that make mixers and attention modules score trees, each on the device where its weights are."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stree.models.fused.fused_layers import as_lazy_residual
from stree.models.patching import PatchedForward, patch_forward, unpatched_forward
from stree.models.state import TreeStep

__all__ = ["keep_on_device", "patch_mixer", "step_on"]


def patch_mixer(module: Any, tree_forward: Callable[..., Any], plain_forward: Callable[..., Any] | None = None) -> None:
    """Make a module score trees where a ``TreeStep`` is among the arguments that it is called with.

    Args:
        module: a part of a transformers model.
        tree_forward: called as ``tree_forward(module, step, *args, **kwargs)`` with the step that was found.
        plain_forward: called as ``plain_forward(module, unpatched, *args, **kwargs)`` where there is no step; None to
            run the unpatched forward.
    """
    patch_forward(module, _forward, tree_forward, plain_forward)


def _forward(
    module: Any, before: Any, tree_forward: Callable[..., Any], plain_forward: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Score a tree if there is one."""
    step = next((value for value in (*args, *kwargs.values()) if isinstance(value, TreeStep)), None)
    if step is not None:
        return as_lazy_residual(tree_forward(module, step, *args, **kwargs))
    unpatched = unpatched_forward(module, before)
    return unpatched(*args, **kwargs) if plain_forward is None else plain_forward(module, unpatched, *args, **kwargs)


def keep_on_device(mixer: Any, device: torch.device) -> None:
    """Make a patched module take a ``TreeStep`` as a copy on its own device; only for models on several devices."""
    if mixer.forward.func is not _forward_on_device:  # a module that several layers share comes more than once
        mixer.forward = PatchedForward(_forward_on_device, mixer, mixer.forward, device)


def step_on(step: TreeStep, device: torch.device) -> TreeStep:
    """Give a step with topology and lengths on a device, copied there once."""
    if device == step.state.lengths.device:
        return step
    if device not in step.copies:
        state = copy.copy(step.state)
        state.lengths = step.state.lengths.to(device)
        topology, path, entries = (_moved(part, device) for part in (step.topology, step.path, step.entries))
        step.copies[device] = dataclasses.replace(step, state=state, topology=topology, path=path, entries=entries)
    return step.copies[device]


def _moved(indices: Any, device: torch.device) -> Any:
    """Copy a topology or an accepted path to another device; None stays None."""
    if indices is None:
        return None
    moved: dict[str, Any] = {}
    for field in dataclasses.fields(indices):
        value = getattr(indices, field.name)
        if isinstance(value, Tensor):
            moved[field.name] = value.to(device)
        elif isinstance(value, tuple):
            moved[field.name] = tuple(part.to(device) for part in value)
    return dataclasses.replace(indices, **moved)


def _forward_on_device(_: Any, patched: Any, device: torch.device, /, *args: Any, **kwargs: Any) -> Any:
    """Run a patched forward with every ``TreeStep`` among the arguments on the module's device."""
    args = tuple(step_on(arg, device) if isinstance(arg, TreeStep) else arg for arg in args)
    for name, value in kwargs.items():
        if isinstance(value, TreeStep):
            kwargs[name] = step_on(value, device)
    return patched(*args, **kwargs)
