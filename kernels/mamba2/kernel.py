"""The Mamba-2 operations in Triton: scan of a tree, commit of a path, and both in one pass over the state.

One program owns a block of headdim of one head of one sequence: it reads that part of the state once, commits the path,
stores it where there was something to commit, and scores the tree.  B, C and the step sizes are shared by programs, so
a path can be committed in the launch that stashes new rows only from another stash (`previous`); without one the commit
is a launch of its own.  `docs/maths.md` has the maths, `docs/gpu.md` the counted costs.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree.kernels.device_functions import STEP_INTEGERS, is_ancestor, softplus, split_decay
from stree.kernels.dispatch import Operands
from stree.kernels.jit import jit
from stree.kernels.launch import path_operands, strides
from stree.kernels.tiles import (
    MAX_DSTATE,
    MAX_HEADDIM,
    MAX_NODES,
    SsdTile,
    check_inner,
    check_kernel_dtypes,
    check_limit,
    interpreted,
)
from stree.kernels.topology import AcceptedPath

__all__ = ["ssd_commit", "ssd_step", "ssd_tree_scan"]


@triton.jit
def _step_sizes(raw, bias, low, high, SOFTPLUS: tl.constexpr):
    """Turn projected step sizes into those of the recurrence; take them as they are without SOFTPLUS."""
    raw = raw.to(tl.float32)
    return tl.minimum(tl.maximum(softplus(raw + bias), low), high) if SOFTPLUS else raw


@triton.jit
def _rounded_to_tf32(x):
    """Round float32 to the 11 bits of TF32, to nearest; tensor cores would cut the others off, towards zero."""
    rounded = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)  # the sum would carry a NaN's bits into the sign


@jit(fuses=True, do_not_specialize=(*STEP_INTEGERS, "stride_dt_b"))
def ssd_kernel(
    state_ptr, A_ptr, bias_ptr, D_ptr, bits_ptr, y_ptr,
    path_ptr, lengths_ptr, old_x_ptr, old_dt_ptr, old_B_ptr,
    x_ptr, dt_ptr, B_ptr, C_ptr,
    stash_ptr, stash_dt_ptr,
    n, first, new_from, path_size, nheads, low, high,
    stride_state_b, stride_A_b,
    stride_old_x_b, stride_old_x_n, stride_old_x_h, stride_old_dt_b, stride_old_dt_n, stride_old_B_b, stride_old_B_n,
    stride_x_b, stride_x_n, stride_x_h, stride_dt_b, stride_dt_n,
    stride_B_b, stride_B_n, stride_C_b, stride_C_n, stride_stash_b, stride_stash_n, stride_stash_dt_b,
    HEADDIM: tl.constexpr, DSTATE: tl.constexpr, SHARED: tl.constexpr,
    NODES: tl.constexpr, ROWS: tl.constexpr, PATH: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
    WORDS: tl.constexpr, COMMIT: tl.constexpr, SCAN: tl.constexpr, KEEP: tl.constexpr,
    KNOWN: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Commit a path to one tile of a state and score a tree with it; grid (blocks of headdim, heads, batch)."""
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    group = head // SHARED
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    node = tl.arange(0, NODES)
    A = tl.load(A_ptr + batch * stride_A_b + head).to(tl.float32)
    state_ptr += batch * stride_state_b + head * HEADDIM * DSTATE
    if COMMIT:
        length = tl.load(lengths_ptr + batch).to(tl.int32)
        entry = tl.arange(0, PATH)
        row = tl.load(path_ptr + batch * path_size + entry, mask=entry < length, other=0)
        old_dt = tl.load(old_dt_ptr + batch * stride_old_dt_b + row * stride_old_dt_n + head, entry < length, 0.0)
        old_dt = old_dt.to(tl.float32)
        # Sums of what follows an entry need no care: a sum whose rounding is seen belongs to a decay of nothing.
        later = tl.sum(tl.where(entry[None, :] > entry[:, None], (old_dt * A)[None, :], 0.0), 1)
        total = tl.exp(tl.sum(old_dt * A, 0))
        rows_ptr = old_x_ptr + batch * stride_old_x_b + row * stride_old_x_n + head * stride_old_x_h
        left = tl.load(rows_ptr[None, :] + p[:, None], (entry < length)[None, :] & (p < HEADDIM)[:, None], 0.0)
        left = left.to(tl.float32) * (old_dt * tl.exp(later))[None, :]
        old_B_ptr += batch * stride_old_B_b + group * DSTATE
    if SCAN:
        bits_ptr += batch * n * WORDS
        asked = first + tl.arange(0, ROWS)
        is_new = (node >= new_from) & (node < n)
        raw_ptr = dt_ptr + batch * stride_dt_b + (node - new_from) * stride_dt_n + head
        bias = tl.load(bias_ptr + head).to(tl.float32) if bias_ptr is not None else 0.0
        dt = _step_sizes(tl.load(raw_ptr, is_new, 0.0), bias, low, high, KEEP)
        dt = tl.where(is_new, dt, 0.0)
        if KNOWN:
            kept_dt_ptr = stash_dt_ptr + batch * stride_stash_dt_b + node * nheads + head
            dt += tl.load(kept_dt_ptr, node < new_from, 0.0)
        x_ptr += batch * stride_x_b + head * stride_x_h
        B_ptr += batch * stride_B_b + group * DSTATE
        C_ptr += batch * stride_C_b + group * DSTATE
        if KEEP:
            stash_ptr += batch * stride_stash_b
            kept_B_ptr = stash_ptr + nheads * HEADDIM + group * DSTATE
            kept_C_ptr = kept_B_ptr + (nheads // SHARED) * DSTATE
        # Path sums come before the loop and the mask is read again after it, so one square at a time is live.
        coarse, fine = split_decay(dt * A)
        below = is_ancestor(bits_ptr, node[:, None], node[None, :], n, WORDS)
        coarse_node = tl.sum(tl.where(below, coarse[None, :], 0.0), 1)
        fine_node = tl.sum(tl.where(below, fine[None, :], 0.0), 1)
        below = is_ancestor(bits_ptr, asked[None, :], node[:, None], n, WORDS)
        coarse_row = tl.sum(tl.where(below, coarse[:, None], 0.0), 0)
        fine_row = tl.sum(tl.where(below, fine[:, None], 0.0), 0)
        # Transposed products: the warps share the columns of the state, and no tile of it is transposed.
        seen = tl.zeros((BLOCK_P, ROWS), tl.float32)
        weight = tl.zeros((NODES, ROWS), tl.float32)
    for start in range(0, DSTATE, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        tile_mask = (p < HEADDIM)[:, None] & (s < DSTATE)[None, :]
        tile_ptr = state_ptr + p[:, None] * DSTATE + s[None, :]
        state = tl.load(tile_ptr, tile_mask, 0.0)
        if COMMIT:  # noqa: SIM102 - COMMIT is known to the compiler, length is not
            if length > 0:
                right_ptr = old_B_ptr + row[:, None] * stride_old_B_n + s[None, :]
                right = tl.load(right_ptr, (entry < length)[:, None] & (s < DSTATE)[None, :], 0.0).to(tl.float32)
                state = state * total + tl.dot(left, right, input_precision=EXACT)
                tl.store(tile_ptr, state, tile_mask)
        if SCAN:
            query_ptr = C_ptr + (asked - new_from)[:, None] * stride_C_n + s[None, :]
            query = tl.load(query_ptr, (asked < n)[:, None] & (s < DSTATE)[None, :], 0.0)
            key_ptr = B_ptr + (node - new_from)[:, None] * stride_B_n + s[None, :]
            key = tl.load(key_ptr, is_new[:, None] & (s < DSTATE)[None, :], 0.0)
            if KEEP and (tl.program_id(0) == 0 and head % SHARED == 0):
                key_mask = is_new[:, None] & (s < DSTATE)[None, :]
                tl.store(kept_B_ptr + node[:, None] * stride_stash_n + s[None, :], key, key_mask)
                query_mask = (asked < n)[:, None] & (s < DSTATE)[None, :]
                tl.store(kept_C_ptr + asked[:, None] * stride_stash_n + s[None, :], query, query_mask)
            if KNOWN:
                known = (node < new_from)[:, None] & (s < DSTATE)[None, :]
                key = tl.where(
                    known, tl.load(kept_B_ptr + node[:, None] * stride_stash_n + s[None, :], known, 0.0), key
                )
            seen += tl.dot(state, tl.trans(query.to(tl.float32)), input_precision=EXACT)
            if WIDE:
                query, key = query.to(tl.float32), key.to(tl.float32)
            weight += tl.dot(key, tl.trans(query), input_precision=EXACT)
    if SCAN:
        above = is_ancestor(bits_ptr, asked[None, :], node[:, None], n, WORDS)
        between = (coarse_row[None, :] - coarse_node[:, None]) + (fine_row[None, :] - fine_node[:, None])
        weight = tl.where(above, weight * tl.exp(tl.where(above, between, 0.0)) * dt[:, None], 0.0)
        if D_ptr is not None:
            weight += tl.where(asked[None, :] == node[:, None], tl.load(D_ptr + head).to(tl.float32), 0.0)
        new_mask = is_new[None, :] & (p < HEADDIM)[:, None]
        x = tl.load(x_ptr + (node - new_from)[None, :] * stride_x_n + p[:, None], new_mask, 0.0)
        values = x
        if KEEP:
            kept_x_ptr = stash_ptr + node[None, :] * stride_stash_n + (head * HEADDIM + p)[:, None]
        if KNOWN:
            known = (node < new_from)[None, :] & (p < HEADDIM)[:, None]
            values = tl.where(known, tl.load(kept_x_ptr, known, 0.0), x)
        out = seen * tl.exp(coarse_row + fine_row)[None, :]
        if MIXED == "tf32":
            weight = _rounded_to_tf32(weight)
        out += tl.dot(values.to(tl.float32), weight, input_precision=MIXED)
        out_ptr = y_ptr + ((batch * (n - first) + tl.arange(0, ROWS)) * nheads + head)[None, :] * HEADDIM + p[:, None]
        tl.store(out_ptr, out, (asked < n)[None, :] & (p < HEADDIM)[:, None])
        if KEEP:
            tl.store(kept_x_ptr, x, new_mask)
            if tl.program_id(0) == 0:
                tl.store(stash_dt_ptr + batch * stride_stash_dt_b + node * nheads + head, dt, is_new)


def ssd_tree_scan(a: Operands) -> Tensor:
    """Score a tree; see `stree.kernels.ops`."""
    check_kernel_dtypes("ssd_tree_scan", x=a.x, B=a.B, C=a.C)
    batch, n, heads, headdim = a.x.shape
    y = torch.empty(batch, n - a.first, heads, headdim, dtype=a.x.dtype, device=a.x.device)
    _launch("ssd_tree_scan", a.state, a.A, scan=a, new=(a.x, a.dt, a.B, a.C), y=y)
    return y


def ssd_commit(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, accepted: AcceptedPath) -> None:
    """Commit the accepted path to the state, in place; see `stree.kernels.ops`."""
    check_kernel_dtypes("ssd_commit", x=x, B=B)
    _launch("ssd_commit", state, A, accepted=accepted, old=(x, dt, B))


def ssd_step(a: Operands) -> Tensor:
    """Commit the last path, stash the new rows, score the new tree; see `stree.kernels.ops`."""
    check_kernel_dtypes("ssd_step", xbc=a.xbc, stash_xbc=a.stash_xbc)
    (batch, rows, _), heads, accepted, old = a.xbc.shape, a.A.shape[0], a.accepted, None
    if accepted is not None:
        old_xbc, old_dt = a.previous or (a.stash_xbc, a.stash_dt)
        check_kernel_dtypes("ssd_step", xbc=a.xbc, previous=old_xbc)
        x, B, _ = _split_xbc(old_xbc, heads, a.headdim, a.ngroups)
        old = (x, old_dt, B)
        if a.previous is None:
            _launch("ssd_step", a.state, a.A, accepted=accepted, old=old)
            accepted = old = None
    x, B, C = _split_xbc(a.xbc, heads, a.headdim, a.ngroups)
    y = torch.empty(batch, rows, heads, a.headdim, dtype=a.stash_xbc.dtype, device=a.xbc.device)
    stash = a.stash_xbc, a.stash_dt
    _launch("ssd_step", a.state, a.A, accepted=accepted, old=old, scan=a, new=(x, a.dt, B, C), stash=stash, y=y)
    return y


def _split_xbc(xbc: Tensor, heads: int, headdim: int, ngroups: int) -> tuple[Tensor, Tensor, Tensor]:
    """View the channels after the convolution as x[b, n, h, p], B[b, n, g, s] and C[b, n, g, s]."""
    check_inner("xbc", xbc)
    inner = heads * headdim
    span = (xbc.shape[2] - inner) // 2
    x, B, C = xbc.split((inner, span, span), 2)
    return x.unflatten(2, (heads, headdim)), B.unflatten(2, (ngroups, -1)), C.unflatten(2, (ngroups, -1))


def _launch(
    op: str, state: Tensor, A: Tensor, *, accepted: AcceptedPath | None = None, old: tuple[Tensor, ...] | None = None,
    scan: Operands | None = None, new: tuple[Tensor, ...] | None = None,
    stash: tuple[Tensor, Tensor] | None = None, y: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch the kernel for a commit (accepted, old x, dt, B), a scan (its operands, new x, dt, B, C, y), or both."""
    batch, heads, headdim, dstate = state.shape
    check_limit(op, "a headdim", headdim, MAX_HEADDIM)
    check_limit(op, "a dstate", dstate, MAX_DSTATE)
    check_inner("state", state, 3)
    check_inner("A", A)
    path, lengths, entries = path_operands(accepted)
    check_limit(op, "a path of nodes", entries, MAX_NODES)
    old_x, old_dt, old_B = _checked(old, 3)
    x, dt, B, C = _checked(new, 4)
    stash_xbc, stash_dt = stash or (None, None)
    n, first, bits, D, bias, low, high = 1, 0, None, None, None, 0.0, 0.0
    if scan is not None:
        n, first, bits, D = scan.topology.num_nodes, scan.first, scan.topology.ancestor_bits(), scan.D
        check_limit(op, "trees of nodes", n, MAX_NODES)
    if stash is not None and scan is not None:
        check_inner("stash_xbc", stash[0])
        check_inner("stash_dt", stash[1], 2)
        bias, (low, high) = scan.dt_bias, map(float, scan.dt_limit)
    for name, tensor in (("D", D), ("dt_bias", bias)):
        if tensor is not None:
            check_inner(name, tensor)
    rows, keys = (old_x, old_B) if x is None else (x, B)
    new_from = first if stash is not None else 0
    tile = SsdTile.of(n, n - first, entries, headdim, dstate, rows.dtype)
    ssd_kernel[(-(-headdim // tile.headdim), heads, batch)](
        state, A, bias, D, bits, y, path, lengths, old_x, old_dt, old_B, x, dt, B, C, stash_xbc, stash_dt,
        n, first, new_from, entries, heads, low, high, state.stride(0), A.stride(0) if A.ndim == 2 else 0,
        *strides(old_x, 3), *strides(old_dt), *strides(old_B), *strides(x, 3), *strides(dt), *strides(B), *strides(C),
        *strides(stash_xbc), *strides(stash_dt, 1),
        HEADDIM=headdim, DSTATE=dstate, SHARED=heads // keys.shape[2], NODES=tile.nodes, ROWS=tile.rows,
        PATH=tile.path, BLOCK_P=tile.headdim, BLOCK_S=tile.dstate, WORDS=-(-n // 32), COMMIT=old is not None,
        SCAN=scan is not None, KEEP=stash is not None, KNOWN=new_from > 0,
        WIDE=interpreted(),  # the interpreter multiplies bfloat16 as if it were integers
        EXACT="tf32x3",
        # Values of 16 bits are exact in TF32, and 11 bits of a weight lose less than outputs in bfloat16 do.
        MIXED="tf32" if rows.dtype == torch.bfloat16 else "tf32x3",
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _checked(rows: tuple[Tensor, ...] | None, count: int) -> tuple[Any, ...]:
    """Require that rows of heads, groups and step sizes are contiguous; as many Nones for none."""
    if rows is None:
        return (None,) * count
    for name, tensor, dims in zip(("x", "dt", "B", "C"), rows, (1, 1, 2, 2), strict=False):
        check_inner(name, tensor, dims)
    return rows
