"""The front door to one layer of growth: what slots are worth, which are taken, and the columns that they become.

Tensors alone: nothing here knows a plan, a drafter or a model.  On a GPU each function is one launch of a Triton
kernel whose grid and build depend on sizes alone; in float64 and beyond MAX_SLOTS it is
`stree.kernels.reference_growth`, which is its specification; on the CPU it is compiled, as far as
`stree.kernels.growth_compiled` and `ratings_compiled` have it.  Nothing waits for a device.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from stree.kernels import reference_growth
from stree.kernels.reference_growth import Level, Memory, RankFit, Ratings, Siblings, Table, Terms, Words
from stree.kernels.topology import is_launched, reads_freely

__all__ = [
    "MAX_SLOTS",
    "Appended",
    "Chosen",
    "Columns",
    "Layout",
    "Level",
    "Memory",
    "Proposed",
    "RankFit",
    "Ratings",
    "Siblings",
    "Table",
    "Terms",
    "Words",
    "append",
    "begin",
    "choose",
    "cut",
    "rate_by_rank",
    "rate_by_table",
    "select",
]

MOST_COMPARED = 1 << 20  # slots by width that one loop on the CPU goes through
MAX_SLOTS, MAX_WIDTH, MAX_BELOW = 1024, 128, 255  # of a layer, of those taken, and of the values below a node


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """A growing tree's columns, laid out once for its largest size; every tensor is contiguous.

    Attributes:
        lead: int64[batch], column of the root.
        tokens: int64[batch, room].
        parents: int32[batch, room].
        depths: int32[batch, room].
        mask: bool[batch, room, room], ancestors of each column; a new one has itself alone.
        values: float32[batch, room - 1], of the columns but the first.
    """

    lead: Tensor
    tokens: Tensor
    parents: Tensor
    depths: Tensor
    mask: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """Slots that become the nodes of a layer, and what all slots offer.

    Attributes:
        slots: int64[batch, count].
        is_taken: bool[batch, count].
        value: float32[batch, above, ranks], of each slot's child.
        tokens: int64[batch, above, ranks].
    """

    slots: Tensor
    is_taken: Tensor
    value: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """Which columns the nodes of a layer take.

    Attributes:
        width: nodes that are appended; the others are leaves, which are appended when the tree is grown.
        frontier: first column of the layer above; 0 for the root's.
        size: columns in use.
        num_nodes: only nodes are kept that as many others of the tree and the layer, and no more, may be better than;
            None to keep all.
        is_cut: whether slots that are taken come first, so that the host may leave out columns that none needs.
    """

    width: int
    frontier: int
    size: int
    num_nodes: int | None
    is_cut: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Appended:
    """The nodes of a layer.

    Attributes:
        width: columns appended; on the CPU none that is padding in every row, if taken slots come first.
        values: float32[batch, count], 0 where there is none.
        column: int64[batch, count], that each is below; None where the layer has no leaves.
        tokens: int64[batch, count], likewise.
    """

    width: int
    values: Tensor
    column: Tensor | None
    tokens: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Proposed:
    """A grown tree as the target sees it: nodes in place of columns, the root first.

    Attributes:
        tokens: int64[batch, n].
        parents: int32[batch, n].
        depths: int32[batch, n].
        mask: bool[batch, n, n].
        values: float32[batch, n].
        rows: int32[batch, n], each node's parent among all nodes that were grown.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    mask: Tensor
    values: Tensor
    rows: Tensor


def choose(value: Tensor, left: Tensor | None, below: Tensor | None, terms: Terms) -> tuple[Tensor, Tensor]:
    """Choose the best slots of a layer; of equal ones the first counts.

    Args:
        value: float[batch, slots], not negative; a slot of value 0 is never taken.
        left: int64[batch], nodes that the budget still allows; None takes whatever is positive, as far as the width
            allows.
        below: float32[m], ascending: values of the best nodes that typically grow below a slot's node, relative to it.
            A slot is taken if the budget lasts for the slots before it and all that is worth as much below them.  None
            to go by the threshold.
        terms: how many, and of what value.

    Returns:
        int64[batch, min(width, slots)] slots and bool of that shape, whether each is taken.
    """
    fits = value.shape[1] <= MAX_SLOTS and min(terms.width, value.shape[1]) <= MAX_WIDTH
    if _is_launched(value) and fits and (below is None or len(below) <= MAX_BELOW):
        from stree.kernels import growth

        return growth.choose(value, left, below, terms)
    if reads_freely(value) and value.numel() * terms.width <= MOST_COMPARED:
        from stree.kernels import growth_compiled  # imports numba

        return growth_compiled.choose(value, left, below, terms)
    return reference_growth.choose(value, left, below, terms)


