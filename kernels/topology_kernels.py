"""Triton code of what layers share of a tree and of an accepted path; `stree.kernels.topology_launch` launches it."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n", "words", "stride_parents_b", "stride_mask_b", "stride_mask_n"])
def tree_kernel(
    parents_ptr, mask_ptr, hidden_ptr, path_sum_ptr, bits_ptr, index_ptr, n, words,
    stride_parents_b, stride_mask_b, stride_mask_n,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Turn some rows of a mask into words, its complement and a matrix, and list rows of taps; grid (blocks, batch)."""
    batch = tl.program_id(1).to(tl.int64)
    node = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    asked = node < n
    row = batch * n + node
    lane = tl.arange(0, 32)
    mask_ptr += batch * stride_mask_b
    for word in range(words):
        column = word * 32 + lane
        inside = asked[:, None] & (column < n)[None, :]
        seen = tl.load(mask_ptr + node[:, None] * stride_mask_n + column[None, :], inside, 0).to(tl.int32)
        place = row[:, None] * n + column[None, :]
        tl.store(hidden_ptr + place, seen == 0, inside)
        tl.store(path_sum_ptr + place, seen.to(tl.float64), inside)
        tl.store(bits_ptr + row * words + word, tl.sum(seen << lane[None, :], 1), asked)
    if WIDTH > 0:
        above = node
        for tap in tl.static_range(WIDTH):
            tl.store(index_ptr + row * WIDTH + (WIDTH - 1 - tap), (above + (WIDTH - 1)).to(tl.int64), asked)
            inside = asked & (above >= 0)
            parent = tl.load(parents_ptr + batch * stride_parents_b + above, inside, 0)
            above = tl.where(above >= 0, parent, above - 1)  # above the root stand the rows of the window, newest first


@triton.jit(do_not_specialize=["m", "stride_path_b", "stride_path_m", "stride_lengths"])
def path_kernel(
    path_ptr, given_ptr, batch_ptr, rows_ptr, lengths_ptr, beyond_ptr, from_ptr, entering_ptr, keeps_ptr, m,
    stride_path_b, stride_path_m, stride_lengths,
    HISTORY: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Widen a path and its length, mask what lies past it, and say what enters a window; grid (batch,)."""
    batch = tl.program_id(0).to(tl.int64)
    length = tl.load(given_ptr + batch * stride_lengths).to(tl.int64)
    tl.store(batch_ptr + batch, batch)
    tl.store(lengths_ptr + batch, length)
    path_ptr += batch * stride_path_b
    for start in range(0, m, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < m
        node = tl.load(path_ptr + entry * stride_path_m, inside & (entry < length), 0).to(tl.int64)
        tl.store(rows_ptr + batch * m + entry, node, inside)
        tl.store(beyond_ptr + batch * m + entry, entry >= length, inside)
    if HISTORY > 0:
        # Column t of the new window is row length + t of the sequence [old window, accepted nodes].
        column = tl.arange(0, COLUMNS)
        wanted = column < HISTORY
        source = length + column
        entry = tl.minimum(tl.maximum(source - HISTORY, 0), m - 1)
        node = tl.load(path_ptr + entry * stride_path_m, wanted & (entry < length), 0).to(tl.int64)
        place = batch * HISTORY + column
        tl.store(from_ptr + place, tl.minimum(source, HISTORY - 1), wanted)
        tl.store(entering_ptr + place, node, wanted)
        tl.store(keeps_ptr + place, source < HISTORY, wanted)
