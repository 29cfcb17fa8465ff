"""What a captured or compiled step of a model depends on beside its state, and whether its weights were written to."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from torch import Tensor

from stree.models.patched_model import PatchedModel

__all__ = ["layout_of", "writes_of"]

SETTINGS = (bool, int, float, str, dict, list, tuple, set)  # attributes of a module that a step may depend on


def layout_of(lm: PatchedModel) -> Hashable:
    """Return what a captured or compiled step of a model depends on: switches, hooks, addresses of weights."""
    modules = [*lm.model.modules()]
    configs = {id(config): config for module in modules if hasattr(config := vars(module).get("config"), "__dict__")}
    settings = (setting for part in (*modules, *configs.values()) for setting in _settings(part))
    return lm.defers_commit, lm.fused_layers, *map(_address, (*lm.model.parameters(), *lm.model.buffers())), *settings


def writes_of(lm: PatchedModel) -> Hashable:
    """Return how often torch has counted a write to each weight in place; one through its ``data`` is not counted."""
    weights = (*lm.model.parameters(), *lm.model.buffers())
    return tuple(0 if weight.is_inference() else weight._version for weight in weights)


def _settings(module: Any) -> Iterator[Any]:
    """Class, hooks and switches of a module, or entries of its config."""
    yield type(module)
    for name, value in vars(module).items():
        if isinstance(value, SETTINGS) and value:  # most are empty
            yield name, _frozen(value)


def _frozen(value: Any) -> Any:
    """Copy numbers, names and collections of them; functions, such as hooks, become None."""
    if isinstance(value, dict):
        return tuple((key, _frozen(part)) for key, part in value.items())
    if isinstance(value, (list, tuple, set)):
        return tuple(map(_frozen, value))
    return value if isinstance(value, SETTINGS) else None


def _address(tensor: Tensor) -> int:
    """Address of a tensor; a wrapper subclass has none of its own."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return id(tensor)
