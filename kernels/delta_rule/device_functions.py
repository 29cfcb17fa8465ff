"""Parts of the gated delta kernel: decays along paths, scores per key channel, rows of the stash, the solve for u."""

# mypy: disable-error-code="no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from stree.kernels.device_functions import split_decay

__all__ = ["add_channel_scores", "head_decays", "load_rows", "path_sums", "solve"]


@triton.jit
def path_sums(bits_ptr, log_decay, n, NODES: tl.constexpr, WORDS: tl.constexpr):
    """Sum log decays [NODES, BLOCK_K] up root paths: a multiple of 1/8 without any error, and a small rest.

    e^-105 is 0 in float32, so clamping there loses nothing.  The parts have at most 11 bits, which float16 holds.
    """
    node = tl.arange(0, NODES)
    # The word of each pair, not all words of each row as in `is_ancestor`: those would not fit in registers.
    word_ptr = bits_ptr + node[:, None] * WORDS + (node // 32)[None, :]
    word = tl.load(word_ptr, (node < n)[:, None] & (node < n)[None, :], 0)
    below = ((word >> (node % 32)[None, :]) & 1).to(tl.float16)
    bounded = tl.maximum(log_decay, -105.0)
    high = tl.floor(bounded * 8.0 + 0.5) * 0.125
    middle = tl.floor((bounded - high) * 8192.0 + 0.5) * 0.0001220703125
    low = (bounded - high) - middle
    fine = tl.dot(below, middle.to(tl.float16)) + tl.dot(below, low.to(tl.float16))
    return tl.dot(below, high.to(tl.float16)), fine


@triton.jit
def _exp_of_sum(coarse, fine):
    """Compute e^(coarse + fine) for multiples of 1/8 and small numbers: ln 2 is taken out in a part of 9 bits first."""
    power = tl.floor(coarse * 1.4426950408889634 + 0.5)
    return tl.exp2(power) * tl.exp((coarse - power * 0.693359375) + (power * 2.1219444005469058e-4 + fine))


@triton.jit
def add_channel_scores(coupling, weight, query, key, coarse, fine, WINDOW: tl.constexpr, EXACT: tl.constexpr):
    """Add sum_c key_jc e^(G_ic - G_jc) probe_ic at [j, i] over a block of channels, for the probes key and query.

    A pass serves the keys whose G lies in one window of that width, and measures both exponents from its upper end:
    neither factor overflows, and one underflows only where the decay is nothing.  Pairs off the path are finite.
    """
    query, key = query.to(tl.float32), key.to(tl.float32)
    for window in range(0, (tl.max(-coarse) * (1.0 / WINDOW)).to(tl.int32) + 1):
        below_end = coarse + window * WINDOW
        inside = (below_end <= 0.0) & (below_end > -WINDOW)
        source = tl.where(inside, key * _exp_of_sum(tl.where(inside, -below_end, 0.0), -fine), 0.0)
        decay = _exp_of_sum(tl.minimum(below_end, 0.0), fine)
        coupling += tl.dot(source, tl.trans(key * decay), input_precision=EXACT)
        weight += tl.dot(source, tl.trans(query * decay), input_precision=EXACT)
    return coupling, weight


@triton.jit
def _take_rows(tensor, block, NODES: tl.constexpr, WIDTH: tl.constexpr):
    """Take rows 16 block .. 16 block + 15 of [NODES, WIDTH]."""
    index = tl.arange(0, NODES // 16)[:, None, None]
    return tl.sum(tl.where(index == block, tl.reshape(tensor, (NODES // 16, 16, WIDTH)), 0.0), 0)


@triton.jit
def _take_columns(tensor, block, ROWS: tl.constexpr, NODES: tl.constexpr):
    """Take columns 16 block .. 16 block + 15 of [ROWS, NODES]."""
    index = tl.arange(0, NODES // 16)[None, :, None]
    return tl.sum(tl.where(index == block, tl.reshape(tensor, (ROWS, NODES // 16, 16)), 0.0), 1)


@triton.jit
def load_rows(rows_ptr, stash_ptr, is_new, is_old, is_keeper, KEEP: tl.constexpr, STASHED: tl.constexpr):
    """Load new rows as the stash holds them, and stash them if asked; load older rows from the stash."""
    rows = tl.load(rows_ptr, is_new, 0.0).to(stash_ptr.dtype.element_ty)
    if KEEP and is_keeper:
        tl.store(stash_ptr, rows, is_new)
    if STASHED:
        rows = tl.where(is_old, tl.load(stash_ptr, is_old, 0.0), rows)
    return rows


@triton.jit
def head_decays(log_decay, below):
    """Compute e^G_i, and e^(G_i - G_j) at [j, i] on the path, of one log decay a node."""
    coarse, fine = split_decay(log_decay)
    coarse = tl.sum(tl.where(below, coarse[:, None], 0.0), 0)
    fine = tl.sum(tl.where(below, fine[:, None], 0.0), 0)
    between = (coarse[None, :] - coarse[:, None]) + (fine[None, :] - fine[:, None])
    return tl.exp(coarse + fine), tl.where(below, tl.exp(tl.where(below, between, 0.0)), 0.0)


@triton.jit
def solve(
    u_ptr, stride_u_n, n, wanted, coupling, weight, target, out, below,
    NODES: tl.constexpr, BLOCK_V: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Solve u + u coupling = target by substitution, store u and return out + u weight.

    It goes 16 nodes (columns) after 16 nodes.  A round makes one more level among them exact; what deeper levels hold
    until then is read by no finished one.
    """
    node = tl.arange(0, NODES)
    near = below & ((node // 16)[:, None] == (node // 16)[None, :])
    levels = tl.sum(near.to(tl.int32), 0)
    for block in range(0, NODES // 16):
        start = _take_columns(target, block, BLOCK_V, NODES)
        rows = _take_rows(coupling, block, NODES, NODES)
        inner = _take_columns(rows, block, 16, NODES)
        u = start
        for _ in range(1, tl.max(tl.where(node // 16 == block, levels, 0))):
            u = start - tl.dot(u, inner, input_precision=EXACT)
        target -= tl.dot(u, rows, input_precision=EXACT)
        out += tl.dot(u, _take_rows(weight, block, NODES, NODES), input_precision=EXACT)
        solved = block * 16 + tl.arange(0, 16)[None, :]
        tl.store(u_ptr + solved * stride_u_n, u, (solved < n) & wanted)
    return out
