"""The norms between layers in plain torch: sums in float32 (float64 for float64 inputs), one rounding at the end.

`stree.kernels.norm_ops` documents arguments and checks them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
    """Normalise rows, group by group, before or after the gate."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    values, opening = x.to(dtype), gate.to(dtype)
    opening = F.silu(opening) if activation == "silu" else opening.sigmoid()
    if not norm_before_gate:
        values = values * opening
    values = _normalise(values.unflatten(-1, (groups, -1)), eps).flatten(-2) * weight.to(dtype)
    return (values * opening if norm_before_gate else values).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0) -> Tensor:
    """Normalise rows."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return (_normalise(x.to(dtype), eps) * (weight.to(dtype) + offset)).to(x.dtype)


def rms_norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    offset: float = 0.0,
    scale: float = 1.0,
    other: Tensor | None = None,
    other_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and normalise the sum as it is stored."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    added = x.to(dtype) * scale
    if other is not None:
        added = added + other.to(dtype) * other_scale
    total = (residual.to(dtype) + added).to(residual.dtype)
    normed = _normalise(total.to(dtype), eps) * (weight.to(dtype) + offset)
    return normed.to(x.dtype), total


def _normalise(values: Tensor, eps: float) -> Tensor:
    """Divide rows by their root mean square."""
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
