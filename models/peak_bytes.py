"""The most bytes of tensors that exist at once while code runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["PeakBytes", "peak_bytes"]


def peak_bytes(call: Callable[[], Any]) -> int:
    """Return the most bytes of tensors that exist at once of those that a call makes; they may be on ``meta``."""
    tracker = PeakBytes()
    with tracker:
        call()
    return tracker.peak


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations make; those of the first arguments are not counted.

    Attributes:
        peak: the most bytes at once so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: int = 0
        self._held: int = 0
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it makes."""
        given = {storage._cdata for storage in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage._cdata not in given | self._made:
                self._made.add(storage._cdata)
                self._held += storage.nbytes()
                self.peak = max(self.peak, self._held)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return out

    def _free(self, key: int, num_bytes: int) -> None:
        """Take a freed storage off."""
        self._made.discard(key)
        self._held -= num_bytes


def _storages(values: Any) -> list[Any]:
    """List the storages of all tensors in nested values."""
    return [one.untyped_storage() for one in tree_leaves(values) if isinstance(one, Tensor)]
