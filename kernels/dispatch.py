"""Which implementation serves an operation, and the decorator that checks arguments by a shape spec and calls it.

An operation of `stree.kernels.ops` is a declaration: signature, docstring, shapes.  `operation` turns it into a
function that checks every argument, makes a `Topology` of the trees and an `AcceptedPath` of the path, and calls the
function of the same name in the reference or, for CUDA tensors, in the Triton module, which is imported only then.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import linecache
import os
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from stree.kernels import checks
from stree.kernels.shapes import write_checks
from stree.kernels.topology import Backend

__all__ = ["REFERENCE", "TRITON", "Backend", "choose", "has_triton", "operation"]

P = ParamSpec("P")
R = TypeVar("R")

# Operation -> module with a function of that name.  `operation` enters what it declares.
ACCEPT = ("philox_uniform", "choice", "draw_beside", "draw_distinct", "match_accept")
REFERENCE: dict[str, str] = dict.fromkeys(ACCEPT, "stree.kernels.reference_accept")
TRITON: dict[str, str] = dict.fromkeys(ACCEPT, "stree.kernels.accept")


def has_triton(op: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether "auto" means Triton: for CUDA tensors of an operation that has it, but not in float64."""
    return device.type == "cuda" and op in TRITON and dtype != torch.float64


def choose(op: str, backend: Backend, tensor: Tensor) -> Callable[..., Any]:
    """Return the implementation of an operation for a tensor's device."""
    if backend == "reference" or (backend == "auto" and not has_triton(op, tensor.device, tensor.dtype)):
        return _function(REFERENCE[op], op)
    if backend not in ("auto", "triton"):
        raise ValueError(f"backend must be 'auto', 'reference' or 'triton', got {backend!r}")
    if op not in TRITON:
        raise RuntimeError(f"{op} has no Triton version; those that have one: {', '.join(sorted(TRITON)) or 'none'}")
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(f"{op} with backend='triton' needs CUDA tensors, got a tensor on {tensor.device}")
    function = _function(TRITON[op], op)
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return _launched_on(tensor.device, function)
    return function


def _function(module: str, op: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(sys.modules.get(module) or importlib.import_module(module), op)
    return function


def _launched_on(device: torch.device, function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a device the current one during a call: Triton launches there, wherever the tensors are."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device(device):
            return function(*args, **kwargs)

    return call


def operation(
    triton: str, *rules: str, bare_path: str | None = None, **shapes: str | tuple[str, ...]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare an operation on tensors of given shapes; the decorated function's body checks values, if anything.

    A shape is a list of axes.  Equal names are equal sizes; the first tensor in the signature that has a name sets it.

        x="b n h p"              a floating tensor with these axes
        y="b n-first 2*h"        an axis may be an expression of names and of integer arguments
        D="h?"                   a tensor or None
        A="h | b h"              either; all arguments with alternatives take the same one
        x="... n c"              any further axes in front
        lengths="b: int32"       another dtype
        state="b h p: wide x"    float32, or float64 where x is
        folded=("b F c", "b F")  a tuple of tensors, or None
        ngroups="= g"            an integer argument that is the size of an axis

    `parents` is int32[b, n] or a `Topology`, and `path` with `path_lengths` int32[b, m] and int32[b], an
    `AcceptedPath` or None; implementations take them as `topology` and `accepted`.

    The checks run for every layer of every step, so they are written out as one function, as dataclasses write theirs:
    a loop over shapes takes twice as long.  Tracebacks show it, and so does `inspect.getsource` of its code.

    Args:
        triton: module of the Triton version, below stree.kernels; the reference is reference.py in the same folder.
        rules: what sizes must satisfy: "n <= N", "g divides h".
        bare_path: axis that counts the paths, for an implementation that takes `path` and `path_lengths` as they are.
        shapes: of each argument.
    """

    def declare(function: Callable[P, R]) -> Callable[P, R]:
        op = function.__name__
        REFERENCE[op] = f"stree.kernels.{triton.rpartition('.')[0]}.reference"
        TRITON[op] = f"stree.kernels.{triton}"
        source = write_checks(function, shapes, rules, bare_path)
        defaults = {f"default_{name}": p.default for name, p in inspect.signature(function).parameters.items()}
        names: dict[str, Any] = {**vars(checks), "choose": choose, "declared": function} | defaults
        file = f"<checks of {op}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec"), names)
        call: Callable[P, R] = functools.update_wrapper(names[op], function)
        listed = ", ".join(f"{name} [{text}]" for name, text in shapes.items())
        call.__doc__ = f"{function.__doc__}\n\n    Shapes: {listed}."
        return call

    return declare
