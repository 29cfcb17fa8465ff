"""Record launches of Triton kernels as builds: what Triton would pass to its compiler for them, without a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from stree.bench.records import Record

TARGET = GPUTarget("cuda", 90, 32)
TILES = ("BLOCK", "NODES")  # how names of constants begin that are sizes of tiles


@dataclass(frozen=True)
class Build:
    """One build of a kernel; every field is JSON.

    Attributes:
        kernel: module and name, ``stree.kernels.mamba2.kernel:ssd_kernel``.
        signature: types of the arguments by name.
        constants: values of those that are constexpr.
        aligned: those that are known to be divisible by 16.
        options: warps, stages and whatever else the launch asks for.
    """

    kernel: str
    signature: dict[str, str]
    constants: Record
    aligned: list[str]
    options: Record

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return self.kernel.partition(":")[2]

    @property
    def kind(self) -> str:
        """What selects different code: all but what is known to be aligned, and the model's sizes."""
        chosen = {
            name: value for name, value in self.constants.items() if type(value) is not int or name.startswith(TILES)
        }
        return str((self.kernel, self.signature, chosen, self.options))

    @property
    def may_spill(self) -> bool:
        """Whether it serves trees of more than 64 nodes, or has no 16-bit operand in a kernel that multiplies."""
        is_large = self.constants.get("NODES", 0) > 64 or self.constants.get("WORDS", 0) > 2
        is_float32 = "EXACT" in self.constants and not {"*bf16", "*fp16"} & {*self.signature.values()}
        return is_large or is_float32

    def source(self) -> ASTSource:
        """The kernel with the types of its arguments, for the installed Triton's compiler."""
        module, _, name = self.kernel.partition(":")
        names = list(self.signature)
        return ASTSource(
            getattr(importlib.import_module(module), name),
            self.signature,
            {(names.index(name),): value for name, value in self.constants.items()},
            {(names.index(name),): [["tt.divisibility", 16]] for name in self.aligned},
        )


@cache
def _compiled(kernel: Any) -> tuple[Any, Any, Callable[..., Any]]:
    """Return the just-in-time form of a kernel, the compiler's backend, and the function that binds arguments."""
    if isinstance(kernel, InterpretedFunction):
        kernel = JITFunction(kernel.fn, **{name: value for name, value in kernel.kwargs.items() if "do_not" in name})
    backend = make_backend(TARGET)
    return kernel, backend, create_function_from_signature(kernel.signature, kernel.params, backend)


def build_of(kernel: Any, args: tuple[Any, ...], kwargs: Record) -> Build:
    """Return the build that a launch asks for."""
    compiled, backend, bind = _compiled(kernel)
    if "WIDE" in kwargs:
        kwargs = kwargs | {"WIDE": False}  # a widening that the interpreter needs
    bound, specialization, options = bind(*args, **kwargs)
    _, signature, constants, attributes = compiled._pack_args(backend, kwargs, bound, specialization, options)
    names = list(signature)
    return Build(
        f"{compiled.fn.__module__}:{compiled.fn.__name__}",
        signature,
        {names[place]: value for (place,), value in constants.items()},
        [names[place] for (place,), found in attributes.items() if ["tt.divisibility", 16] in found],
        options,
    )


@contextmanager
def recorded(note: Callable[[Build], object], *, is_launched: bool) -> Iterator[None]:
    """Pass the builds of all launches inside to ``note``; launches run or, without ``is_launched``, are skipped."""

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            note(build_of(kernel, args, kwargs))
            return real(kernel, *args, grid=grid, warmup=warmup, **kwargs) if is_launched else None

        return run

    with ExitStack() as stack:
        for kind in (InterpretedFunction, JITFunction):
            stack.enter_context(mock.patch.object(kind, "run", watched(kind.run)))
        yield
