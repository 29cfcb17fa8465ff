"""Triton code of what estimates learn from a verified tree; `stree.kernels.growth_learning` launches it."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sum_above(mask_ptr, number, n, NODES: tl.constexpr):
    """Add up the numbers of each node's ancestors, its own left out."""
    node = tl.arange(0, NODES)
    strict = (node < n)[:, None] & (node < n)[None, :] & (node[:, None] != node[None, :])
    is_above = tl.load(mask_ptr + (node[:, None] * n + node[None, :]), strict, 0) != 0
    return tl.sum(tl.where(is_above, number[None, :], 0.0), 1)


@triton.jit
def _add(table_ptr, count, is_same, is_first):
    """Add up what nodes of one cell count; the first of them writes."""
    known = tl.load(table_ptr, is_first, 0.0)
    tl.store(table_ptr, known + tl.sum(tl.where(is_same, count[None, :], 0.0), 1), is_first)


@triton.jit(
    do_not_specialize=[
        "n", "num_notes", "num_kept", "num_cells", "first_favourite", "beyond_favourites", "stride_ratios_b",
    ]
)  # fmt: skip
def learn_kernel(
    notes_ptr, places_ptr, numbers_ptr, parents_ptr, mask_ptr, ratios_ptr, live_ptr, passed_ptr, tests_ptr,
    n, num_notes, num_kept, num_cells, first_favourite, beyond_favourites, stride_ratios_b,
    NODES: tl.constexpr,
):  # fmt: skip
    """Count the tests of a sequence's tree; grid (batch).  No two lanes write to one cell, and none atomically."""
    batch = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < n
    parent = tl.load(parents_ptr + batch * n + node, inside, -1)
    is_drafted = parent >= 0
    ratio = tl.load(ratios_ptr + batch * stride_ratios_b + node, is_drafted, 1.0)
    is_elder = (parent[:, None] == parent[None, :]) & (node[None, :] < node[:, None])
    missed = tl.sum(tl.where(is_elder, tl.log(tl.maximum(1.0 - ratio, 1e-6))[None, :], 0.0), 1)
    own = tl.where(is_drafted, tl.log(tl.maximum(ratio, 1e-6)) + missed, 0.0)
    above = _sum_above(mask_ptr + batch * n * n, own, n, NODES)
    counts = is_drafted & (tl.load(live_ptr + batch + node * 0, is_drafted, 0) != 0)
    number = node.to(tl.int64)
    if numbers_ptr is not None:
        number = tl.load(numbers_ptr + batch * n + node, counts, 0)
    notes_ptr += batch * num_notes
    slot = tl.load(notes_ptr + tl.load(places_ptr + number - 1, counts, 0), counts, 0)
    cells_ptr = notes_ptr + tl.load(places_ptr + num_kept + number - 1, counts, 0) + 2 * slot
    before = tl.load(cells_ptr, counts, -1).to(tl.int32)
    after = tl.load(cells_ptr + 1, counts, -1).to(tl.int32)
    is_favourite = (before >= first_favourite) & (before < beyond_favourites)
    made = tl.exp(above + missed)
    tests = tl.where(is_favourite, tl.exp(above), made)
    passed_ptr += batch * num_cells
    tests_ptr += batch * num_cells
    for number_of_cell in tl.static_range(2):
        cell = before if number_of_cell == 0 else after
        is_same = (cell[:, None] == cell[None, :]) & counts[None, :]
        is_first = counts & (tl.sum((is_same & (node[None, :] < node[:, None])).to(tl.int32), 1) == 0)
        _add(tests_ptr + cell, tests, is_same, is_first)
        _add(passed_ptr + cell, made * ratio, is_same, is_first)


@triton.jit(do_not_specialize=["n", "stride_ratios_b"])
def level_kernel(
    parents_ptr, mask_ptr, values_ptr, ratios_ptr, live_ptr, shift_ptr, weight_ptr, n, stride_ratios_b,
    NODES: tl.constexpr,
):  # fmt: skip
    """Learn a text's level from the eldest children of its accepted nodes; grid (batch)."""
    batch = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < n
    parent = tl.load(parents_ptr + batch * n + node, inside, -1)
    is_drafted = parent >= 0
    ratio = tl.load(ratios_ptr + batch * stride_ratios_b + node, is_drafted, 1.0).to(tl.float32)
    has_elder = tl.sum(((parent[:, None] == parent[None, :]) & (node[None, :] < node[:, None])).to(tl.int32), 1) > 0
    above = _sum_above(mask_ptr + batch * n * n, tl.log(tl.maximum(ratio, 1e-6)), n, NODES)
    counts = is_drafted & ~has_elder & (tl.load(live_ptr + batch + node * 0, is_drafted, 0) != 0)
    made = tl.where(counts, tl.exp(above), 0.0)
    value = tl.load(values_ptr + batch * n + node, counts, 0.0)
    chance = tl.div_rn(value, tl.maximum(tl.load(values_ptr + batch * n + parent, counts, 1.0), 1e-38))
    weight = tl.load(weight_ptr + batch) + tl.sum(made * chance * (1 - chance), 0)
    weight = tl.minimum(weight, 12.0)  # reference_growth.MOST_WEIGHT
    shift = tl.load(shift_ptr + batch) + tl.div_rn(tl.sum(made * (ratio - chance), 0), weight)
    tl.store(weight_ptr + batch, weight)
    tl.store(shift_ptr + batch, shift)
