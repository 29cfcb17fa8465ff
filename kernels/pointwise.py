"""Rotary positions, gated activations, and inputs of delta rules, in one Triton launch each."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor

from stree.kernels.norm import as_rows
from stree.kernels.pointwise_kernels import delta_inputs_kernel, gated_activation_kernel, rotary_kernel
from stree.kernels.tiles import DeltaInputsTile, PointwiseTile, RotaryTile, check_inner, check_kernel_dtypes

__all__ = ["delta_inputs", "gated_activation", "rotary"]


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys; see `stree.kernels.pointwise_ops`."""
    check_kernel_dtypes("rotary", q=q, k=k)
    for name, tensor in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        check_inner(name, tensor)
    (batch, heads, n, dim), kv_heads = q.shape, k.shape[1]
    tile = RotaryTile.of(max(heads, kv_heads), dim)
    queries, keys = -(-heads // tile.heads), -(-kv_heads // tile.heads)
    turned = [torch.empty(batch, n, count, dim, dtype=q.dtype, device=q.device) for count in (heads, kv_heads)]
    rotary_kernel[(n, batch, queries + keys)](
        q, k, cos, sin, *turned, n, heads, kv_heads,
        q.stride(0), q.stride(2), q.stride(1), k.stride(0), k.stride(2), k.stride(1),
        *_strides(cos), *_strides(sin),
        DIM=dim, ROTARY=cos.shape[2], BLOCK_H=tile.heads, BLOCK_D=tile.dim, QUERIES=queries,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)


def gated_activation(gate: Tensor, up: Tensor | None, *, activation: str, scale: float = 1.0) -> Tensor:
    """Apply an activation and multiply; see `stree.kernels.pointwise_ops`."""
    check_kernel_dtypes("gated_activation", gate=gate)
    check_inner("gate", gate)
    if up is not None:
        check_kernel_dtypes("gated_activation", gate=gate, up=up)
        check_inner("up", up)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    channels, tile = gate.shape[-1], PointwiseTile()
    (rows, stride), (factors, factor_stride) = as_rows(gate), (None, 0) if up is None else as_rows(up)
    gated_activation_kernel[(-(-channels // tile.channels), len(rows))](
        rows, factors, y, channels, stride, factor_stride, float(scale),
        KIND=activation, BLOCK=tile.channels, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def delta_inputs(
    qk: Tensor,
    b: Tensor,
    a: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    key_heads: int,
    eps: float,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Make normalised q and k, log decays and betas; see `stree.kernels.pointwise_ops`."""
    for name, tensor in (("qk", qk), ("b", b), ("a", a)):
        if tensor is not None:
            check_kernel_dtypes("delta_inputs", **{name: tensor})
            check_inner(name, tensor)
    (batch, n, channels), heads = qk.shape, b.shape[2]
    dk = channels // (2 * key_heads)
    tile = DeltaInputsTile.of(key_heads, dk, heads)
    q, k = (torch.empty(batch, n, key_heads, dk, dtype=torch.float32, device=qk.device) for _ in range(2))
    beta = torch.empty(batch, n, heads, dtype=torch.float32, device=qk.device)
    g = None if a is None else torch.empty_like(beta)
    delta_inputs_kernel[(n, batch, 2 * -(-key_heads // tile.heads) + 1)](
        qk, a, b, A_log, dt_bias, q, k, g, beta, n,
        qk.stride(0), qk.stride(1), *((0, 0) if a is None else a.stride()[:2]), b.stride(0), b.stride(1),
        float(eps), float(scale),
        KEY_HEADS=key_heads, HEADS=heads, DK=dk, BLOCK_HK=tile.heads, BLOCK_DK=tile.dim, BLOCK_HV=tile.values,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return q, k, g, beta


def _strides(table: Tensor) -> tuple[int, int]:
    """Take the strides over batch and nodes; 0 over a batch that shares its rows."""
    return 0 if table.shape[0] == 1 else table.stride(0), table.stride(1)
