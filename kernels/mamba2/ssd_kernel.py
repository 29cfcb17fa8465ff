"""The Mamba-2 kernel in Triton: commit of a path, convolution, scan of a tree and gate, each where it is asked for.

One program owns a block of headdim of one head of one sequence: it reads that part of the state once, commits the path,
stores it where there was something to commit, and scores the tree.  B, C and the step sizes are shared by programs, so
a path can be committed in the launch that stashes new rows only from another stash.  With a filter each program
convolves its own channels of x, and B and C for itself; the window is read only, as all programs of a group read it.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from stree.kernels.conv.device_functions import convolve, read_filter, tap_places
from stree.kernels.device_functions import STEP_INTEGERS, is_ancestor, softplus, split_decay
from stree.kernels.jit import jit

__all__ = ["ssd_kernel"]


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


@triton.jit
def _convolved(
    x_ptr, stash_ptr, y_ptr, window_ptr, weight_ptr, bias_ptr, places, node, asked, c, inside, stashes,
    new_from, stride_x_n, stride_stash_n, WIDTH: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """Convolve channels of nodes, [nodes, channels] in the dtype of y; stash the nodes' own inputs if ``stashes``."""
    filters = read_filter(window_ptr, weight_ptr, bias_ptr, c, inside, WIDTH, WIDTH)
    total, own = convolve(
        x_ptr, stash_ptr, y_ptr, filters, places, asked, c, inside, new_from, stride_x_n, stride_stash_n,
        WIDTH, KNOWN, True,
    )  # fmt: skip
    mask = asked[:, None] & inside[None, :]
    if stashes:
        tl.store(stash_ptr + node[:, None] * stride_stash_n + c[None, :], own, mask)
    return tl.where(mask, total, 0.0).to(y_ptr.dtype.element_ty)


@jit(fuses=True, do_not_specialize=(*STEP_INTEGERS, "stride_x_b", "stride_dt_b"))
def ssd_kernel(
    state_ptr, A_ptr, bias_ptr, D_ptr, bits_ptr, y_ptr,
    path_ptr, lengths_ptr, old_x_ptr, old_dt_ptr, old_B_ptr,
    x_ptr, dt_ptr, B_ptr, C_ptr,
    stash_ptr, stash_dt_ptr,
    window_ptr, weight_ptr, conv_bias_ptr, index_ptr, stash_conv_ptr, gate_ptr, norm_ptr, squares_ptr,
    n, first, new_from, path_size, nheads, low, high,
    stride_state_b, stride_A_b,
    stride_old_x_b, stride_old_x_n, stride_old_x_h, stride_old_dt_b, stride_old_dt_n, stride_old_B_b, stride_old_B_n,
    stride_x_b, stride_x_n, stride_x_h, stride_dt_b, stride_dt_n,
    stride_B_b, stride_B_n, stride_C_b, stride_C_n, stride_stash_b, stride_stash_n, stride_stash_dt_b,
    stride_window_b, stride_stash_conv_b, stride_stash_conv_n,
    HEADDIM: tl.constexpr, DSTATE: tl.constexpr, SHARED: tl.constexpr,
    NODES: tl.constexpr, ROWS: tl.constexpr, PATH: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
    WORDS: tl.constexpr, COMMIT: tl.constexpr, SCAN: tl.constexpr, KEEP: tl.constexpr,
    KNOWN: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr, MIXED: tl.constexpr,
    ALIGNED: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr,
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
        stride_x_b *= (
            ALIGNED  # these two are given as multiples of it, by which the compiler knows how wide it may load
        )
        stride_x_n *= ALIGNED
        x_ptr += batch * stride_x_b
        owns_group = tl.program_id(0) == 0 and head % SHARED == 0  # stashes what the group's programs share
        if WIDTH:  # x has all channels, before the convolution
            window_ptr += batch * stride_window_b
            stash_conv_ptr += batch * stride_stash_conv_b
            index_ptr += batch * n * WIDTH
            places = tap_places(index_ptr, node, is_new, WIDTH)
            # Each program has its own rows of B and C.
            program = (batch * nheads + head) * tl.num_programs(0) + tl.program_id(0)
            B_ptr += program * 2 * (n - new_from) * DSTATE
            C_ptr = B_ptr + (n - new_from) * DSTATE
            first_key = nheads * HEADDIM + group * DSTATE
            for start in range(0, DSTATE, SPAN):
                s = start + tl.arange(0, SPAN)
                for part in tl.static_range(2):
                    own_rows = _convolved(
                        x_ptr, stash_conv_ptr, y_ptr, window_ptr, weight_ptr, conv_bias_ptr, places, node, is_new,
                        first_key + part * (nheads // SHARED) * DSTATE + s, s < DSTATE, owns_group,
                        new_from, stride_x_n, stride_stash_conv_n, WIDTH, KNOWN,
                    )  # fmt: skip
                    own_ptr = B_ptr + (part * (n - new_from) + node - new_from)[:, None] * DSTATE + s[None, :]
                    tl.store(own_ptr, own_rows, is_new[:, None] & (s < DSTATE)[None, :])
            tl.debug_barrier()  # the loop reads rows that other warps have written
        else:
            x_ptr += head * stride_x_h
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
            if KEEP and owns_group:
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
        if WIDTH:
            x = tl.trans(_convolved(
                x_ptr, stash_conv_ptr, y_ptr, window_ptr, weight_ptr, conv_bias_ptr, places, node, is_new,
                head * HEADDIM + p, p < HEADDIM, True, new_from, stride_x_n, stride_stash_conv_n, WIDTH, KNOWN,
            ))  # fmt: skip
        else:
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
        row_head = (batch * (n - first) + tl.arange(0, ROWS)) * nheads + head
        out_mask = (asked < n)[None, :] & (p < HEADDIM)[:, None]
        if gate_ptr is not None:  # with the strides of x
            gate_ptr += batch * stride_x_b + head * HEADDIM
            gate = tl.load(gate_ptr + tl.arange(0, ROWS)[None, :] * stride_x_n + p[:, None], out_mask, 0.0)
            gate = gate.to(tl.float32)
            out *= gate / (1.0 + tl.exp(-gate))
            tl.store(squares_ptr + row_head * tl.num_programs(0) + tl.program_id(0), tl.sum(out * out, 0), asked < n)
            out *= tl.load(norm_ptr + head * HEADDIM + p, p < HEADDIM, 0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + row_head[None, :] * HEADDIM + p[:, None], out, out_mask)
        if KEEP:
            tl.store(kept_x_ptr, x, new_mask)
            if tl.program_id(0) == 0:
                tl.store(stash_dt_ptr + batch * stride_stash_dt_b + node * nheads + head, dt, is_new)
