"""The work between the matrix products of a layer, in plain torch: norms, rotary positions, activations, experts.

Sums and products are float32 (float64 for float64 inputs), with one rounding at the end.  Rows are
independent: nothing here depends on the tree.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["delta_inputs", "experts", "gated_activation", "gated_rms_norm", "rms_norm", "rms_norm_add", "rotary"]


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, groups: int = 1, norm_before_gate: bool = False,
    activation: str = "silu",
) -> Tensor:  # fmt: skip
    """Normalise rows, group by group, before or after the gate."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    values, opening = x.to(dtype), gate.to(dtype)
    opening = F.silu(opening) if activation == "silu" else opening.sigmoid()
    if not norm_before_gate:
        values = values * opening
    values = _normalise(values.unflatten(-1, (groups, -1)), eps).flatten(-2) * weight.to(dtype)
    return (values * opening if norm_before_gate else values).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, offset: float) -> Tensor:
    """Normalise rows."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return (_normalise(x.to(dtype), eps) * (weight.to(dtype) + offset)).to(x.dtype)


def rms_norm_add(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, offset: float, scale: float, other: Tensor | None,
    other_scale: float, squares: Tensor | None = None, squares_norm: tuple[int, float] = (1, 0.0),
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Add x to the residual stream and normalise the sum as it is stored."""
    wide = torch.promote_types(x.dtype, torch.float32)
    added = x.to(wide) * scale
    if squares is not None:
        width, row_eps = squares_norm
        added = added * torch.rsqrt(squares.sum(-1, keepdim=True) / width + row_eps)
    if other is not None:
        added = added + other.to(wide) * other_scale
    total = (residual.to(wide) + added).to(residual.dtype)
    normed = _normalise(total.to(wide), eps) * (weight.to(wide) + offset)
    return normed.to(dtype or x.dtype), total


def _normalise(values: Tensor, eps: float) -> Tensor:
    """Divide rows by their root mean square."""
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    cos, sin, width = cos.to(dtype)[:, None], sin.to(dtype)[:, None], cos.shape[2]

    def turn(x: Tensor) -> Tensor:
        first, second = x[..., :width].to(dtype).chunk(2, dim=-1)
        turned = x[..., :width] * cos + torch.cat((-second, first), -1) * sin
        return torch.cat((turned.to(x.dtype), x[..., width:]), -1)

    return turn(q), turn(k)


def gated_activation(gate: Tensor, up: Tensor | None, *, activation: str, scale: float = 1.0) -> Tensor:
    """Apply an activation and multiply."""
    dtype = torch.promote_types(gate.dtype, torch.float32)
    scaled = gate.to(dtype) if scale == 1 else gate.to(dtype) * scale
    if activation == "silu":
        y = F.silu(scaled)
    elif activation == "gelu_tanh":
        y = F.gelu(scaled, approximate="tanh")
    else:
        y = F.relu(scaled).square()
    return (y if up is None else y * up.to(dtype)).to(gate.dtype)


def delta_inputs(
    qk: Tensor, b: Tensor, a: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, *, key_heads: int,
    eps: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Make normalised q and k, log decays and betas."""
    dtype = torch.promote_types(qk.dtype, torch.float32)
    q, k = qk.unflatten(-1, (2, key_heads, -1)).to(dtype).unbind(2)
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps) for x in (q, k))
    beta, g = b.to(dtype).sigmoid(), None
    if a is not None:
        assert A_log is not None and dt_bias is not None, "decays need rates and biases"
        g = -A_log.to(dtype).exp() * F.softplus(a.to(dtype) + dt_bias.to(dtype))
    return q, k, g, beta if scale == 1 else beta * scale


def experts(
    x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, *, activation: str, gated: bool
) -> Tensor:
    """Run the chosen experts of every row and add them up: few rows with copies of weights, many expert by expert."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, factors = x.to(dtype), weights.to(dtype)

    def middle(made: Tensor) -> Tensor:
        gate, factor = made.chunk(2, dim=-1) if gated else (made, None)
        return gated_activation(gate, factor, activation=activation).to(x.dtype).to(dtype)

    if index.numel() <= len(up):
        hidden = middle(torch.einsum("tkic,tc->tki", up[index].to(dtype), wide))
        parts = torch.einsum("tkci,tki->tkc", down[index].to(dtype), hidden)
        return (parts * factors[..., None]).sum(1).to(x.dtype)
    y = torch.zeros_like(wide)
    for expert in range(len(up)):
        hits = index == expert
        part = middle(wide @ up[expert].to(dtype).T) @ down[expert].to(dtype).T
        factor = torch.where(hits, factors, 0).sum(1, keepdim=True)
        y += torch.where(hits.any(1, keepdim=True), part * factor, 0)
    return y.to(x.dtype)
