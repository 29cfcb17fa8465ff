"""The norms between layers in Triton: one program a group of a row, one read and one write of everything."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from stree.kernels.fused.tiles import MAX_NORM_WIDTH, NormTile
from stree.kernels.jit import jit
from stree.kernels.tiles import check_inner, check_kernel_dtypes, check_limit, padded

__all__ = ["as_rows", "gated_rms_norm", "rms_norm", "rms_norm_add"]


@jit(fuses=True)
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


@jit(fuses=True)
def norm_add_kernel(
    x_ptr, other_ptr, residual_ptr, weight_ptr, squares_ptr, y_ptr, total_ptr,
    stride_x_row, stride_other_row, stride_residual_row, eps, offset, scale, other_scale, squares_width, squares_eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Add scaled rows to the residual stream and normalise the sum as it is stored; grid (rows,).

    With squares the rows are first multiplied by the factor of an RMSNorm before the projection that made them.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.load(x_ptr + row * stride_x_row + column, inside, 0.0).to(tl.float32) * scale
    if squares_ptr is not None:
        part = tl.arange(0, BLOCK_PARTS)
        squares = tl.sum(tl.load(squares_ptr + row * PARTS + part, part < PARTS, 0.0), 0)
        total *= tl.rsqrt(squares / squares_width + squares_eps)
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


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, groups: int, norm_before_gate: bool, activation: str
) -> Tensor:
    """Normalise rows, group by group, before or after the gate; see `stree.kernels.ops`."""
    check_kernel_dtypes("gated_rms_norm", x=x)
    check_kernel_dtypes("gated_rms_norm", gate=gate)
    width = x.shape[-1] // groups
    check_limit("gated_rms_norm", "groups of channels", width, MAX_NORM_WIDTH)
    for name, tensor in (("x", x), ("gate", gate), ("weight", weight)):
        check_inner(name, tensor)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (rows, stride), (opening, gate_stride), tile = as_rows(x), as_rows(gate), NormTile.of(width)
    gated_norm_kernel[(len(rows), groups)](
        rows, opening, weight, y, stride, gate_stride, x.shape[-1], float(eps),
        WIDTH=width, BLOCK=tile.width, NORM_FIRST=norm_before_gate, SILU=activation == "silu",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, offset: float) -> Tensor:
    """Normalise rows; see `stree.kernels.ops`."""
    y, _ = _launch("rms_norm", x, None, None, weight, eps=eps, offset=offset)
    return y


def rms_norm_add(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, offset: float, scale: float, other: Tensor | None,
    other_scale: float, squares: Tensor | None = None, squares_norm: tuple[int, float] = (1, 0.0),
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Add x to the residual stream and normalise the sum; see `stree.kernels.ops`."""
    y, total = _launch(
        "rms_norm_add", x, other, residual, weight, eps=eps, offset=offset, scale=scale, other_scale=other_scale,
        squares=squares, squares_norm=squares_norm, dtype=dtype,
    )  # fmt: skip
    assert total is not None, "a sum was asked for"
    return y, total


def _launch(
    op: str, x: Tensor, other: Tensor | None, residual: Tensor | None, weight: Tensor, *, eps: float, offset: float,
    scale: float = 1.0, other_scale: float = 1.0, squares: Tensor | None = None,
    squares_norm: tuple[int, float] = (1, 0.0), dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Normalise x or, with a residual stream, the sum, which is then returned too."""
    check_kernel_dtypes(op, x=x)
    width = x.shape[-1]
    check_limit(op, "rows of channels", width, MAX_NORM_WIDTH)
    for name, tensor in {"x": x, "other": other, "residual": residual, "weight": weight}.items():
        if tensor is not None:
            check_inner(name, tensor)
    y, parts = (
        torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device),
        1 if squares is None else squares.shape[-1],
    )
    total: Tensor | None = None
    second = added = None
    (rows, stride), second_stride, stream_stride, tile = as_rows(x), 0, 0, NormTile.of(width)
    if residual is not None:
        check_kernel_dtypes(op, residual=residual)
        total = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
        added, stream_stride = as_rows(residual)
    if other is not None:
        check_kernel_dtypes(op, other=other)
        second, second_stride = as_rows(other)
    norm_add_kernel[(len(rows),)](
        rows, second, added, weight, None if squares is None else squares.contiguous(), y, total,
        stride, second_stride, stream_stride,
        float(eps), float(offset), float(scale), float(other_scale), *map(float, squares_norm),
        WIDTH=width, BLOCK=tile.width, PARTS=parts, BLOCK_PARTS=padded(parts, 1),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y, total


def as_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """View a tensor as rows and return their stride, for a single row too, so that it needs no build of its own."""
    rows = tensor.flatten(0, -2)
    return rows, rows.stride(0) if len(rows) > 1 else tensor.stride(-2)
