"""Mixtures of experts in Triton, for the few rows of a tree: three launches, in a shape that no routing changes."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor

from stree.kernels.experts_kernels import experts_down_kernel, experts_sum_kernel, experts_up_kernel
from stree.kernels.norm import as_rows
from stree.kernels.tiles import ExpertsTile, PointwiseTile, check_inner, check_kernel_dtypes, interpreted

__all__ = ["experts"]


def experts(
    x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, *, activation: str, gated: bool
) -> Tensor:
    """Run the chosen experts of every row and add them up; see `stree.kernels.pointwise_ops`."""
    check_kernel_dtypes("experts", x=x, up=up, down=down)
    check_kernel_dtypes("experts", weights=weights)
    check_inner("x", x)
    check_inner("up", up, 3)
    check_inner("down", down, 3)
    (rows, channels), share, inner = x.shape, index.shape[1], down.shape[2]
    index, weights = index.contiguous(), weights.contiguous()
    pairs, tile, (_, stride) = rows * share, ExpertsTile.of(x.dtype), as_rows(x)
    hidden = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    parts = torch.empty(pairs, channels, dtype=torch.float32, device=x.device)
    y = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    common = {
        "CHANNELS": channels, "INNER": inner, "ROWS": tile.rows, "BLOCK": tile.block, "DEPTH": tile.depth,
        "CHUNK": tile.chunk, "WIDE": interpreted(), "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    experts_up_kernel[(-(-inner // tile.block), pairs)](
        x, index, up, hidden, pairs, stride, SHARE=share, GATED=gated, KIND=activation, **common
    )
    experts_down_kernel[(-(-channels // tile.block), pairs)](hidden, index, weights, down, parts, pairs, **common)
    block = PointwiseTile()
    experts_sum_kernel[(-(-channels // block.channels), rows)](
        parts, y, SHARE=share, CHANNELS=channels, BLOCK=block.channels, num_warps=block.warps
    )
    return y
