"""Mixtures of experts in Triton, for the few rows of a tree: three launches, in a shape that no routing changes."""

# mypy: disable-error-code="no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree.kernels.fused.norm import as_rows
from stree.kernels.fused.pointwise import activated
from stree.kernels.fused.tiles import ExpertsTile, PointwiseTile
from stree.kernels.jit import jit
from stree.kernels.tiles import check_inner, check_kernel_dtypes, interpreted

__all__ = ["experts"]


@triton.jit
def _members(index_ptr, expert, pairs, ROWS: tl.constexpr, begin, CHUNK: tl.constexpr):
    """List the pairs begin.. of an expert, as int32[ROWS], the number of all of them, and the first."""
    row = tl.arange(0, ROWS)
    found = tl.zeros((ROWS,), tl.int32)
    count = 0
    first = pairs
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        hit = (pair < pairs) & (tl.load(index_ptr + pair, pair < pairs, -1) == expert)
        place = count + tl.cumsum(hit.to(tl.int32), 0) - 1 - begin
        chosen = hit[None, :] & (place[None, :] == row[:, None])
        found += tl.sum(tl.where(chosen, pair[None, :], 0), 1)
        first = tl.minimum(first, tl.min(tl.where(hit, pair, pairs), 0))
        count += tl.sum(hit.to(tl.int32), 0)
    return found, count, first


@triton.jit
def _product(total, x, weight, WIDE: tl.constexpr):
    """Add x weight^T; the interpreter multiplies bfloat16 as if it were integers, so there operands are widened."""
    if WIDE:
        return tl.dot(x.to(tl.float32), tl.trans(weight).to(tl.float32), total, input_precision="ieee")
    return tl.dot(x, tl.trans(weight), total, input_precision="tf32x3")


@jit(fuses=True, do_not_specialize=["pairs"])
def experts_up_kernel(
    x_ptr, index_ptr, up_ptr, hidden_ptr, pairs, stride_x_row,
    SHARE: tl.constexpr, CHANNELS: tl.constexpr, INNER: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Run some inner channels of one expert for all its rows; grid (pairs, blocks of inner channels)."""
    pair = tl.program_id(0)
    expert = tl.load(index_ptr + pair)
    members, count, first = _members(index_ptr, expert, pairs, ROWS, 0, CHUNK)
    if first == pair:  # the first pair of an expert works for all of them
        inner = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        within = inner < INNER
        halves: tl.constexpr = 2 if GATED else 1
        weight_ptr = up_ptr + expert.to(tl.int64) * (halves * INNER * CHANNELS) + inner[:, None] * CHANNELS
        row = tl.arange(0, ROWS)
        for begin in range(0, count, ROWS):
            if begin > 0:
                members, _, _ = _members(index_ptr, expert, pairs, ROWS, begin, CHUNK)
            asked = begin + row < count
            token = (members // SHARE).to(tl.int64)
            gate = tl.zeros((ROWS, BLOCK), tl.float32)
            up = tl.zeros((ROWS, BLOCK), tl.float32)
            for start in range(0, CHANNELS, DEPTH):
                channel = start + tl.arange(0, DEPTH)
                known = channel < CHANNELS
                x = tl.load(
                    x_ptr + token[:, None] * stride_x_row + channel[None, :], asked[:, None] & known[None, :], 0.0
                )
                inside = within[:, None] & known[None, :]
                gate = _product(gate, x, tl.load(weight_ptr + channel[None, :], inside, 0.0), WIDE)
                if GATED:
                    up = _product(up, x, tl.load(weight_ptr + INNER * CHANNELS + channel[None, :], inside, 0.0), WIDE)
            y = activated(gate, KIND)
            if GATED:
                y *= up
            out_ptr = hidden_ptr + members.to(tl.int64)[:, None] * INNER + inner[None, :]
            tl.store(out_ptr, y, asked[:, None] & within[None, :])


@jit(fuses=True, do_not_specialize=["pairs"])
def experts_down_kernel(
    hidden_ptr, index_ptr, weights_ptr, down_ptr, out_ptr, pairs,
    CHANNELS: tl.constexpr, INNER: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute some channels of one expert's outputs, weighted, for all its rows; grid (pairs, blocks of channels)."""
    pair = tl.program_id(0)
    expert = tl.load(index_ptr + pair)
    members, count, first = _members(index_ptr, expert, pairs, ROWS, 0, CHUNK)
    if first == pair:
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        within = channel < CHANNELS
        weight_ptr = down_ptr + expert.to(tl.int64) * (CHANNELS * INNER) + channel[:, None] * INNER
        row = tl.arange(0, ROWS)
        for begin in range(0, count, ROWS):
            if begin > 0:
                members, _, _ = _members(index_ptr, expert, pairs, ROWS, begin, CHUNK)
            asked = begin + row < count
            place = members.to(tl.int64)
            total = tl.zeros((ROWS, BLOCK), tl.float32)
            for start in range(0, INNER, DEPTH):
                inner = start + tl.arange(0, DEPTH)
                known = inner < INNER
                x = tl.load(hidden_ptr + place[:, None] * INNER + inner[None, :], asked[:, None] & known[None, :], 0.0)
                weight = tl.load(weight_ptr + inner[None, :], within[:, None] & known[None, :], 0.0)
                total = _product(total, x, weight, WIDE)
            total *= tl.load(weights_ptr + members, asked, 0.0).to(tl.float32)[:, None]
            tl.store(out_ptr + place[:, None] * CHANNELS + channel[None, :], total, asked[:, None] & within[None, :])


@jit(fuses=True)
def experts_sum_kernel(parts_ptr, y_ptr, SHARE: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up what a row's experts gave; grid (rows, blocks of channels)."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SHARE):
        total += tl.load(parts_ptr + (row * SHARE + part) * CHANNELS + channel, inside, 0.0)
    tl.store(y_ptr + row * CHANNELS + channel, total, inside)


def experts(
    x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, *, activation: str, gated: bool
) -> Tensor:
    """Run the chosen experts of every row and add them up; see `stree.kernels.ops`."""
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
    experts_up_kernel[(pairs, -(-inner // tile.block))](
        x, index, up, hidden, pairs, stride, SHARE=share, GATED=gated, KIND=activation, **common
    )
    experts_down_kernel[(pairs, -(-channels // tile.block))](hidden, index, weights, down, parts, pairs, **common)
    block = PointwiseTile()
    experts_sum_kernel[(rows, -(-channels // block.channels))](
        parts, y, SHARE=share, CHANNELS=channels, BLOCK=block.channels, num_warps=block.warps
    )
    return y
