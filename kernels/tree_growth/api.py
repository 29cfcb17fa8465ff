"""Public operations of tree growth: what slots are worth, which are taken, and the columns that they become.

They take tensors only: no plan, no drafter, no model.  Where Triton is used (`stree.kernels.dispatch.uses_triton`) each
is one launch whose grid and build depend on sizes alone; in float64 and beyond MAX_SLOTS or MAX_NODES it is
`stree.kernels.tree_growth.reference`, the specification; on the CPU it is compiled with numba where `cpu` and
`cpu_ratings` have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stree.kernels.dispatch import backend_of, check_launch, module_of
from stree.kernels.step.texts import Seen
from stree.kernels.tiles import MAX_NODES
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
    "MAX_SLOTS", "append", "begin", "choose", "cut", "learn", "learn_level", "rate_by_rank",
    "rate_by_table", "remember", "select",
]  # fmt: skip

MOST_COMPARED = 1 << 20  # slots by width that one loop on the CPU goes through
MAX_SLOTS, MAX_WIDTH, MAX_BELOW = 1024, 128, 255  # of a layer, of those taken, and of the values below a node


def served_by(op: str, like: Tensor, triton: str, cpu: str | None = None, *, fits: bool = True) -> Callable[..., Any]:
    """Return the implementation of an operation for a tensor's device.

    Args:
        op: its name.
        like: one of its tensors.
        triton: file of the Triton version, beside this one.
        cpu: likewise of the version for the CPU, or None: there the reference runs.
        fits: whether the Triton version takes the operands; the reference runs on a device where it does not.
    """
    backend, file = backend_of(like), "reference"
    if backend == "triton" and fits:
        check_launch(op, like)
        file = triton
    elif backend == "cpu" and cpu is not None:
        file = cpu
    return getattr(module_of(f"stree.kernels.tree_growth.{file}"), op)  # type: ignore[no-any-return]


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
    cpu = "cpu" if value.numel() * terms.width <= MOST_COMPARED else None
    run = served_by("choose", value, "slots_kernel", cpu, fits=_fits_choice(value, below, terms))
    return run(value, left, below, terms)  # type: ignore[no-any-return]


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
    fits = given.probs.dtype == torch.float32
    run = served_by("rate_by_rank", given.probs, "slots_kernel", "cpu_ratings", fits=fits)
    return run(fit, level, memory, given)  # type: ignore[no-any-return]


def rate_by_table(table: Table, given: Children) -> Ratings:
    """Rate drawn children by what was counted of tests like theirs.

    No slot's priority depends on the token drawn there, and a younger drawn sibling's is never the greater.

    Args:
        table: the counts.
        given: the children.
    """
    fits = given.probs.dtype == torch.float32
    run = served_by("rate_by_table", given.probs, "slots_kernel", "cpu_ratings", fits=fits)
    return run(table, given)  # type: ignore[no-any-return]


def begin(seen: Seen, room: int) -> Columns:
    """Lay out the columns of a tree that begins to grow, with the last two tokens of every text.

    Args:
        seen: the texts; none is empty.
        room: columns.
    """
    return served_by("begin", seen.pending, "columns_kernel")(seen, room)  # type: ignore[no-any-return]


def append(columns: Columns, chosen: Chosen, left: Tensor, layout: Layout) -> Appended:
    """Append the nodes of a layer, padding where a slot is not taken.

    Args:
        columns: of the tree; those from ``layout.size`` on are written.
        chosen: the slots.
        left: int64[batch], reduced by what is taken.
        layout: which columns they take.
    """
    run = served_by("append", left, "columns_kernel", "cpu")
    return run(columns, chosen, left, layout)  # type: ignore[no-any-return]


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
    if not by_value and len(columns.tokens) == 1 and backend_of(columns.tokens) == "cpu":
        return None  # `append` leaves out columns that are padding in every row
    run = served_by("select", columns.tokens, "columns_kernel", fits=nodes <= MAX_SLOTS)
    return run(columns, size, min(nodes, most), by_value=by_value)  # type: ignore[no-any-return]


def cut(columns: Columns, kept: Tensor | None, size: int) -> Proposed:
    """Cut a tree for the target out of its columns.

    Args:
        columns: of the tree.
        kept: int64[batch, n] nodes, each behind its parent; None for all.
        size: columns in use.
    """
    return served_by("cut", columns.tokens, "columns_kernel")(columns, kept, size)  # type: ignore[no-any-return]


def learn(table: Table, kept: Sequence[Kept], verdicts: Verdicts) -> None:
    """Count every test of a tree by the probability that it is made: its ancestors accepted, its elder siblings not.

    Sums are formed in one order, so what a table holds does not depend on the run.

    Args:
        table: ``tests`` and ``passed`` are added to, at the cells of each node that is no padding.
        kept: what became nodes, layer by layer; they are numbered from 1.
        verdicts: on the tree that was verified.
    """
    fits = verdicts.ratios.dtype == torch.float32 and verdicts.parents.shape[1] <= MAX_NODES
    served_by("learn", verdicts.ratios, "learning_kernel", fits=fits)(table, kept, verdicts)


def learn_level(level: Level, values: Tensor, verdicts: Verdicts) -> None:
    """Learn the level of a text beside a fit, from the likeliest children of the nodes that were accepted.

    Each was accepted or not, with an expected probability.  The level takes a Newton step towards the maximum of the
    likelihood over the text so far, beside the weight that it began with.

    Args:
        level: changed in place.
        values: float[batch, n], of the tree's nodes, products of chances from the root on.
        verdicts: on it; ``numbers`` are not read.  Of siblings the likeliest is first.
    """
    fits = values.dtype == torch.float32 and values.shape[1] <= MAX_NODES
    served_by("learn_level", values, "learning_kernel", fits=fits)(level, values, verdicts)


def remember(memory: Memory, tokens: Tensor, path: Tensor | None, lengths: Tensor) -> None:
    """Add the pairs and triples of accepted tokens to the memory of each text.

    Args:
        memory: written to.
        tokens: int64[batch, n], of a tree, or of the texts themselves.
        path: int32[batch, m], nodes from the root down, whose tokens are read; None: all tokens, in their order.
        lengths: int32[batch], how many of them; 0 where a text does not go on.
    """
    run = served_by("remember", tokens, "learning_kernel", "cpu_ratings", fits=path is not None)
    run(memory, tokens, path, lengths)


def _fits_choice(value: Tensor, below: Tensor | None, terms: Terms) -> bool:
    """Whether Triton's choice takes these values: float32, and sizes that it has room for."""
    slots = value.shape[1]
    fits = slots <= MAX_SLOTS and min(terms.width, slots) <= MAX_WIDTH and (below is None or len(below) <= MAX_BELOW)
    return value.dtype == torch.float32 and fits
