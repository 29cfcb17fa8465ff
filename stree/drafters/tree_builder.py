"""The draft tree while it grows: columns are appended layer by layer, and each is run once.

Every growth is built by this class.  Column, node and slot are defined in ``stree.growth.plan``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from stree.drafters.candidates import Candidates
from stree.growth import Layer, Plan
from stree.kernels.dispatch import may_have_any, most_true
from stree.kernels.step.texts import Seen
from stree.kernels.tiles import MAX_NODES
from stree.kernels.tree_growth.api import append, begin, cut, select
from stree.kernels.tree_growth.operands import Chosen, Layout, Proposed, Words
from stree.kernels.tree_growth.reference import place
from stree.tree import TokenTree

__all__ = ["FIRST_DRAFTED", "GrownTree", "columns_run", "narrowed", "num_columns", "num_run", "run_widths"]

FIRST_DRAFTED = 2  # column of the first drafted node, behind the last token of the text and the pending one


def num_columns(plan: Plan) -> int:
    """Count the columns of a draft model's tree: those before the drafted nodes, and every node that may grow."""
    leaves = min(plan.num_nodes, sum(layer.leaves for layer in plan.layers))
    return FIRST_DRAFTED + leaves + (plan.num_nodes if plan.is_heap else sum(layer.width for layer in plan.layers))


def num_run(plan: Plan) -> int:
    """Count the nodes of a plan that are run, the root among them: all but those of the last layer."""
    return max(plan.num_nodes, 1) if plan.is_heap else 1 + sum(run_widths(plan))


def run_widths(plan: Plan) -> list[int]:
    """Return how many nodes each draft call of a plan runs behind the first one, which runs the root."""
    return [1] * (plan.num_nodes - 1) if plan.is_heap else [layer.width for layer in plan.layers[:-1]]


def columns_run(plan: Plan) -> int:
    """Count the columns of a draft model's tree that are run: the nodes, and the token before them."""
    return num_run(plan) + FIRST_DRAFTED - 1


def narrowed(plan: Plan) -> Plan:
    """Make the widest layers of a plan narrower, so that all nodes that a draft model runs fit its kernels.

    Every layer has columns for its full width, although a tree never fills all of them together.  Plans with fixed
    slots are returned unchanged.
    """
    widths = [layer.width for layer in plan.layers]
    room = MAX_NODES - FIRST_DRAFTED + 1  # the root counts as one of the nodes that are run
    if num_run(plan) <= room or plan.num_nodes > room or plan.is_fixed or plan.is_heap:
        return plan
    most = max(widths)
    while most > 1 and 1 + sum(min(width, most) for width in widths[:-1]) > room:
        most -= 1
    layers = [layer if layer.width <= most else replace(layer, width=most) for layer in plan.layers]
    return replace(plan, layers=tuple(layers))


