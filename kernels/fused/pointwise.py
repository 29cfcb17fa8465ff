"""Rotary positions, gated activations, and inputs of delta rules, in one Triton launch each."""

# mypy: disable-error-code="no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree.kernels.device_functions import softplus
from stree.kernels.fused.norm import as_rows
from stree.kernels.fused.tiles import DeltaInputsTile, PointwiseTile, RotaryTile
from stree.kernels.jit import jit
from stree.kernels.tiles import check_inner, check_kernel_dtypes

__all__ = ["delta_inputs", "gated_activation", "rotary"]


@triton.jit
def _turn(x_ptr, y_ptr, cos_ptr, sin_ptr, heads, head, stride_x_head, DIM: tl.constexpr, ROTARY: tl.constexpr,
          BLOCK_D: tl.constexpr):  # fmt: skip
    """Rotate some heads of one row: x cos + rotate_half(x) sin on the first columns, the others as they are."""
    column = tl.arange(0, BLOCK_D)
    inside = (head < heads)[:, None] & (column < DIM)[None, :]
    turned = column < ROTARY
    first = column < ROTARY // 2
    partner = tl.where(first, column + ROTARY // 2, column - ROTARY // 2)
    row_ptr = x_ptr + head[:, None] * stride_x_head
    x = tl.load(row_ptr + column[None, :], inside, 0.0).to(tl.float32)
    half = tl.load(row_ptr + partner[None, :], inside & turned[None, :], 0.0).to(tl.float32)
    cos = tl.load(cos_ptr + column, turned, 1.0).to(tl.float32)
    sin = tl.load(sin_ptr + column, turned, 0.0).to(tl.float32)
    y = x * cos[None, :] + tl.where(first[None, :], -half, half) * sin[None, :]
    tl.store(y_ptr + head[:, None] * DIM + column[None, :], y, inside)


@jit(fuses=True, do_not_specialize=["n", "stride_q_b", "stride_k_b", "stride_cos_b", "stride_sin_b"])
def rotary_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, n, heads, kv_heads,
    stride_q_b, stride_q_n, stride_q_h, stride_k_b, stride_k_n, stride_k_h,
    stride_cos_b, stride_cos_n, stride_sin_b, stride_sin_n,
    DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Rotate some heads of a node's queries or keys; grid (nodes, batch, blocks of query heads, then of key heads)."""
    node = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    block = tl.program_id(2)
    row = batch * n + node
    cos_ptr += batch * stride_cos_b + node * stride_cos_n
    sin_ptr += batch * stride_sin_b + node * stride_sin_n
    head = tl.arange(0, BLOCK_H)
    if block < QUERIES:
        _turn(
            q_ptr + batch * stride_q_b + node * stride_q_n, q_out_ptr + row * heads * DIM, cos_ptr, sin_ptr,
            heads, block * BLOCK_H + head, stride_q_h, DIM, ROTARY, BLOCK_D,
        )  # fmt: skip
    else:
        _turn(
            k_ptr + batch * stride_k_b + node * stride_k_n, k_out_ptr + row * kv_heads * DIM, cos_ptr, sin_ptr,
            kv_heads, (block - QUERIES) * BLOCK_H + head, stride_k_h, DIM, ROTARY, BLOCK_D,
        )  # fmt: skip


@triton.jit
def activated(x, KIND: tl.constexpr):
    """Apply an activation to float32 values."""
    if KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif KIND == "gelu_tanh":
        # (1 + tanh z) / 2 = 1 / (1 + e^-2z), z = sqrt(2 / pi) (x + 0.044715 x^3)
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(KIND == "relu_squared")
        y = tl.where(x < 0.0, 0.0, x * x)
    return y


@jit(fuses=True)
def gated_activation_kernel(
    gate_ptr, up_ptr, y_ptr, channels, stride_gate_row, stride_up_row, scale,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write act(scale gate) up for some channels of a row; grid (rows, blocks of channels)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < channels
    gate = tl.load(gate_ptr + row * stride_gate_row + column, inside, 0.0).to(tl.float32) * scale
    y = activated(gate, KIND)
    if up_ptr is not None:
        y *= tl.load(up_ptr + row * stride_up_row + column, inside, 0.0).to(tl.float32)
    tl.store(y_ptr + row * channels + column, y, inside)


@jit(fuses=True, do_not_specialize=["n", "stride_qk_b", "stride_a_b", "stride_b_b"])
def delta_inputs_kernel(
    qk_ptr, a_ptr, b_ptr, A_log_ptr, bias_ptr, q_ptr, k_ptr, g_ptr, beta_ptr, n,
    stride_qk_b, stride_qk_n, stride_a_b, stride_a_n, stride_b_b, stride_b_n, eps, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr,
    BLOCK_HK: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_HV: tl.constexpr,
):  # fmt: skip
    """Normalise some heads of q or of k of a node, or make its decays and betas; grid (nodes, batch, 2 blocks + 1)."""
    node = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    row = batch * n + node
    blocks: tl.constexpr = (KEY_HEADS + BLOCK_HK - 1) // BLOCK_HK
    if part < 2 * blocks:
        head = (part % blocks) * BLOCK_HK + tl.arange(0, BLOCK_HK)
        column = tl.arange(0, BLOCK_DK)
        inside = (head < KEY_HEADS)[:, None] & (column < DK)[None, :]
        place = head[:, None] * DK + column[None, :]
        is_key = part // blocks
        x_ptr = qk_ptr + batch * stride_qk_b + node * stride_qk_n + is_key * KEY_HEADS * DK
        x = tl.load(x_ptr + place, inside, 0.0).to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x, 1) + eps)[:, None]
        if is_key:
            tl.store(k_ptr + row * KEY_HEADS * DK + place, x, inside)
        else:
            tl.store(q_ptr + row * KEY_HEADS * DK + place, x, inside)
    else:
        value = tl.arange(0, BLOCK_HV)
        known = value < HEADS
        raw = tl.load(b_ptr + batch * stride_b_b + node * stride_b_n + value, known, 0.0).to(tl.float32)
        tl.store(beta_ptr + row * HEADS + value, scale / (1.0 + tl.exp(-raw)), known)
        if g_ptr is not None:
            step = tl.load(a_ptr + batch * stride_a_b + node * stride_a_n + value, known, 0.0).to(tl.float32)
            step += tl.load(bias_ptr + value, known, 0.0).to(tl.float32)
            rate = tl.exp(tl.load(A_log_ptr + value, known, 0.0).to(tl.float32))
            tl.store(g_ptr + row * HEADS + value, -rate * softplus(step), known)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys; see `stree.kernels.ops`."""
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


def gated_activation(gate: Tensor, up: Tensor | None, *, activation: str, scale: float) -> Tensor:
    """Apply an activation and multiply; see `stree.kernels.ops`."""
    check_kernel_dtypes("gated_activation", gate=gate)
    check_inner("gate", gate)
    if up is not None:
        check_kernel_dtypes("gated_activation", gate=gate, up=up)
        check_inner("up", up)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    channels, tile = gate.shape[-1], PointwiseTile()
    (rows, stride), (factors, factor_stride) = as_rows(gate), (None, 0) if up is None else as_rows(up)
    gated_activation_kernel[(len(rows), -(-channels // tile.channels))](
        rows, factors, y, channels, stride, factor_stride, float(scale),
        KIND=activation, BLOCK=tile.channels, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def delta_inputs(
    qk: Tensor, b: Tensor, a: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, *, key_heads: int,
    eps: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Make normalised q and k, log decays and betas; see `stree.kernels.ops`."""
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
