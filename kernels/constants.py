"""Tensors that depend on sizes alone, made once in a process and never freed: captured steps read them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import update_wrapper
from typing import TypeVar, TypeVarTuple

__all__ = ["constant"]

Keys = TypeVarTuple("Keys")
R = TypeVar("R")


def constant(make: Callable[[*Keys], R]) -> Callable[[*Keys], R]:
    """Keep what a function of positional arguments returns for each of them, for good; no caller may write to it.

    Captured steps hold no reference to what they read, so nothing is dropped.  Arguments must take few values: sizes
    that grow with a batch or a tree are rounded up to a power of two, and callers slice.

    Unlike those of ``functools.cache``, threads that call it for the first time at once all get one object.  Otherwise
    a captured step could read a tensor that nothing else holds.
    """
    kept: dict[Hashable, R] = {}

    def call(*key: *Keys) -> R:
        return kept[key] if key in kept else kept.setdefault(key, make(*key))

    return update_wrapper(call, make)
