"""Triton code of the SSD (Mamba-2) kernels; `stree.kernels.ssd` launches it, `kernels/README.md` derives it."""

# mypy: disable-error-code="no-untyped-def, no-any-return, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from stree.kernels.tree_kernels import STEP_INTEGERS, is_ancestor, softplus, split_decay


@triton.jit
def _step_sizes(raw, bias, low, high, SOFTPLUS: tl.constexpr):
    """Turn projected step sizes into those of the recurrence; take them as they are without SOFTPLUS."""
    raw = raw.to(tl.float32)
    return tl.minimum(tl.maximum(softplus(raw + bias), low), high) if SOFTPLUS else raw


@triton.jit(do_not_specialize=(*STEP_INTEGERS, "stride_dt_b"))
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
    WORDS: tl.constexpr, FOLD: tl.constexpr, SCAN: tl.constexpr, KEEP: tl.constexpr, KEEP_SHARED: tl.constexpr,
    KNOWN: tl.constexpr, SOFTPLUS: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Fold a path into one tile of a state and score a tree with it; grid (blocks of headdim, heads, batch)."""
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    group = head // SHARED
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    node = tl.arange(0, NODES)
    A = tl.load(A_ptr + batch * stride_A_b + head).to(tl.float32)
    state_ptr += batch * stride_state_b + head * HEADDIM * DSTATE
    if FOLD:
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
        dt = _step_sizes(tl.load(raw_ptr, is_new, 0.0), bias, low, high, SOFTPLUS)
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
        if FOLD:  # noqa: SIM102 - FOLD is known to the compiler, length is not
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
            if KEEP_SHARED and (tl.program_id(0) == 0 and head % SHARED == 0):
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
        out += tl.dot(values.to(tl.float32), weight, input_precision=MIXED)
        out_ptr = y_ptr + ((batch * (n - first) + tl.arange(0, ROWS)) * nheads + head)[None, :] * HEADDIM + p[:, None]
        tl.store(out_ptr, out, (asked < n)[None, :] & (p < HEADDIM)[:, None])
        if KEEP:
            tl.debug_barrier()  # other warps may still read, from the same stash, the path that they fold
            tl.store(kept_x_ptr, x, new_mask)
            if KEEP_SHARED and tl.program_id(0) == 0:
                tl.store(stash_dt_ptr + batch * stride_stash_dt_b + node * nheads + head, dt, is_new)


@triton.jit(do_not_specialize=(*STEP_INTEGERS, "stride_dt_b"))
def ssd_keep_kernel(
    xbc_ptr, dt_ptr, bias_ptr, stash_ptr, stash_dt_ptr,
    first, nheads, inner, shared_channels, low, high,
    stride_xbc_b, stride_xbc_n, stride_dt_b, stride_dt_n, stride_stash_b, stride_stash_n, stride_stash_dt_b,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Stash one row of B, C and dt, which the programs of `ssd_kernel` share; grid (rows, batch)."""
    row = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    source_ptr = xbc_ptr + batch * stride_xbc_b + row * stride_xbc_n + inner
    target_ptr = stash_ptr + batch * stride_stash_b + (first + row) * stride_stash_n + inner
    for start in range(0, shared_channels, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        inside = channel < shared_channels
        tl.store(target_ptr + channel, tl.load(source_ptr + channel, inside, 0.0), inside)
    for start in range(0, nheads, BLOCK):
        head = start + tl.arange(0, BLOCK)
        inside = head < nheads
        bias = tl.load(bias_ptr + head, inside, 0.0).to(tl.float32) if bias_ptr is not None else 0.0
        raw = tl.load(dt_ptr + batch * stride_dt_b + row * stride_dt_n + head, inside, 0.0)
        kept_ptr = stash_dt_ptr + batch * stride_stash_dt_b + (first + row) * nheads + head
        tl.store(kept_ptr, _step_sizes(raw, bias, low, high, True), inside)