class GrownTree:
    """A draft model's tree while it grows: columns are appended, and the new ones run.

    Its arrays, the ancestor mask among them, are allocated once for the plan's largest tree; a draft call sees a slice
    of them, and a new layer writes its own rows (sliced topology-aware mask: improved MCSD, arXiv 2409.10644).  The
    frontier is the layer that was grown last.

    Args:
        seen: the texts, whose pending tokens are the roots.
        left: int64[batch], nodes that the budget allows.
        plan: of the tree.

    Attributes:
        frontier_value: float[batch, above], values of the frontier's nodes.
        left: int64[batch], nodes that the budget still allows.
        frontier_number: number of the frontier's first node in random draws; it does not depend on the batch.
        size: columns in use.
        num_run: columns that were run.
        scored: these columns.
        num_calls: draft calls made.
        num_layers: layers added.
        root_logits: float[batch, vocab], of the draft model after the root.
    """

    scored: TokenTree
    root_logits: Tensor

    def __init__(self, seen: Seen, left: Tensor, plan: Plan) -> None:
        self._columns, self.left = begin(seen, num_columns(plan)), left
        self.frontier_value = self._columns.values[:, :1]  # of the target's nodes
        self.frontier_number = self.num_run = self.num_calls = self.num_layers = 0
        self.size = 2
        self._begin, self._width = 0, 1  # of the frontier: its first node, and its width in the plan
        self._plan = plan
        self._leaves: list[tuple[Tensor, Tensor, Tensor]] = []  # columns of parents, tokens, values

    def run(self, score: Callable[[TokenTree, int], Tensor]) -> Tensor:
        """Run the columns that were not yet run; return the logits of the frontier, float[batch, above, vocab].

        Args:
            score: runs a tree's columns from one on; gives the logits of as many of them, but for the first column.
        """
        size, columns = self.size, self._columns
        tokens, parents, depths = (part[:, :size] for part in (columns.tokens, columns.parents, columns.depths))
        self.scored = TokenTree.unchecked(tokens, parents, depths, columns.mask[:, :size, :size])
        logits = score(self.scored, self.num_run)
        if not self.num_run:
            self.root_logits = logits[:, 0]
        self.num_run = size
        self.num_calls += 1
        return logits

    def context(self, children: Tensor) -> Words:
        """Return int64[batch, above, ranks] children of the frontier with the tokens above them."""
        return Words(children, self._columns.tokens, self._columns.parents, self._begin + 1)

    def add(self, layer: Layer, slots: Tensor, is_taken: Tensor, candidates: Candidates, value: Tensor) -> bool:
        """Append a layer below the frontier; its leaves are appended by ``add_leaves``.

        Args:
            layer: the plan's layer.
            slots: int64[batch, width + leaves], slots of the frontier.
            is_taken: bool[batch, width + leaves]; if slots are chosen by value, those taken come first.
            candidates: children of the frontier's nodes.
            value: float[batch, above, ranks], values of the children.

        Returns:
            Whether there is a layer to go on from.
        """
        before, width = self.size - 1, min(layer.width, slots.shape[1])
        if not width:
            return False
        is_contested = self._plan.is_pruned and before + slots.shape[1] > self._plan.num_nodes
        layout = Layout(
            width, frontier=self._begin + 1, size=self.size, num_nodes=self._plan.num_nodes if is_contested else None,
            is_cut=layer.slots is None,
        )  # fmt: skip
        appended = append(self._columns, Chosen(slots, is_taken, value, candidates.tokens), self.left, layout)
        if not appended.width:
            return False
        if layer.leaves and appended.column is not None and appended.tokens is not None:
            leaves = (appended.column, appended.tokens, appended.values)
            column, token, value = (part[:, layer.width :] for part in leaves)
            self._leaves.append((column, token, value))
        self.frontier_value = appended.values[:, : appended.width]
        self.size += appended.width
        self._begin = before
        self.frontier_number += self._width
        self._width = layer.width
        self.num_layers += 1
        return True

    def stop(self, goes_on: Tensor) -> bool:
        """Stop growth below the frontier where bool[batch] is False; return whether any sequence may continue."""
        self.frontier_value = self.frontier_value * goes_on[:, None]
        return may_have_any(goes_on)

    def add_leaves(self) -> None:
        """Append the best of all leaves; they are not run."""
        if not self._leaves:
            return
        column, token, value = (torch.cat(parts, 1) for parts in zip(*self._leaves, strict=True))
        kept = value.sort(dim=1, descending=True, stable=True).indices[:, : self._plan.num_nodes]
        value = value.gather(1, kept)
        is_taken = value > 0
        width = most_true(is_taken)
        kept, value, is_taken = kept[:, :width], value[:, :width], is_taken[:, :width]
        self.add_below(column.gather(1, kept), token.gather(1, kept), value, is_taken)

    def add_below(self, column: Tensor, token: Tensor, value: Tensor, is_taken: Tensor) -> None:
        """Append nodes with the given tokens and values below int64[batch, width] columns; padding where not taken."""
        place(self._columns, self.size, column, token, value, is_taken)
        self.size += column.shape[1]

    def select(self, plan: Plan) -> Tensor | None:
        """Choose the nodes of the target's tree that are proposed: int64[batch, count], or None for all.

        Every drawn node is proposed: of a sampled tree only padding is dropped.
        """
        if not plan.is_pruned and (plan.is_heap or plan.is_fixed):
            return None
        return select(self._columns, self.size, plan.num_nodes + 1, by_value=plan.is_pruned)

    def proposed(self, selected: Tensor | None) -> Proposed:
        """Return the tree of int64[batch, count] nodes, or of all, for the target."""
        return cut(self._columns, selected, self.size)
