"""Public operations of tree growth: what slots are worth, which are taken, and the columns that they become.

They take tensors only: no plan, no drafter, no model.  Where Triton is used (`stree.kernels.dispatch.uses_triton`) each
is one launch whose grid and build depend on sizes alone; in float64 and beyond MAX_SLOTS or MAX_NODES it is
`stree.kernels.tree_growth.reference`, the specification; on the CPU it is compiled with numba where `cpu` and
`cpu_ratings` have it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stree.kernels.dispatch import backend_of, check_launch, uses_triton
from stree.kernels.step.texts import Seen
from stree.kernels.tiles import MAX_NODES
from stree.kernels.tree_growth import reference
from stree.kernels.tree_growth.operands import (
    Appended,
    Children,
    Chosen,
    Columns,
    Kept,
    Layout,
    Level,
    Memory,
    Proposed,
    RankFit,
    Ratings,
    Table,
    Terms,
    Verdicts,
)

__all__ = [
    "MAX_SLOTS", "append", "begin", "choose", "cut", "learn", "learn_level", "place", "rate_by_rank",
    "rate_by_table", "remember", "select",
]  # fmt: skip

MOST_COMPARED = 1 << 20  # slots by width that one loop on the CPU goes through
MAX_SLOTS, MAX_WIDTH, MAX_BELOW = 1024, 128, 255  # of a layer, of those taken, and of the values below a node


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
    backend = backend_of(value)
    if backend == "triton" and _fits_choice(value, below, terms):
        from stree.kernels.tree_growth import slots_kernel

        return slots_kernel.choose(value, left, below, terms)
    if backend == "cpu" and value.numel() * terms.width <= MOST_COMPARED:
        from stree.kernels.tree_growth import cpu  # imports numba

        return cpu.choose(value, left, below, terms)
    return reference.choose(value, left, below, terms)


def rate_by_rank(fit: RankFit, level: Level, memory: Memory, given: Children) -> Tensor:
    """Rate the most probable children, none of them drawn, by log-odds of their rank.

    None is rated above the likeliest by the fit.

    Args:
        fit: the log-odds.
        level: what is added to the log-odds of each sequence's likeliest children.
        memory: pairs and triples of tokens in each text.
        given: the children, none of them drawn.

    Returns:
        float[batch, above, ranks].
    """
    backend = backend_of(given.probs)
    if backend == "triton" and given.probs.dtype == torch.float32:
        from stree.kernels.tree_growth import slots_kernel

        return slots_kernel.rate_by_rank(fit, level, memory, given)
    if backend == "cpu":
        from stree.kernels.tree_growth import cpu_ratings  # imports numba

        return cpu_ratings.rate_by_rank(fit, level, memory, given)
    return reference.rate_by_rank(fit, level, memory, given)


def rate_by_table(table: Table, given: Children) -> Ratings:
    """Rate drawn children by what was counted of tests like theirs.

    No slot's priority depends on the token drawn there, and a younger drawn sibling's is never the greater.

    Args:
        table: the counts.
        given: the children.
    """
    backend = backend_of(given.probs)
    if backend == "triton" and given.probs.dtype == torch.float32:
        from stree.kernels.tree_growth import slots_kernel

        return slots_kernel.rate_by_table(table, given)
    if backend == "cpu":
        from stree.kernels.tree_growth import cpu_ratings  # imports numba

        return cpu_ratings.rate_by_table(table, given)
    return reference.rate_by_table(table, given)


def begin(seen: Seen, room: int) -> Columns:
    """Lay out the columns of a tree that begins to grow, with the last two tokens of every text.

    Args:
        seen: the texts; none is empty.
        room: columns.
    """
    if not uses_triton(seen.pending):
        return reference.begin(seen, room)
    check_launch("begin", seen.pending)
    from stree.kernels.tree_growth import columns_kernel

    return columns_kernel.begin(seen, room)


def append(columns: Columns, chosen: Chosen, left: Tensor, layout: Layout) -> Appended:
    """Append the nodes of a layer, padding where a slot is not taken.

    Args:
        columns: of the tree; those from ``layout.size`` on are written.
        chosen: the slots.
        left: int64[batch], reduced by what is taken.
        layout: which columns they take.
    """
    backend = backend_of(left)
    if backend == "reference":
        return reference.append(columns, chosen, left, layout)
    if backend == "cpu":
        from stree.kernels.tree_growth import cpu  # imports numba

        return cpu.append(columns, chosen, left, layout)
    check_launch("append", left)
    from stree.kernels.tree_growth import columns_kernel

    return columns_kernel.append(columns, chosen, left, layout)


def place(columns: Columns, size: int, column: Tensor, tokens: Tensor, values: Tensor, is_taken: Tensor) -> None:
    """Write nodes into the columns from ``size`` on, padding where they are not taken; in torch on every device.

    Args:
        columns: of the tree.
        size: columns in use.
        column: int64[batch, width], that each node is below.
        tokens: int64[batch, width].
        values: float[batch, width].
        is_taken: bool[batch, width].
    """
    reference.place(columns, size, column, tokens, values, is_taken)


def select(columns: Columns, size: int, most: int, *, by_value: bool) -> Tensor | None:
    """Choose the nodes that are proposed, the root first.

    Args:
        columns: of the tree.
        size: columns in use, one more than nodes.
        most: how many.
        by_value: whether those of the greatest value are, of equal ones the first; else all but padding, which comes
            last.

    Returns:
        int64[batch, count] nodes in their order; None where all are proposed.
    """
    nodes = size - 1
    if by_value and nodes <= most:
        return None
    backend = backend_of(columns.tokens)
    if backend == "triton" and nodes <= MAX_SLOTS:
        check_launch("select", columns.tokens)
        from stree.kernels.tree_growth import columns_kernel

        return columns_kernel.select(columns, size, min(nodes, most), by_value=by_value)
    if not by_value and backend == "cpu" and len(columns.tokens) == 1:
        return None  # `append` leaves out columns that are padding in every row
    return reference.select(columns, size, min(nodes, most), by_value=by_value)


def cut(columns: Columns, kept: Tensor | None, size: int) -> Proposed:
    """Cut a tree for the target out of its columns.

    Args:
        columns: of the tree.
        kept: int64[batch, n] nodes, each behind its parent; None for all.
        size: columns in use.
    """
    if not uses_triton(columns.tokens):
        return reference.cut(columns, kept, size)
    check_launch("cut", columns.tokens)
    from stree.kernels.tree_growth import columns_kernel

    return columns_kernel.cut(columns, kept, size)


def learn(table: Table, kept: Sequence[Kept], verdicts: Verdicts) -> None:
    """Count every test of a tree by the probability that it is made: its ancestors accepted, its elder siblings not.

    Sums are formed in one order, so what a table holds does not depend on the run.

    Args:
        table: ``tests`` and ``passed`` are added to, at the cells of each node that is no padding.
        kept: what became nodes, layer by layer; they are numbered from 1.
        verdicts: on the tree that was verified.
    """
    ratios = verdicts.ratios
    if uses_triton(ratios) and ratios.dtype == torch.float32 and verdicts.parents.shape[1] <= MAX_NODES:
        from stree.kernels.tree_growth import learning_kernel

        learning_kernel.learn(table, kept, verdicts)
    else:
        reference.learn(table, kept, verdicts)


def learn_level(level: Level, values: Tensor, verdicts: Verdicts) -> None:
    """Learn the level of a text beside a fit, from the likeliest children of the nodes that were accepted.

    Each was accepted or not, with an expected probability.  The level takes a Newton step towards the maximum of the
    likelihood over the text so far, beside the weight that it began with.

    Args:
        level: changed in place.
        values: float[batch, n], of the tree's nodes, products of chances from the root on.
        verdicts: on it; ``numbers`` are not read.  Of siblings the likeliest is first.
    """
    if uses_triton(values) and values.dtype == torch.float32 and values.shape[1] <= MAX_NODES:
        from stree.kernels.tree_growth import learning_kernel

        learning_kernel.learn_level(level, values, verdicts)
    else:
        reference.learn_level(level, values, verdicts)


def remember(memory: Memory, tokens: Tensor, path: Tensor | None, lengths: Tensor) -> None:
    """Add the pairs and triples of accepted tokens to the memory of each text.

    Args:
        memory: written to.
        tokens: int64[batch, n], of a tree, or of the texts themselves.
        path: int32[batch, m], nodes from the root down, whose tokens are read; None: all tokens, in their order.
        lengths: int32[batch], how many of them; 0 where a text does not go on.
    """
    backend = backend_of(tokens)
    if path is not None and backend == "triton":
        from stree.kernels.tree_growth import learning_kernel

        learning_kernel.remember(memory, tokens, path, lengths)
    elif backend == "cpu":
        from stree.kernels.tree_growth import cpu_ratings  # imports numba

        cpu_ratings.remember(memory, tokens, path, lengths)
    else:
        reference.remember(memory, tokens, path, lengths)


def _fits_choice(value: Tensor, below: Tensor | None, terms: Terms) -> bool:
    """Whether Triton's choice takes these values: float32, and sizes that it has room for."""
    slots = value.shape[1]
    fits = slots <= MAX_SLOTS and min(terms.width, slots) <= MAX_WIDTH and (below is None or len(below) <= MAX_BELOW)
    return value.dtype == torch.float32 and fits