def rate_by_rank(fit: RankFit, level: Level, memory: Memory, given: Siblings) -> Tensor:
    """Rate children known beforehand by log-odds of their rank; none is rated above the likeliest by the fit.

    Args:
        fit: the log-odds.
        level: how much surer each sequence's likeliest children are.
        memory: what each text holds.
        given: the children, none of them drawn.

    Returns:
        float[batch, above, ranks].
    """
    if _is_launched(given.probs):
        from stree.kernels import growth

        return growth.rate_by_rank(fit, level, memory, given)
    if reads_freely(given.probs):
        from stree.kernels import ratings_compiled  # imports numba

        return ratings_compiled.rate_by_rank(fit, level, memory, given)
    return reference_growth.rate_by_rank(fit, level, memory, given)


def rate_by_table(table: Table, given: Siblings) -> Ratings:
    """Rate drawn children by what was counted of tests like theirs.

    No slot's priority depends on the token drawn there, and a younger drawn sibling's is never the greater.

    Args:
        table: the counts.
        given: the children.
    """
    if _is_launched(given.probs):
        from stree.kernels import growth

        return growth.rate_by_table(table, given)
    if reads_freely(given.probs):
        from stree.kernels import ratings_compiled  # imports numba

        return ratings_compiled.rate_by_table(table, given)
    return reference_growth.rate_by_table(table, given)


def begin(pending: Tensor, leaf: Tensor, has_leaf: Tensor, room: int) -> Columns:
    """Lay out the columns of a tree that begins to grow; its specification is `GrownTree`, in torch.

    Args:
        pending: int64[batch], tokens of the roots.
        leaf: int64[batch], tokens before them, columns of their own where there is one.
        has_leaf: bool[batch].
        room: columns.

    Raises:
        RuntimeError: tensors are not on a CUDA device, and Triton does not interpret.
    """
    _check_launch("begin", pending)
    from stree.kernels import growth_columns

    return growth_columns.begin(pending, leaf, has_leaf, room)


def append(columns: Columns, chosen: Chosen, left: Tensor, layout: Layout) -> Appended:
    """Append the nodes of a layer, padding where a slot is not taken; its specification is `GrownTree.add`, in torch.

    Args:
        columns: of the tree; those from ``layout.size`` on are written.
        chosen: the slots.
        left: int64[batch], reduced by what is taken.
        layout: which columns they take.

    Raises:
        RuntimeError: tensors are neither on the CPU nor on a CUDA device.
    """
    if not is_launched(left):
        from stree.kernels import growth_compiled  # imports numba

        return growth_compiled.append(columns, chosen, left, layout)
    _check_launch("append", left)
    from stree.kernels import growth_columns

    return growth_columns.append(columns, chosen, left, layout)


def select(columns: Columns, size: int, count: int, *, by_value: bool) -> Tensor:
    """Choose the nodes that are proposed, the root first; its specification is `GrownTree.select`, in torch.

    Args:
        columns: of the tree.
        size: columns in use, one more than nodes; at most MAX_SLOTS + 1.
        count: how many; no more than nodes.
        by_value: whether those of the greatest value are, of equal ones the first; else all but padding, which comes
            last.

    Returns:
        int64[batch, count] nodes in their order.

    Raises:
        RuntimeError: tensors are not on a CUDA device, and Triton does not interpret.
    """
    _check_launch("select", columns.tokens)
    from stree.kernels import growth_columns

    return growth_columns.select(columns, size, count, by_value=by_value)


def cut(columns: Columns, kept: Tensor | None, size: int) -> Proposed:
    """Cut a tree out of its columns; its specification is `GrownTree.target_tree` with `prune`, in torch.

    Args:
        columns: of the tree.
        kept: int64[batch, n] nodes, each behind its parent; None for all.
        size: columns in use.

    Raises:
        RuntimeError: tensors are not on a CUDA device, and Triton does not interpret.
    """
    _check_launch("cut", columns.tokens)
    from stree.kernels import growth_columns

    return growth_columns.cut(columns, kept, size)


def _check_launch(op: str, tensor: Tensor) -> None:
    """Require what Triton runs on."""
    if not tensor.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(f"{op} needs CUDA tensors, got a tensor on {tensor.device}")


def _is_launched(tensor: Tensor) -> bool:
    """Tell whether a kernel computes with a tensor: on a GPU, but not in float64."""
    return is_launched(tensor) and tensor.dtype == torch.float32
