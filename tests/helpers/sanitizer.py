"""A sanitizer inside Triton's interpreter: order of program instances, unwritten memory, wrong addresses, races."""

from __future__ import annotations

import ctypes
import inspect
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._device import _device_constructors

pytest.importorskip("triton")

from triton._C.libtriton.ir import INPUT_PRECISION
from triton.language.core import is_builtin
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle, _get_np_dtype

Order = Literal["forward", "reversed", "shuffled"]
KINDS = ("load", "store")
_set_grid_idx = InterpreterBuilder.set_grid_idx  # as it is, so that an inner order takes the place of an outer one


@contextmanager
def program_order(order: Order, seed: int = 0) -> Iterator[None]:
    """Run the program instances of every launch in an order: what a launch computes may not depend on it."""
    rng = random.Random(seed)
    places: dict[tuple[int, ...], tuple[int, ...]] = {}

    def set_grid_idx(builder: Any, *index: int) -> None:
        if order == "reversed":
            index = tuple(size - 1 - place for size, place in zip(builder.grid_dim, index, strict=True))
        elif order == "shuffled":
            if not any(index):  # the first program of a launch
                every = list(itertools.product(*map(range, builder.grid_dim)))
                places.clear()
                places.update(zip(every, rng.sample(every, len(every)), strict=True))
            index = places[index]
        _set_grid_idx(builder, *index)

    with mock.patch.object(InterpreterBuilder, "set_grid_idx", set_grid_idx):
        yield


@contextmanager
def truncated_tf32() -> Iterator[None]:
    """Multiply float32 operands of a TF32 product as tensor cores do: their last 13 bits are cut off, not rounded.

    A tf32x3 product keeps all bits, as the compiler splits its operands.
    """
    real = InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, *rest: Any) -> Any:
        if input_precision == INPUT_PRECISION.TF32 and a.data.dtype == b.data.dtype == np.float32:
            a, b = (TensorHandle((h.data.view(np.uint32) & 0xFFFFE000).view(np.float32), h.dtype) for h in (a, b))
        return real(builder, a, b, d, input_precision, *rest)

    with mock.patch.object(InterpreterBuilder, "create_dot", create_dot):
        yield


@cache
def _builtins(owner: Any) -> list[tuple[str, Any]]:
    """List what the interpreter replaces in a module or class."""
    return [(name, member) for name, member in inspect.getmembers(owner) if is_builtin(member)]


