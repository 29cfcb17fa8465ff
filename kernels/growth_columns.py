"""The columns of a growing tree in Triton: a launch a layer."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stree.kernels.growth_columns_kernels import append_kernel, begin_kernel, cut_kernel, select_kernel
from stree.kernels.growth_door import Appended, Chosen, Columns, Layout, Proposed
from stree.kernels.tiles import padded

__all__ = [
    "append",
    "append_constants",
    "begin",
    "begin_constants",
    "cut",
    "cut_constants",
    "select",
    "select_constants",
]

NODES = 16  # new ones that a program writes
COLUMNS = 64  # of a mask that are copied together


def begin(pending: Tensor, leaf: Tensor, has_leaf: Tensor, room: int) -> Columns:
    """Lay out columns; see `stree.kernels.growth_door`."""
    batch = len(pending)
    columns = Columns(
        lead=pending.new_empty(batch),
        tokens=pending.new_empty(batch, room),
        parents=pending.new_empty(batch, room, dtype=torch.int32),
        depths=pending.new_empty(batch, room, dtype=torch.int32),
        mask=has_leaf.new_empty(batch, room, room),
        values=pending.new_empty(batch, room - 1, dtype=torch.float32),
    )
    with torch.cuda.device_of(pending):
        begin_kernel[(-(-room // NODES), batch)](
            pending.contiguous(), leaf.contiguous(), has_leaf.contiguous(), columns.lead, columns.tokens,
            columns.parents, columns.depths, columns.mask, columns.values, room,
            **begin_constants(), num_warps=4,
        )  # fmt: skip
    return columns


def begin_constants() -> dict[str, Any]:
    """List the compile-time constants of a layout; ahead-of-time builds take theirs from here too."""
    return {"NODES": NODES, "COLUMNS": COLUMNS}


def append(columns: Columns, chosen: Chosen, left: Tensor, layout: Layout) -> Appended:
    """Append the nodes of a layer; see `stree.kernels.growth_door`."""
    batch, count = chosen.slots.shape
    room = columns.tokens.shape[1]
    value = torch.empty(batch, count, dtype=torch.float32, device=left.device)
    column = leaf = None
    if layout.width < count:
        column, leaf = torch.empty_like(chosen.slots), torch.empty_like(chosen.slots)
    with torch.cuda.device_of(left):  # Triton launches on the current device, wherever the tensors are
        append_kernel[(-(-count // NODES), batch)](
            chosen.slots, chosen.is_taken.contiguous(), chosen.value.float().contiguous(), chosen.tokens.contiguous(),
            columns.lead, left, columns.tokens, columns.parents, columns.depths, columns.mask, columns.values,
            value, column, leaf, count, layout.width, chosen.tokens.shape[2], chosen.value[0].numel(), layout.frontier,
            layout.size, room, layout.num_nodes or 0, chosen.slots.stride(0),
            **append_constants(prunes=layout.num_nodes is not None), num_warps=4,
        )  # fmt: skip
    return Appended(layout.width, value, column, leaf)


def append_constants(*, prunes: bool) -> dict[str, Any]:
    """List the compile-time constants of a layer; ahead-of-time builds take theirs from here too."""
    return {"PRUNES": prunes, "NODES": NODES, "COLUMNS": COLUMNS}


def select(columns: Columns, size: int, count: int, *, by_value: bool) -> Tensor:
    """Choose the nodes that are proposed; see `stree.kernels.growth_door`."""
    batch, room = columns.tokens.shape
    kept = columns.tokens.new_empty(batch, count)
    constants = select_constants(size - 1, count, by_value=by_value)
    with torch.cuda.device_of(columns.tokens):
        select_kernel[(batch,)](
            columns.parents, columns.values, kept, size - 1, count, room,
            **constants, num_warps=1 if constants["SLOTS"] <= 32 else 4,
        )  # fmt: skip
    return kept


def select_constants(nodes: int, count: int, *, by_value: bool) -> dict[str, Any]:
    """List the compile-time constants of a selection; ahead-of-time builds take theirs from here too."""
    return {"SLOTS": padded(nodes), "WIDTH": padded(count), "BY_VALUE": by_value}


def cut(columns: Columns, kept: Tensor | None, size: int) -> Proposed:
    """Cut a tree out of its columns; see `stree.kernels.growth_door`."""
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
            None if kept is None else kept.contiguous(), columns.lead,
            columns.tokens, columns.parents, columns.depths, columns.mask, columns.values,
            made.tokens, made.parents, made.depths, made.mask, made.values, made.rows, count, room,
            **cut_constants(), num_warps=4,
        )  # fmt: skip
    return made


def cut_constants() -> dict[str, Any]:
    """List the compile-time constants of a cut; ahead-of-time builds take theirs from here too."""
    return {"NODES": NODES, "COLUMNS": COLUMNS}
