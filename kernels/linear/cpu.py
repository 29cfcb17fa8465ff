"""Linear layers with few rows on a CPU, compiled with numba: weights are read as they are stored, each of them once.

This file is imported with the first such product.
"""

# mypy: disable-error-code="untyped-decorator, no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from stree.kernels.cpu_jit import ZEROS, array_at, compiled, overload

__all__ = ["linear", "products", "products_of_row"]

Array = np.ndarray[Any, Any]


def linear(x: Tensor, weight: Array) -> Tensor:
    """Compute x weight^T on one thread, in float32.

    Args:
        x: float32 or bfloat16[..., in], on the CPU, of at least one row.
        weight: float32[out, in], or uint16[out, in], the bits of a bfloat16 one; contiguous.

    Returns:
        float32[..., out].
    """
    num_out, num_in = weight.shape
    x = x.float().contiguous()
    y, rows = x.new_empty((*x.shape[:-1], num_out)), x.numel() // num_in
    multiply = products_of_row if rows == 1 else products
    multiply(x.data_ptr(), rows, weight, y.data_ptr(), ZEROS[x.itemsize])
    return y


def _number(stored: Any) -> Any:
    """Return a number of a weight in float32, as compiled code reads it."""
    raise NotImplementedError


@overload(_number, strict=False)
def _compiled_number(stored: Any) -> Any:
    if stored.bitwidth == 16:  # bfloat16 is the first half of float32
        return lambda stored: np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)
    return lambda stored: stored


@compiled(fastmath={"reassoc", "contract", "nsz"}, nogil=True)  # sums in any order; no number is assumed finite
def products(x_address: int, rows: int, weight: Array, y_address: int, zero: Any) -> None:
    """Multiply four rows by three outputs at a time: twelve sums, three weights and a row fill AVX2's 16 registers.

    The three outputs lie a third of the weight apart: the processor then fetches three long runs of memory ahead.
    The last argument is written; what does not divide by four or three is computed again.
    """
    x, y = array_at(x_address, (rows, weight.shape[1]), zero), array_at(y_address, (rows, len(weight)), zero)
    last_row, last, third = len(x) - 1, len(weight) - 1, (len(weight) + 2) // 3
    for o0 in range(third):
        o1, o2 = min(o0 + third, last), min(o0 + 2 * third, last)
        for r0 in range(0, len(x), 4):
            r1, r2, r3 = min(r0 + 1, last_row), min(r0 + 2, last_row), min(r0 + 3, last_row)
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = zero
            for i in range(x.shape[1]):
                w0, w1, w2 = _number(weight[o0, i]), _number(weight[o1, i]), _number(weight[o2, i])
                x0, x1, x2, x3 = x[r0, i], x[r1, i], x[r2, i], x[r3, i]
                a0, b0, c0 = a0 + w0 * x0, b0 + w1 * x0, c0 + w2 * x0
                a1, b1, c1 = a1 + w0 * x1, b1 + w1 * x1, c1 + w2 * x1
                a2, b2, c2 = a2 + w0 * x2, b2 + w1 * x2, c2 + w2 * x2
                a3, b3, c3 = a3 + w0 * x3, b3 + w1 * x3, c3 + w2 * x3
            y[r0, o0], y[r1, o0], y[r2, o0], y[r3, o0] = a0, a1, a2, a3
            y[r0, o1], y[r1, o1], y[r2, o1], y[r3, o1] = b0, b1, b2, b3
            y[r0, o2], y[r1, o2], y[r2, o2], y[r3, o2] = c0, c1, c2, c3


@compiled(fastmath={"reassoc", "contract", "nsz"}, nogil=True)
def products_of_row(x_address: int, rows: int, weight: Array, y_address: int, zero: Any) -> None:
    """Multiply one row by four outputs at a time; ``products`` would compute the row four times."""
    x, y = array_at(x_address, (1, weight.shape[1]), zero), array_at(y_address, (1, len(weight)), zero)
    last, quarter = len(weight) - 1, (len(weight) + 3) // 4
    for o0 in range(quarter):
        o1, o2, o3 = min(o0 + quarter, last), min(o0 + 2 * quarter, last), min(o0 + 3 * quarter, last)
        a = b = c = d = zero
        for i in range(x.shape[1]):
            x0 = x[0, i]
            a, b = a + x0 * _number(weight[o0, i]), b + x0 * _number(weight[o1, i])
            c, d = c + x0 * _number(weight[o2, i]), d + x0 * _number(weight[o3, i])
        y[0, o0], y[0, o1], y[0, o2], y[0, o3] = a, b, c, d
