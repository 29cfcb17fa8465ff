"""Models on several devices: every stateful layer is called with a copy of the tree's step on the layer's device.

Unused by models on one device.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor

from stree.models.patching import unpatched_forward, wrap_forward
from stree.models.tree_step import TreeStep

__all__ = ["keep_on_device", "step_on"]


def keep_on_device(mixer: Any, device: torch.device) -> None:
    """Make a patched module copy every ``TreeStep`` that it is called with to its device."""
    wrap_forward(mixer, _forward, device)


def step_on(step: TreeStep, device: torch.device) -> TreeStep:
    """Return a step with topology and lengths on a device; each device's copy is made once."""
    if device == step.state.lengths.device:
        return step
    if device not in step.copies:
        state = copy.copy(step.state)
        state.lengths = step.state.lengths.to(device)
        topology, path, entries = (_moved(part, device) for part in (step.topology, step.path, step.entries))
        step.copies[device] = dataclasses.replace(step, state=state, topology=topology, path=path, entries=entries)
    return step.copies[device]


def _moved(indices: Any, device: torch.device) -> Any:
    """Copy a topology, its indices or an accepted path to another device; None stays None."""
    if indices is None:
        return None
    moved: dict[str, Any] = {}
    for field in dataclasses.fields(indices):
        value = getattr(indices, field.name)
        if isinstance(value, Tensor):
            moved[field.name] = value.to(device)
        elif dataclasses.is_dataclass(value):
            moved[field.name] = _moved(value, device)
    return dataclasses.replace(indices, **moved)


def _forward(mixer: Any, patched: Any, device: torch.device, /, *args: Any, **kwargs: Any) -> Any:
    """Run a patched forward with every ``TreeStep`` among the arguments on the module's device."""
    args = tuple(step_on(arg, device) if isinstance(arg, TreeStep) else arg for arg in args)
    for name, value in kwargs.items():
        if isinstance(value, TreeStep):
            kwargs[name] = step_on(value, device)
    return unpatched_forward(mixer, patched)(*args, **kwargs)
