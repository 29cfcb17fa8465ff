"""Triton code of a step's bookkeeping; `stree.kernels.step.bookkeeping` and ``texts`` launch it."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from stree.kernels.jit import jit


@jit(fuses=False, do_not_specialize=["m", "n", "num_stop", "stride_t", "stride_p", "stride_x"])
def emit_kernel(
    tokens_ptr, path_ptr, lengths_ptr, next_ptr, stop_ptr, limit_ptr, before_ptr, finished_ptr, pending_ptr,
    text_ptr, highest_ptr, report_ptr, m, n, num_stop, stride_t, stride_p, stride_x, PLACES: tl.constexpr,
    INFINITE: tl.constexpr,
):  # fmt: skip
    """Append what a step emits to the texts, and report it; grid (batch)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    length = tl.load(lengths_ptr + row).to(tl.int64)
    following = tl.load(next_ptr + row)
    node = tl.maximum(tl.load(path_ptr + row * stride_p + place + 1, place + 1 < m, 0), 0).to(tl.int64)
    token = tl.load(tokens_ptr + row * stride_t + node, place < m, 0)
    token = tl.where(place == length - 1, following, token)
    known, limit = tl.load(before_ptr + row) + 1, tl.load(limit_ptr + row)  # the pending token included
    count = tl.minimum(length, limit - known)
    end = count  # the place after the first stop token, or as many as there are
    for index in range(num_stop):
        is_stop = (token == tl.load(stop_ptr + row * num_stop + index)) & (place < count)
        end = tl.minimum(end, tl.min(tl.where(is_stop, place + 1, PLACES), 0).to(tl.int64))
        finished = tl.max(is_stop.to(tl.int32), 0) > 0
        tl.store(finished_ptr + row, tl.full((), 1, tl.int8), finished)
    tl.store(text_ptr + row * stride_x + known + place, token, place < end)
    known += end
    tl.store(before_ptr + row, known - 1)
    tl.store(finished_ptr + row, tl.full((), 1, tl.int8), known >= limit)
    tl.store(pending_ptr + row, following, length > 0)
    report_ptr += row * (m + 3)
    tl.store(report_ptr + place, token, place < m)
    tl.store(report_ptr + m, end)
    tl.store(report_ptr + m + 1, length)
    unusable = length < 0
    if highest_ptr is not None:
        last = tl.maximum(tl.load(path_ptr + row * stride_p + tl.maximum(length - 1, 0)), 0)
        highest = tl.load(highest_ptr + row * n + last).to(tl.float32)
        unusable = (length > 0) & ((highest != highest) | ((highest == float("inf")) & (not INFINITE)))
    tl.store(report_ptr + m + 2, unusable.to(tl.int64))


@jit(fuses=False, do_not_specialize=["m", "num_run", "stride_p", "stride_n"])
def columns_kernel(
    path_ptr, lengths_ptr, number_ptr, columns_ptr, count_ptr, m, num_run, stride_p, stride_n, PLACES: tl.constexpr
):  # fmt: skip
    """Map an accepted path to the columns of a draft model's tree that it commits; grid (batch)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    inside = place < m
    node = tl.maximum(tl.load(path_ptr + row * stride_p + place - 1, inside & (place > 0), 0), 0)
    if number_ptr is not None:
        node = tl.load(number_ptr + row * stride_n + node, inside, 0).to(tl.int32)
    column = tl.where(place > 0, node + 1, 0)
    is_run = (place == 0) | ((column > 0) & (column < num_run))
    tl.store(columns_ptr + row * m + place, column, inside)
    tl.store(count_ptr + row, tl.sum((is_run & (place < tl.load(lengths_ptr + row))).to(tl.int32), 0))


@jit(fuses=False, do_not_specialize=["m", "n", "stride_p"])
def nodes_kernel(
    path_ptr, lengths_ptr, on_ptr, live_ptr, m, n, stride_p, NODES: tl.constexpr, PLACES: tl.constexpr
):  # fmt: skip
    """Mark the nodes of an accepted path, and whether there is one; grid (batch)."""
    row = tl.program_id(0).to(tl.int64)
    node, place = tl.arange(0, NODES), tl.arange(0, PLACES)
    length = tl.load(lengths_ptr + row)
    accepted = tl.load(path_ptr + row * stride_p + place, (place < length) & (place < m), -1)
    is_on = tl.max((node[:, None] == accepted[None, :]).to(tl.int32), 1)
    tl.store(on_ptr + row * n + node, is_on.to(tl.float32), node < n)
    tl.store(live_ptr + row, length > 0)


@jit(fuses=False, do_not_specialize=["m", "stride_p"])
def defer_kernel(
    path_ptr, given_ptr, deferred_ptr, lengths_ptr, committed_ptr, m, stride_p, ENTRIES: tl.constexpr
):  # fmt: skip
    """Store a path for a deferred commit, and count its tokens as committed; grid (batch)."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, ENTRIES)
    length = tl.load(given_ptr + row)
    node = tl.load(path_ptr + row * stride_p + entry, (entry < length) & (entry < m), 0)
    tl.store(deferred_ptr + row * ENTRIES + entry, node.to(tl.int64))
    tl.store(lengths_ptr + row, length)
    tl.store(committed_ptr + row, tl.load(committed_ptr + row) + length)


@triton.jit
def _copy(source_ptr, rows_ptr, node, tree, nodes, width, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy some columns of some rows."""
    begin = tl.program_id(1) * COLUMNS
    if begin < width:
        column = begin + tl.arange(0, COLUMNS)
        inside = (node >= 0)[:, None] & (column < width)[None, :]
        row = (tree * nodes + node) * width
        taken = tl.load(source_ptr + row[:, None] + column[None, :], inside)
        entry = (tree * ENTRIES + tl.arange(0, ENTRIES)) * width
        tl.store(rows_ptr + entry[:, None] + column[None, :], taken, inside)


@jit(fuses=False, do_not_specialize=["batch", "inner", "nodes"])
def rows_kernel(
    nodes_ptr, source_ptr, source2_ptr, source3_ptr, rows_ptr, rows2_ptr, rows3_ptr, width, width2, width3,
    batch, inner, nodes, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy the rows of some nodes from up to three tensors; grid (layers x batch x inner, blocks of columns)."""
    tree = tl.program_id(0).to(tl.int64)
    sequence = tree // inner % batch
    node = tl.load(nodes_ptr + sequence * ENTRIES + tl.arange(0, ENTRIES))
    _copy(source_ptr, rows_ptr, node, tree, nodes, width, ENTRIES, COLUMNS)
    if source2_ptr is not None:
        _copy(source2_ptr, rows2_ptr, node, tree, nodes, width2, ENTRIES, COLUMNS)
    if source3_ptr is not None:
        _copy(source3_ptr, rows3_ptr, node, tree, nodes, width3, ENTRIES, COLUMNS)
