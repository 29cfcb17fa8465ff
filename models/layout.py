"""What a captured or compiled step of a model depends on beside its state, and whether its weights were written to."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from torch import Tensor

from stree.models.patched_model import PatchedModel

__all__ = ["layout_of", "sizes_of", "writes_of"]

SETTINGS = (bool, int, float, str, dict, list, tuple, set)  # attributes of a module that a step may depend on


def layout_of(lm: PatchedModel) -> Hashable:
    """Return what a captured or compiled step of a model depends on: switches, hooks, addresses of weights."""
    modules = [*lm.model.modules()]
    settings = (setting for part in (*modules, *_configs(modules)) for setting in _settings(part))
    return lm.defers_commit, lm.fused_layers, lm.fused_mixers, *settings


def writes_of(lm: PatchedModel) -> Hashable:
    """Return how often torch has counted a write to each weight in place; one through its ``data`` is not counted."""
    weights = (*lm.model.parameters(), *lm.model.buffers())
    return tuple(0 if weight.is_inference() else weight._version for weight in weights)


def sizes_of(model: Any) -> set[int]:
    """Return all sizes of a model's weights and all integers of its configs."""
    settings = (value for config in _configs(model.modules()) for value in vars(config).values())
    numbers = {value for value in settings if isinstance(value, int)}
    return numbers.union(*(tensor.shape for tensor in (*model.parameters(), *model.buffers())))


def _configs(modules: Iterable[Any]) -> Iterable[Any]:
    """Return the configs of modules, each once."""
    configs = (vars(module).get("config") for module in modules)
    return {id(config): config for config in configs if hasattr(config, "__dict__")}.values()


def _settings(module: Any) -> Iterator[Any]:
    """Class, hooks, switches and addresses of weights of a module, or entries of its config."""
    yield type(module)
    for name, value in dict(vars(module)).items():  # a copy: another thread may patch the module now
        if isinstance(value, SETTINGS) and value:  # most are empty
            yield name, _frozen(value)


def _frozen(value: Any) -> Any:
    """Copy numbers, names, addresses of tensors and collections of them; functions, such as hooks, become None."""
    if isinstance(value, dict):
        return tuple((key, _frozen(part)) for key, part in value.items())
    if isinstance(value, (list, tuple, set)):
        return tuple(map(_frozen, value))
    if isinstance(value, SETTINGS):
        return value
    return _address(value) if isinstance(value, Tensor) else None


def _address(tensor: Tensor) -> int:
    """Address of a tensor; a wrapper subclass has none of its own."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return id(tensor)
