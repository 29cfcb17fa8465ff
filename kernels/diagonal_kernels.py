"""Triton code of the diagonal scans (Mamba-1, RG-LRU): `stree.kernels.diagonal` launches it.

`kernels/README.md` derives it and counts what it costs.
"""

# mypy: disable-error-code="assignment, no-untyped-def, no-any-return, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from stree.kernels.tree_kernels import STEP_INTEGERS, softplus


@triton.jit
def _after_node(state, rate, step, x, key, SELECTIVE: tl.constexpr):
    """Continue a state [channels, dstate] by one node.

    Mamba-1: step is dt, rate is A and key is B.  RG-LRU: step is the log decay, rate is 1 and dstate is 1.
    """
    step = step.to(tl.float32)
    x = x.to(tl.float32)
    write = (step * x)[:, None] * key.to(tl.float32)[None, :] if SELECTIVE else x[:, None]
    return state * tl.exp2(step[:, None] * rate) + write


@triton.jit
def _fold(
    state, rate, length, c, s, channels, path_ptr, step_ptr, x_ptr, B_ptr, stride_step_n, stride_x_n, stride_B_n,
    DSTATE: tl.constexpr, AHEAD: tl.constexpr, SELECTIVE: tl.constexpr,
):  # fmt: skip
    """Continue a state by the rows of a path."""
    for start in range(0, length, AHEAD):
        steps, values, keys = (), (), ()  # tuples, so that the loads of several rows are under way together
        for k in tl.static_range(AHEAD):
            is_entry = start + k < length
            row = tl.load(path_ptr + start + k, is_entry, 0)
            mask = c < tl.where(is_entry, channels, 0)
            steps += (tl.load(step_ptr + row * stride_step_n + c, mask, 0.0),)
            values += (tl.load(x_ptr + row * stride_x_n + c, mask, 0.0),)
            if SELECTIVE:
                keys += (tl.load(B_ptr + row * stride_B_n + s, s < tl.where(is_entry, DSTATE, 0), 0.0),)
        for k in tl.static_range(AHEAD):
            state = _after_node(state, rate, steps[k], values[k], keys[k] if SELECTIVE else None, SELECTIVE)
    return state


