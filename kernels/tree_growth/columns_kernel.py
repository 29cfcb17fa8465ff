"""The columns of a growing tree in Triton: one launch for each operation."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, no-any-return, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree.kernels.jit import jit
from stree.kernels.step.texts import Seen
from stree.kernels.tiles import padded
from stree.kernels.tree_growth.operands import Appended, Chosen, Columns, Layout, Proposed

__all__ = [
    "append",
    "begin",
    "cut",
    "select",
]

NODES = 16  # new ones that a program writes
COLUMNS = 64  # of a mask that are copied together


@triton.jit
def _rated(slots_ptr, taken_ptr, rating_ptr, node, count):
    """Load some nodes' slots, whether they are taken, and their values, 0 where they are not."""
    given = node < count
    slot = tl.load(slots_ptr + node, given, 0).to(tl.int32)
    taken = tl.load(taken_ptr + node, given, 0) != 0
    return slot, taken, tl.where(taken, tl.load(rating_ptr + slot, given, 0.0), 0.0)


@triton.jit
def _count_greater(values, others):
    """Count how many of the others are greater than each value."""
    return tl.sum((others[None, :] > values[:, None]).to(tl.int32), 1)


@jit(fuses=False, do_not_specialize=["room", "stride_x"])
def begin_kernel(
    text_ptr, lengths_ptr, pending_ptr, tokens_ptr, parents_ptr, depths_ptr, mask_ptr, values_ptr, room, stride_x,
    NODES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Lay out the columns of a tree that begins to grow; grid (blocks of columns, batch)."""
    batch = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * NODES + tl.arange(0, NODES)
    lane = tl.arange(0, COLUMNS)
    inside = column < room
    last = tl.load(text_ptr + batch * stride_x + tl.load(lengths_ptr + batch) - 1)
    token = tl.where(column == 0, last, tl.where(column == 1, tl.load(pending_ptr + batch), 0))
    row = batch * room + column
    tl.store(tokens_ptr + row, token, inside)
    tl.store(parents_ptr + row, tl.where(column == 1, 0, -1), inside)
    tl.store(depths_ptr + row, tl.where(column == 1, 1, 0), inside)
    node = batch * (room - 1) + column
    tl.store(values_ptr + node, tl.full((NODES,), 1.0, tl.float32), column < room - 1)
    for start in range(0, room, COLUMNS):
        other = start + lane
        link = (column == 1)[:, None] & (other == 0)[None, :]
        pairs = inside[:, None] & (other < room)[None, :]
        tl.store(mask_ptr + row[:, None] * room + other[None, :], (column[:, None] == other[None, :]) | link, pairs)


@jit(
    fuses=False,
    do_not_specialize=[
        "count", "width", "ranks", "slots", "frontier", "size", "room", "num_nodes", "stride_slots_b"
    ]
)  # fmt: skip
def append_kernel(
    slots_ptr, taken_ptr, rating_ptr, offered_ptr, left_ptr,
    tokens_ptr, parents_ptr, depths_ptr, mask_ptr, values_ptr, value_ptr, above_ptr, leaf_ptr,
    count, width, ranks, slots, frontier, size, room, num_nodes, stride_slots_b,
    PRUNES: tl.constexpr, NODES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the columns of a layer's nodes, and note its leaves; grid (blocks of nodes, batch).

    Columns before the layer are read and its own are written, so blocks are independent.
    """
    batch = tl.program_id(1).to(tl.int64)
    node = tl.program_id(0) * NODES + tl.arange(0, NODES)
    lane = tl.arange(0, COLUMNS)
    given, inside = node < count, node < width
    slots_ptr += batch * stride_slots_b
    taken_ptr += batch * count
    rating_ptr += batch * slots
    values_ptr += batch * (room - 1)
    slot, taken, value = _rated(slots_ptr, taken_ptr, rating_ptr, node, count)
    if PRUNES:
        greater = tl.zeros((NODES,), tl.int32)
        for start in range(0, size - 1, COLUMNS):
            known = tl.load(values_ptr + start + lane, start + lane < size - 1, 0.0)
            greater += _count_greater(value, known)
        for start in range(0, count, COLUMNS):
            _, _, other = _rated(slots_ptr, taken_ptr, rating_ptr, start + lane, count)
            greater += _count_greater(value, other)
        taken = taken & (greater <= num_nodes)
        value = tl.where(taken, value, 0.0)
    if tl.program_id(0) == 0:
        left = tl.load(left_ptr + batch)
        for start in range(0, count, COLUMNS):
            is_one = tl.load(taken_ptr + start + lane, start + lane < count, 0) != 0
            left -= tl.sum(is_one.to(tl.int64), 0)
        tl.store(left_ptr + batch, left)
    column = slot // ranks + frontier
    token = tl.load(offered_ptr + batch * slots + slot, given, 0)
    tl.debug_barrier()  # no thread reads any more what is written below
    tl.store(value_ptr + batch * count + node, value, given)
    if above_ptr is not None:
        tl.store(above_ptr + batch * count + node, column.to(tl.int64), given)
        tl.store(leaf_ptr + batch * count + node, token, given)
    tl.store(values_ptr + size - 1 + node, value, inside)
    row = batch * room
    depth = tl.load(depths_ptr + row + column, inside, 0)
    tl.store(depths_ptr + row + size + node, tl.where(taken, depth + 1, 0), inside)
    tl.store(tokens_ptr + row + size + node, tl.where(taken, token, 0), inside)
    tl.store(parents_ptr + row + size + node, tl.where(taken, column, -1), inside)
    mask_ptr += row * room
    for start in range(0, size, COLUMNS):
        other = start + lane
        pairs = inside[:, None] & (other < size)[None, :]
        seen = tl.load(mask_ptr + column[:, None] * room + other[None, :], pairs, 0) != 0
        tl.store(mask_ptr + (size + node)[:, None] * room + other[None, :], seen & taken[:, None], pairs)


@jit(fuses=False, do_not_specialize=["count", "room"])
def cut_kernel(
    kept_ptr, tokens_ptr, parents_ptr, depths_ptr, mask_ptr, values_ptr,
    token_ptr, parent_ptr, depth_ptr, ancestor_ptr, value_ptr, row_ptr, count, room,
    NODES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the nodes that are kept, or all, as the target sees them; grid (blocks of nodes, batch)."""
    batch = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * NODES + tl.arange(0, NODES)
    lane = tl.arange(0, COLUMNS)
    inside = place < count
    node = place
    if kept_ptr is not None:
        node = tl.load(kept_ptr + batch * count + place, inside, 0).to(tl.int32)
    out = batch * count + place
    column = batch * room + node + 1
    above = tl.maximum(tl.load(parents_ptr + column, inside, -1) - 1, -1)
    tl.store(depth_ptr + out, tl.maximum(tl.load(depths_ptr + column, inside, 0) - 1, 0), inside)
    tl.store(token_ptr + out, tl.load(tokens_ptr + column, inside, 0), inside)
    tl.store(value_ptr + out, tl.load(values_ptr + batch * (room - 1) + node, inside, 0.0), inside)
    tl.store(row_ptr + out, above, inside)
    found = place * 0 - 1
    mask_ptr += batch * room * room
    for start in range(0, count, COLUMNS):
        at = start + lane
        other = at
        if kept_ptr is not None:
            other = tl.load(kept_ptr + batch * count + at, at < count, -2).to(tl.int32)
        found += tl.sum(tl.where((above >= 0)[:, None] & (other[None, :] == above[:, None]), at[None, :] + 1, 0), 1)
        pairs = inside[:, None] & (at < count)[None, :]
        seen = tl.load(mask_ptr + (node + 1)[:, None] * room + (other + 1)[None, :], pairs, 0) != 0
        tl.store(ancestor_ptr + out[:, None] * count + at[None, :], seen, pairs)
    tl.store(parent_ptr + out, found, inside)


@jit(fuses=False, do_not_specialize=["n", "count", "room"])
def select_kernel(
    parents_ptr, values_ptr, kept_ptr, n, count, room, SLOTS: tl.constexpr, WIDTH: tl.constexpr, BY_VALUE: tl.constexpr
):  # fmt: skip
    """List the nodes that are proposed: the best of them, or all but padding, which comes last; grid (batch)."""
    batch = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, SLOTS)
    inside = node < n
    if BY_VALUE:
        value = tl.load(values_ptr + batch * (room - 1) + node, inside, 0.0)
        value = tl.where(value > 0, value, 0.0)  # the bits of numbers that are not negative are ordered as they are
        key = (value.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (0x7FFFFFFF - node).to(tl.int64)
        best = tl.topk(key, WIDTH)  # lanes past the last node come behind it, as 0 at a later place
        is_kept = key >= tl.min(tl.where(tl.arange(0, WIDTH) < count, best, 0x7FFFFFFFFFFFFFFF), 0)
        place = tl.cumsum(is_kept.to(tl.int32), 0) - 1
    else:
        parent = tl.load(parents_ptr + batch * room + node + 1, inside, -1)
        is_node = inside & (parent >= 0)
        before = tl.cumsum(is_node.to(tl.int32), 0)
        place = tl.where(is_node, before - 1, tl.sum(is_node.to(tl.int32), 0) + node - before)
        is_kept = inside & (place < count)
    tl.store(kept_ptr + batch * count + place, node.to(tl.int64), is_kept)


def begin(seen: Seen, room: int) -> Columns:
    """Lay out columns; see `stree.kernels.tree_growth.api`."""
    pending, batch = seen.pending, len(seen.pending)
    tokens = seen.tokens if seen.tokens.stride(1) == 1 else seen.tokens.contiguous()
    columns = Columns(
        tokens=pending.new_empty(batch, room),
        parents=pending.new_empty(batch, room, dtype=torch.int32),
        depths=pending.new_empty(batch, room, dtype=torch.int32),
        mask=pending.new_empty(batch, room, room, dtype=torch.bool),
        values=pending.new_empty(batch, room - 1, dtype=torch.float32),
    )
    with torch.cuda.device_of(pending):
        begin_kernel[(-(-room // NODES), batch)](
            tokens, seen.lengths.contiguous(), pending.contiguous(), columns.tokens, columns.parents,
            columns.depths, columns.mask, columns.values, room, tokens.stride(0),
            NODES=NODES, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
    return columns


def append(columns: Columns, chosen: Chosen, left: Tensor, layout: Layout) -> Appended:
    """Append the nodes of a layer; see `stree.kernels.tree_growth.api`."""
    batch, count = chosen.slots.shape
    room = columns.tokens.shape[1]
    value = torch.empty(batch, count, dtype=torch.float32, device=left.device)
    column = leaf = None
    if layout.width < count:
        column, leaf = torch.empty_like(chosen.slots), torch.empty_like(chosen.slots)
    with torch.cuda.device_of(left):  # Triton launches on the current device, wherever the tensors are
        append_kernel[(-(-count // NODES), batch)](
            chosen.slots, chosen.is_taken.contiguous(), chosen.value.float().contiguous(), chosen.tokens.contiguous(),
            left, columns.tokens, columns.parents, columns.depths, columns.mask, columns.values,
            value, column, leaf, count, layout.width, chosen.tokens.shape[2], chosen.value[0].numel(), layout.frontier,
            layout.size, room, layout.num_nodes or 0, chosen.slots.stride(0),
            PRUNES=layout.num_nodes is not None, NODES=NODES, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
    return Appended(layout.width, value, column, leaf)


def select(columns: Columns, size: int, count: int, *, by_value: bool) -> Tensor:
    """Choose the nodes that are proposed; see `stree.kernels.tree_growth.api`."""
    batch, room = columns.tokens.shape
    kept = columns.tokens.new_empty(batch, count)
    slots = padded(size - 1)
    with torch.cuda.device_of(columns.tokens):
        select_kernel[(batch,)](
            columns.parents, columns.values, kept, size - 1, count, room,
            SLOTS=slots, WIDTH=padded(count), BY_VALUE=by_value, num_warps=1 if slots <= 32 else 4,
        )  # fmt: skip
    return kept


def cut(columns: Columns, kept: Tensor | None, size: int) -> Proposed:
    """Cut a tree out of its columns; see `stree.kernels.tree_growth.api`."""
    batch, room = columns.tokens.shape
    count = size - 1 if kept is None else kept.shape[1]
    made = Proposed(
        tokens=columns.tokens.new_empty(batch, count),
        parents=columns.parents.new_empty(batch, count),
        depths=columns.depths.new_empty(batch, count),
        mask=columns.mask.new_empty(batch, count, count),
        values=columns.values.new_empty(batch, count),
        rows=columns.parents.new_empty(batch, count),
    )
    with torch.cuda.device_of(columns.tokens):
        cut_kernel[(-(-count // NODES), batch)](
            None if kept is None else kept.contiguous(), columns.tokens,
            columns.parents, columns.depths, columns.mask, columns.values,
            made.tokens, made.parents, made.depths, made.mask, made.values, made.rows, count, room,
            NODES=NODES, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
    return made