@contextmanager
def cached_lookups() -> Iterator[None]:
    """Let the interpreter look up once, not in every launch, what it replaces and its types: a quarter less time."""
    dtypes: dict[str, Any] = {}

    def patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
        for name, member in _builtins(owner):
            if getattr(owner, name) is member:  # not replaced yet
                interpreter._patch_attr(owner, name, member, builder, scope)

    def np_dtype(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = _get_np_dtype(dtype)
        return dtypes[dtype.name]

    with mock.patch.multiple(interpreter, _patch_builtin=patch_builtin, _get_np_dtype=np_dtype):
        yield


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what our own code gets from torch.empty and its relatives with NaN, large integers or True."""

    def poisoned(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any, **kwargs: Any) -> Tensor:
            tensor = real(*args, **kwargs)
            # transformers and torch make weights with torch.empty, which some of them never read
            has_memory = tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)
            if has_memory and "site-packages" not in sys._getframe(1).f_code.co_filename:
                byte = 0xFF if tensor.is_floating_point() else 0x01 if tensor.dtype == torch.bool else 0x7F
                ctypes.memset(
                    tensor.data_ptr(), byte, tensor.numel() * tensor.element_size()
                )  # no operator: not counted
            return tensor

        return run

    _device_constructors()  # torch lists once what a block of `with torch.device(...)` changes: the real functions
    with ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            stack.enter_context(mock.patch.object(owner, name, poisoned(getattr(owner, name))))
        yield


@dataclass
class Launch:
    """What the programs of one launch touch.

    Attributes:
        kernel: its name.
        storages: first and last address, exclusive, of the memory of every argument.
        touched: (program, place in the code, first bytes of elements, bytes of an element), by kind of access.
    """

    kernel: str
    storages: list[tuple[int, int]]
    touched: dict[str, list[tuple[int, str, Any, int]]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def touch(self, kind: str, program: int, addresses: Any, size: int) -> None:
        """Note an access.

        Raises:
            IndexError: an address outside the memory of all arguments.
        """
        place = _place()
        inside = np.zeros(addresses.shape, bool)
        for begin, end in self.storages:
            inside |= (addresses >= begin) & (addresses + size <= end)
        if not inside.all():
            raise IndexError(f"{self.kernel}: a {kind} outside all arguments at {place}")
        self.touched[kind].append((program, place, addresses, size))

    def races(self) -> Iterator[str]:
        """Name the places of accesses to one byte by two programs of which one writes."""
        bytes_, programs, places = self._bytes("store")
        order = np.argsort(bytes_, kind="stable")
        bytes_, programs, places = bytes_[order], programs[order], places[order]
        first = np.searchsorted(bytes_, bytes_, "left")
        for at in np.unique(places[programs != programs[first]]):
            yield f"{self.kernel}: two programs store to one byte at {at}"
        read, readers, read_places = self._bytes("load")
        begin, end = np.searchsorted(bytes_, read, "left"), np.searchsorted(bytes_, read, "right")
        for writer in (begin, end - 1):
            hit = (
                (end > begin) & (programs[np.minimum(writer, len(programs) - 1)] != readers) if len(programs) else None
            )
            for at in [] if hit is None else np.unique(read_places[hit]):
                yield f"{self.kernel}: a program loads at {at} what another stores"

    def _bytes(self, kind: str) -> tuple[Any, Any, Any]:
        """Return bytes, programs and places of all accesses of a kind, a row for each byte."""
        rows = [(np.add.outer(a.ravel(), np.arange(size)).ravel(), p, at) for p, at, a, size in self.touched[kind]]
        sizes = [len(row[0]) for row in rows]
        return (
            np.concatenate([np.empty(0, np.int64), *(row[0] for row in rows)]),
            np.repeat(np.array([row[1] for row in rows], np.int64), sizes),
            np.repeat(np.array([row[2] for row in rows], dtype=object), sizes),
        )


def _place() -> str:
    """File and line of the kernel's code that runs."""
    frame: Any = sys._getframe(1)
    while "triton" in frame.f_code.co_filename.split("site-packages")[-1] or frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


@contextmanager
def checked_launches() -> Iterator[list[str]]:
    """Check addresses and races of every launch inside; yields the findings, which are also raised at once."""
    findings: list[str] = []
    active: list[Launch] = []

    def program_of(builder: Any) -> int:
        x, y, z = builder.grid_idx
        return int((x * builder.grid_dim[1] + y) * builder.grid_dim[2] + z)

    def watched(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def access(builder: Any, ptrs: Any, *rest: Any) -> Any:
            mask = rest[1 if kind == "store" else 0].data
            addresses = ptrs.data[np.broadcast_to(mask, ptrs.data.shape)].astype(np.int64)
            size = np.dtype(_get_np_dtype(ptrs.get_element_ty())).itemsize
            try:
                active[-1].touch(kind, program_of(builder), addresses, size)
            except IndexError as finding:
                findings.append(str(finding))
                raise
            return real(builder, ptrs, *rest)

        return access

    launch = GridExecutor.__call__

    def call(executor: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [arg.untyped_storage() for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
        storages = sorted({(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in tensors})
        active.append(Launch(executor.fn.__name__, storages))
        try:
            launch(executor, *args, **kwargs)
            found = list(active[-1].races())
        finally:
            active.pop()
        findings.extend(found)
        if found:
            raise RuntimeError("; ".join(found))

    with ExitStack() as stack:
        for kind in KINDS:
            name = f"create_masked_{kind}"
            patched = watched(kind, getattr(InterpreterBuilder, name))
            stack.enter_context(mock.patch.object(InterpreterBuilder, name, patched))
        stack.enter_context(mock.patch.object(GridExecutor, "__call__", call))
        yield findings
