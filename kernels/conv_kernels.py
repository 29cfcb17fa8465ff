"""Triton code of the short convolution; `stree.kernels.conv` launches it, `kernels/README.md` derives it."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from stree.kernels.tree_kernels import STEP_INTEGERS


@triton.jit(do_not_specialize=STEP_INTEGERS)
def conv_kernel(
    window_ptr, path_ptr, lengths_ptr, old_ptr,
    x_ptr, weight_ptr, bias_ptr, index_ptr, stash_ptr, y_ptr,
    n, first, new_from, path_size, channels,
    stride_window_b, stride_old_b, stride_old_n, stride_x_b, stride_x_n, stride_stash_b, stride_stash_n,
    stride_weight_c,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    FOLD: tl.constexpr, SCAN: tl.constexpr, KEEP: tl.constexpr, SILU: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """Move a path into some channels of a window, then convolve a tree; grid (blocks of channels, batch)."""
    batch = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    window_ptr += batch * stride_window_b
    if FOLD:
        # Column t of the new window is row length + t of the sequence [old window, accepted nodes].
        length = tl.load(lengths_ptr + batch).to(tl.int32)
        column = tl.arange(0, COLUMNS)
        source = length + column
        wanted = (column < WIDTH - 1)[None, :] & inside[:, None]
        stays = wanted & (source < WIDTH - 1)[None, :]
        kept = tl.load(window_ptr + c[:, None] * (WIDTH - 1) + source[None, :], stays, 0.0)
        enters = (column < WIDTH - 1) & (source >= WIDTH - 1)
        row = tl.load(path_ptr + batch * path_size + source - (WIDTH - 1), enters, 0)
        moved_ptr = old_ptr + batch * stride_old_b + row[None, :] * stride_old_n + c[:, None]
        moved = tl.load(moved_ptr, enters[None, :] & inside[:, None], 0.0)
        tl.debug_barrier()  # every old row is read before one is overwritten
        columns_ptr = window_ptr + c[:, None] * (WIDTH - 1) + column[None, :]
        tl.store(columns_ptr, tl.where(stays, kept, moved.to(kept.dtype)), wanted)
        tl.debug_barrier()  # the taps below read the window that other warps have written
    if SCAN:
        x_ptr += batch * stride_x_b
        if KEEP:
            stash_ptr += batch * stride_stash_b
        for start in range(first, n, BLOCK_N):
            node = start + tl.arange(0, BLOCK_N)
            asked = node < n
            total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
            if bias_ptr is not None:
                total += tl.load(bias_ptr + c, inside, 0.0).to(tl.float32)[None, :]
            for tap in tl.static_range(WIDTH):
                place = tl.load(index_ptr + (batch * n + node) * WIDTH + tap, asked, 0).to(tl.int32) - (WIDTH - 1)
                is_new = (asked & (place >= new_from))[:, None] & inside[None, :]
                value = tl.load(x_ptr + (place - new_from)[:, None] * stride_x_n + c[None, :], is_new, 0.0)
                value = value.to(y_ptr.dtype.element_ty).to(tl.float32)
                if KNOWN:
                    known = (asked & (place >= 0) & (place < new_from))[:, None] & inside[None, :]
                    value += tl.load(stash_ptr + place[:, None] * stride_stash_n + c[None, :], known, 0.0).to(
                        tl.float32
                    )
                if WIDTH > 1:
                    before = (asked & (place < 0))[:, None] & inside[None, :]
                    past_ptr = window_ptr + c[None, :] * (WIDTH - 1) + (place + WIDTH - 1)[:, None]
                    value += tl.load(past_ptr, before, 0.0).to(tl.float32)
                weight = tl.load(weight_ptr + c * stride_weight_c + tap, inside, 0.0).to(tl.float32)
                total += value * weight[None, :]
            if SILU:
                total = total / (1.0 + tl.exp(-total))
            mask = asked[:, None] & inside[None, :]
            tl.store(y_ptr + (batch * (n - first) + node - first)[:, None] * channels + c[None, :], total, mask)
            if KEEP:
                new = tl.load(x_ptr + (node - new_from)[:, None] * stride_x_n + c[None, :], mask, 0.0)
                tl.store(stash_ptr + node[:, None] * stride_stash_n + c[None, :], new, mask)
