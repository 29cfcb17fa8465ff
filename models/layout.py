"""What a captured or compiled step of a model depends on beside its state, and whether its weights were written to."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from torch import Tensor

from stree.models.packed_linear import PackedWeight
from stree.models.patched_model import PatchedModel

__all__ = ["layout_of", "portable_layout_of", "sizes_of", "writes_of"]

SETTINGS = (bool, int, float, str, dict, list, tuple, set)  # attributes of a module that a step may depend on


def layout_of(lm: PatchedModel) -> Hashable:
    """Return what a captured or compiled step of a model depends on: switches, hooks, addresses of weights."""
    return lm.defers_commit, lm.fused_layers, lm.fused_mixers, *_all_settings(lm, _address)


def portable_layout_of(lm: PatchedModel) -> str:
    """Return what a compiled step of a model depends on as text that is the same in every process.

    In place of its address a tensor has its shape, strides, dtype and the number of the place where it first occurs.
    Settings of the object itself are part of it, as are the numbers by which compiled functions find packed weights.
    """
    places: dict[int, int] = {}

    def described(tensor: Tensor) -> Hashable:
        return places.setdefault(id(tensor), len(places)), *tensor.shape, *tensor.stride(), str(tensor.dtype)

    own = {name: value for name, value in vars(lm).items() if name != "cache" and isinstance(value, SETTINGS)}
    forwards = (getattr(vars(module).get("forward"), "args", ()) for module in lm.model.modules())
    numbers = [part.number for parts in forwards for part in parts if isinstance(part, PackedWeight)]
    return repr((_frozen(own, described), numbers, *_all_settings(lm, described)))


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


def _all_settings(lm: PatchedModel, of_tensor: Callable[[Tensor], Hashable]) -> Iterator[Any]:
    """Settings of all modules of a model and of their configs."""
    modules = [*lm.model.modules()]
    return (setting for part in (*modules, *_configs(modules)) for setting in _settings(part, of_tensor))


def _settings(module: Any, of_tensor: Callable[[Tensor], Hashable]) -> Iterator[Any]:
    """Class, hooks, switches and weights of a module, or entries of its config."""
    yield type(module)
    for name, value in dict(vars(module)).items():  # a copy: another thread may patch the module now
        if isinstance(value, SETTINGS) and value:  # most are empty
            yield name, _frozen(value, of_tensor)


def _frozen(value: Any, of_tensor: Callable[[Tensor], Hashable]) -> Any:
    """Copy numbers, names, what is kept of tensors, and collections of them; functions, such as hooks, become None."""
    if isinstance(value, dict):
        return tuple((key, _frozen(part, of_tensor)) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(part, of_tensor) for part in value)
    if isinstance(value, set):
        return tuple(sorted((_frozen(part, of_tensor) for part in value), key=repr))
    if isinstance(value, SETTINGS):
        return value
    return of_tensor(value) if isinstance(value, Tensor) else None


def _address(tensor: Tensor) -> int:
    """Address of a tensor; a wrapper subclass has none of its own."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return id(tensor)