@triton.jit
def _stash(
    source_ptr, stash_ptr, bias_ptr, stride_n, stride_stash_n, column, first, n, width,
    BLOCK_N: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Copy some columns of the new rows into a stash, as step sizes if SOFTPLUS."""
    for start in range(first, n, BLOCK_N):
        node = start + tl.arange(0, BLOCK_N)[:, None]
        mask = (node < n) & (column < width)[None, :]
        row = tl.load(source_ptr + (node - first) * stride_n + column[None, :], mask, 0.0)
        if SOFTPLUS:
            row = row.to(tl.float32)
            if bias_ptr is not None:
                row += tl.load(bias_ptr + column, column < width, 0.0).to(tl.float32)[None, :]
            row = softplus(row)
        tl.store(stash_ptr + node * stride_stash_n + column[None, :], row, mask)


@triton.jit(do_not_specialize=STEP_INTEGERS)
def diagonal_kernel(
    state_ptr, rate_ptr, bias_ptr, D_ptr, walk_ptr, y_ptr,
    path_ptr, lengths_ptr, old_step_ptr, old_x_ptr, old_B_ptr,
    step_ptr, x_ptr, B_ptr, C_ptr, stash_step_ptr, stash_x_ptr, stash_B_ptr,
    n, first, new_from, path_size, channels,
    stride_state_b, stride_rate_b,
    stride_old_step_b, stride_old_step_n, stride_old_x_b, stride_old_x_n, stride_old_B_b, stride_old_B_n,
    stride_step_b, stride_step_n, stride_x_b, stride_x_n, stride_B_b, stride_B_n, stride_C_b, stride_C_n,
    stride_stash_step_b, stride_stash_step_n, stride_stash_x_b, stride_stash_x_n, stride_stash_B_b, stride_stash_B_n,
    DSTATE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr,
    SLOTS: tl.constexpr, SELECTIVE: tl.constexpr, FOLD: tl.constexpr, SCAN: tl.constexpr, KEEP: tl.constexpr,
    KEEP_SHARED: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """Fold a path into some channels of a state and walk a tree with it; grid (blocks of channels, batch)."""
    batch = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    s = tl.arange(0, BLOCK_S)
    inside = c < channels
    is_state = s < DSTATE
    tile = c[:, None] * DSTATE + s[None, :]
    tile_mask = inside[:, None] & is_state[None, :]
    state_ptr += batch * stride_state_b
    state = tl.load(state_ptr + tile, tile_mask, 0.0)
    rate = 1.4426950408889634  # log2 e: decays are powers of 2
    if SELECTIVE:
        rate *= tl.load(rate_ptr + batch * stride_rate_b + tile, tile_mask, 0.0).to(tl.float32)
    if FOLD:
        length = tl.load(lengths_ptr + batch).to(tl.int32)
        if SELECTIVE:
            old_B_ptr += batch * stride_old_B_b
        state = _fold(
            state, rate, length, c, s, channels, path_ptr + batch * path_size,
            old_step_ptr + batch * stride_old_step_b, old_x_ptr + batch * stride_old_x_b, old_B_ptr,
            stride_old_step_n, stride_old_x_n, stride_old_B_n, DSTATE, AHEAD, SELECTIVE,
        )  # fmt: skip
        if length > 0:
            tl.store(state_ptr + tile, state, tile_mask)
    if SCAN:
        step_ptr += batch * stride_step_b
        x_ptr += batch * stride_x_b
        if SELECTIVE:
            B_ptr += batch * stride_B_b
            C_ptr += batch * stride_C_b
        if KEEP:
            stash_step_ptr += batch * stride_stash_step_b
            stash_x_ptr += batch * stride_stash_x_b
            if SELECTIVE:
                stash_B_ptr += batch * stride_stash_B_b
            tl.debug_barrier()  # other threads may still read, from the same stash, the path that they fold
            _stash(
                step_ptr, stash_step_ptr, bias_ptr, stride_step_n, stride_stash_step_n, c, new_from, n, channels,
                BLOCK_N, SELECTIVE,
            )  # fmt: skip
            _stash(x_ptr, stash_x_ptr, None, stride_x_n, stride_stash_x_n, c, new_from, n, channels, BLOCK_N, False)
            if KEEP_SHARED and tl.program_id(0) == 0:
                _stash(B_ptr, stash_B_ptr, None, stride_B_n, stride_stash_B_n, s, new_from, n, DSTATE, BLOCK_N, False)
            tl.debug_barrier()  # the walk reads rows that other threads have stashed
            step_ptr, stride_step_n = stash_step_ptr, stride_stash_step_n
            x_ptr, stride_x_n = stash_x_ptr, stride_stash_x_n
        skip = tl.zeros((BLOCK_C,), tl.float32)
        if D_ptr is not None:
            skip += tl.load(D_ptr + c, inside, 0.0).to(tl.float32)
        y_ptr += batch * (n - first) * channels
        walk_ptr += batch * n
        waiting = (state,) * SLOTS
        for start in range(0, n, AHEAD):
            entries, steps, values, keys, queries = (), (), (), (), ()
            for k in tl.static_range(AHEAD):
                # Beyond the last node it is visited again and nothing is stored, which costs less than masks.
                entry = tl.load(walk_ptr + tl.minimum(start + k, n - 1))
                node = entry & 0xFFFF
                entries += (entry,)
                steps += (tl.load(step_ptr + (node * stride_step_n + c), inside, 0.0),)
                values += (tl.load(x_ptr + (node * stride_x_n + c), inside, 0.0),)
                if SELECTIVE:
                    row = tl.maximum(node - new_from, 0) if KNOWN else node
                    key = tl.load(B_ptr + (row * stride_B_n + s), is_state, 0.0)
                    if KNOWN:
                        known = tl.load(stash_B_ptr + (node * stride_stash_B_n + s), is_state, 0.0)
                        key = tl.where(node < new_from, known, key)
                    keys += (key,)
                    queries += (tl.load(C_ptr + (row * stride_C_n + s), is_state, 0.0),)
            for k in tl.static_range(AHEAD):
                node = entries[k] & 0xFFFF
                take = (entries[k] >> 16) & 0xFF
                keep = entries[k] >> 24
                if take > 0:
                    for slot in tl.static_range(SLOTS):
                        state = tl.where(take == slot + 1, waiting[slot], state)
                state = _after_node(state, rate, steps[k], values[k], keys[k] if SELECTIVE else None, SELECTIVE)
                if keep > 0:
                    kept = ()
                    for slot in tl.static_range(SLOTS):
                        kept += (tl.where(keep == slot + 1, state, waiting[slot]),)
                    waiting = kept
                out = tl.sum(state * queries[k].to(tl.float32)[None, :], 1) if SELECTIVE else tl.sum(state, 1)
                if D_ptr is not None:
                    out += skip * values[k].to(tl.float32)
                is_asked = (start + k < n) & (node >= first)
                tl.store(y_ptr + ((node - first) * channels + c), out, c < tl.where(is_asked, channels, 0))
