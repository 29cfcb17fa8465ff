"""Declares kernels that are launched: `triton.jit`, with the rounding of a * b + c fixed and the grid checked."""

# mypy: disable-error-code="no-any-return, no-untyped-call, no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import triton

from stree.kernels.dispatch import launches

__all__ = ["MAX_PROGRAMS", "jit"]

MAX_PROGRAMS = 65535  # of a grid in y and z, by CUDA


def jit(*, fuses: bool, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Declare a kernel like `triton.jit`, and pass `enable_fp_fusion` with each of its launches.

    Without it the version of Triton decides (3.9 fuses, 3.10 does not), and results and registers change with it.

    Args:
        fuses: whether a * b + c is rounded once, as one instruction; False where choices must be those of the CPU.
        options: of `triton.jit`.
    """

    def declare(function: Callable[..., Any]) -> Any:
        kernel = triton.jit(function, **options)
        kernel.run = partial(_run, kernel, fuses)
        return kernel

    return declare


def _run(kernel: Any, fuses: bool, *args: Any, grid: tuple[int, ...], **kwargs: Any) -> Any:
    if max(grid[1:], default=0) > MAX_PROGRAMS:
        raise NotImplementedError(
            f"{kernel.__name__} takes up to {MAX_PROGRAMS} programs in the second and third direction of its grid: "
            f"sequences, times heads or layers.  Got {grid}"
        )
    return type(kernel).run(kernel, *args, grid=grid, enable_fp_fusion=fuses, **kwargs) if launches() else None
