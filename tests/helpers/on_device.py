"""Tensors of the CPU treated as a GPU's until a test ends; modes that watch operators for host reads, sizes and memory.

Within a block use `stree.kernels.dispatch.as_on_device`.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Container
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stree.kernels import dispatch, ops

FUSED_OPS = ("rms_norm", "rms_norm_add", "gated_activation", "rotary", "experts")


def treat_as_on_device(
    monkeypatch: pytest.MonkeyPatch,
    *,
    triton: bool = False,
    host_can_read: bool = False,
    operations: Container[str] = (),
) -> None:
    """Let a GPU's code run on the CPU until the test ends, by default without its kernels."""
    behaviour = dispatch.Behaviour(triton, host_can_read, operations)
    monkeypatch.setattr(dispatch, "_behaviour", ContextVar("behaviour", default=behaviour))


def count_fused_launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Make "auto" mean Triton for fused operations and count their calls."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> Any:
        real = getattr(ops, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return real(*args, **kwargs)

        return run

    for name in FUSED_OPS:
        monkeypatch.setattr(ops, name, counted(name))
    treat_as_on_device(monkeypatch, host_can_read=True, operations=FUSED_OPS)
    return counts


class NoHostReads(TorchDispatchMode):
    """Fail on operators whose result or shape depends on data that the host would have to read, and on reading it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._methods = _NoReadingMethods()

    def __enter__(self) -> NoHostReads:
        self._methods.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._methods.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("index", "index_put", "index_put_"):  # tagged, but only masks are read
            reads = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        else:
            reads = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if reads:
            raise AssertionError(f"{func} reads the device")
        return func(*args, **(kwargs or {}))


class _NoReadingMethods(TorchFunctionMode):
    """Fail on methods that read a tensor without an operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("tolist", "numpy", "__array__"):
            raise AssertionError(f"{func.__name__} reads the device")
        return func(*args, **(kwargs or {}))


class ResultSizes(TorchDispatchMode):
    """Record every operator with the sizes of its results: a captured graph needs them to be alike in all steps."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, list[list[int]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        parts = out if isinstance(out, (tuple, list)) else (out,)
        self.seen.append((str(func), [[*part.shape] for part in parts if isinstance(part, torch.Tensor)]))
        return out


class PeakMemory(TorchDispatchMode):
    """Count the storages of the tensors that operators make within the block, as long as something refers to them.

    Attributes:
        peak: bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {place: held for place, held in self._alive.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def untouched_memory(size: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return a tensor[size] whose memory, on a CPU, is given where it is touched; that of torch.empty is poisoned."""
    if torch.device(device).type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    no_reserve = 0x4000  # Linux's MAP_NORESERVE, which Python names from 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, size * dtype.itemsize, flags=flags), dtype=dtype)
