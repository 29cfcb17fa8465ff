"""Triton code of the norms; `stree.kernels.norm` launches it."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, y_ptr, stride_x_row, stride_gate_row, stride_y_row, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, NORM_FIRST: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Normalise one group of one row, before or after its gate; grid (rows, groups)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < WIDTH
    x = tl.load(x_ptr + row * stride_x_row + column, inside, 0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * stride_gate_row + column, inside, 0.0).to(tl.float32)
    opening = 1.0 / (1.0 + tl.exp(-gate))
    if SILU:
        opening *= gate
    if not NORM_FIRST:
        x *= opening
    x *= tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    x *= tl.load(weight_ptr + column, inside, 0.0).to(tl.float32)
    if NORM_FIRST:
        x *= opening
    tl.store(y_ptr + row * stride_y_row + column, x, inside)


@triton.jit
def norm_add_kernel(
    x_ptr, other_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr,
    stride_x_row, stride_other_row, stride_residual_row, eps, offset, scale, other_scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add scaled rows to the residual stream and normalise the sum as it is stored; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.load(x_ptr + row * stride_x_row + column, inside, 0.0).to(tl.float32) * scale
    if other_ptr is not None:
        other = tl.load(other_ptr + row * stride_other_row + column, inside, 0.0).to(tl.float32)
        total += other * other_scale
    if residual_ptr is not None:
        total += tl.load(residual_ptr + row * stride_residual_row + column, inside, 0.0).to(tl.float32)
    if total_ptr is not None:
        stored = total.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * WIDTH + column, stored, inside)
        total = stored.to(tl.float32)
    weight = tl.load(weight_ptr + column, inside, 0.0).to(tl.float32) + offset
    normed = total * tl.rsqrt(tl.sum(total * total, 0) / WIDTH + eps) * weight
    tl.store(y_ptr + row * WIDTH + column, normed, inside)
