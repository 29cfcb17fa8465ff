"""The norms between layers in Triton: one program a group of a row, one read and one write of everything."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor

from stree.kernels.norm_kernels import gated_norm_kernel, norm_add_kernel
from stree.kernels.tiles import MAX_NORM_WIDTH, NormTile, check_inner, check_kernel_dtypes, check_limit

__all__ = ["gated_rms_norm", "rms_norm_add"]


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    *,
    eps: float,
    groups: int = 1,
    norm_before_gate: bool = False,
    activation: str = "silu",
) -> Tensor:
    """Normalise rows, group by group, before or after the gate; see `stree.kernels.norm_ops`."""
    check_kernel_dtypes("gated_rms_norm", x=x)
    check_kernel_dtypes("gated_rms_norm", gate=gate)
    width = x.shape[-1] // groups
    check_limit("gated_rms_norm", "groups of channels", width, MAX_NORM_WIDTH)
    for name, tensor in (("x", x), ("gate", gate), ("weight", weight)):
        check_inner(name, tensor)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (rows, stride), (opening, gate_stride), tile = _rows(x), _rows(gate), NormTile.of(width)
    gated_norm_kernel[(len(rows), groups)](
        rows, opening, weight, y, stride, gate_stride, x.shape[-1], float(eps),
        WIDTH=width, BLOCK=tile.width, NORM_FIRST=norm_before_gate, SILU=activation == "silu",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def rms_norm_add(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and normalise the sum; see `stree.kernels.norm_ops`."""
    check_kernel_dtypes("rms_norm_add", x=x)
    check_kernel_dtypes("rms_norm_add", residual=residual)
    width = x.shape[-1]
    check_limit("rms_norm_add", "rows of channels", width, MAX_NORM_WIDTH)
    for name, tensor in (("x", x), ("residual", residual), ("weight", weight)):
        check_inner(name, tensor)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    (rows, stride), (stream, stream_stride), tile = _rows(x), _rows(residual), NormTile.of(width)
    norm_add_kernel[(len(rows),)](
        rows, stream, weight, y, total, stride, stream_stride, float(eps), float(offset),
        WIDTH=width, BLOCK=tile.width, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y, total


def _rows(tensor: Tensor) -> tuple[Tensor, int]:
    """View a tensor as rows; give their distance, for a single one too, which shall need no build of its own."""
    rows = tensor.flatten(0, -2)
    return rows, rows.stride(0) if len(rows) > 1 else tensor.stride(-2)
