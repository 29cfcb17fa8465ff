"""The draft tree while it grows: columns are appended layer by layer, and each is run once.

Every growth is built by this class.  Column, root offset, node and slot are defined in ``stree.growth.plan``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stree.drafters.candidates import Candidates
from stree.growth import Layer, Plan
from stree.kernels.dispatch import host_can_read, uses_triton
from stree.kernels.tiles import MAX_NODES
from stree.kernels.tree_growth.api import MAX_SLOTS, append, begin, cut, select
from stree.kernels.tree_growth.operands import Chosen, Columns, Layout, Proposed, Words
from stree.models.tree_lm import TreeLM
from stree.tree import TokenTree

__all__ = ["FIRST_DRAFTED", "GrownTree", "columns_run", "narrowed", "num_columns", "num_run"]

FIRST_DRAFTED = 2  # column of the first drafted node


def num_columns(plan: Plan) -> int:
    """Count the columns of a draft model's tree: those before the drafted nodes, and every node that may grow."""
    leaves = min(plan.num_nodes, sum(layer.leaves for layer in plan.layers))
    return FIRST_DRAFTED + leaves + (plan.num_nodes if plan.is_heap else sum(layer.width for layer in plan.layers))


def num_run(plan: Plan) -> int:
    """Count the nodes of a plan that are run, the root among them: all but those of the last layer."""
    return max(plan.num_nodes, 1) if plan.is_heap else 1 + sum(layer.width for layer in plan.layers[:-1])


def columns_run(plan: Plan) -> int:
    """Count the columns of a draft model's tree that are run: the nodes, and the last accepted one before them."""
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
        pending: int64[batch], root tokens.
        leaf: int64[batch], last accepted leaves.
        has_leaf: bool[batch], whether the draft model still has to run that leaf.
        left: int64[batch], nodes that the budget allows.
        plan: of the tree.

    Attributes:
        root_offset: int64[batch], column of the root.
        frontier_value: float[batch, above], values of the frontier's nodes.
        left: int64[batch], nodes that the budget still allows.
        frontier_number: number of the frontier's first node in random draws; it does not depend on the batch.
        size: columns in use.
        num_run: columns that were run.
        num_calls: draft calls made.
        num_layers: layers added.
    """

    def __init__(self, pending: Tensor, leaf: Tensor, has_leaf: Tensor, left: Tensor, plan: Plan) -> None:
        lay_out = begin if uses_triton(pending) and not host_can_read(pending) else _begin
        self._columns = columns = lay_out(pending, leaf, has_leaf, num_columns(plan))
        self.root_offset, self.left, self._mask = columns.lead, left, columns.mask
        self._tokens, self._parents, self._depths = columns.tokens, columns.parents, columns.depths
        self._value = columns.values  # of the target's nodes
        self.frontier_value = self._value[:, :1]
        self.frontier_number = self.num_run = self.num_calls = self.num_layers = 0
        self.size = 2
        self._begin, self._width = 0, 1  # of the frontier: its first node, and its width in the plan
        self._plan = plan
        self._leaves: list[tuple[Tensor, Tensor, Tensor]] = []  # columns of parents, tokens, values

    def run(self, lm: TreeLM, state: Any) -> Tensor:
        """Run the columns that were not yet run; return the logits of the frontier, float[batch, above, vocab]."""
        size = self.size
        depths, mask = self._depths[:, :size], self._mask[:, :size, :size]
        tree = TokenTree.unchecked(self.tokens, self.parents, depths, mask)
        logits = lm.verify(state, tree, first=self.num_run)
        if not self.num_run:
            logits = logits.gather(1, self.root_offset.view(-1, 1, 1).expand(-1, 1, logits.shape[-1]))
        self.num_run = size
        self.num_calls += 1
        return logits

    @property
    def tokens(self) -> Tensor:
        """Tokens of the columns in use: int64[batch, size]."""
        return self._tokens[:, : self.size]

    @property
    def parents(self) -> Tensor:
        """Parents of the columns in use: int32[batch, size]."""
        return self._parents[:, : self.size]

    def context(self, children: Tensor) -> Words:
        """Return int64[batch, above, ranks] children of the frontier with the tokens above them."""
        root_offset = None if self._begin else self.root_offset
        return Words(children, self._tokens, self._parents, self._begin + 1, root_offset)

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
        if width and (host_can_read(slots) or uses_triton(slots)):
            width = self._launch(layer, Chosen(slots, is_taken, value, candidates.tokens), width)
        elif width:
            chosen = value.flatten(1).gather(1, slots) * is_taken
            is_taken = self._are_worthwhile(chosen, is_taken)
            self._append(layer, slots, is_taken, candidates, chosen * is_taken, width)
        if not width:
            return False
        self._begin = before
        self.frontier_number += self._width
        self._width = layer.width
        self.num_layers += 1
        return True

    def _append(
        self, layer: Layer, slots: Tensor, is_taken: Tensor, candidates: Candidates, chosen: Tensor, width: int
    ) -> None:
        """Append the first ``width`` slots, whose nodes have float[batch, width + leaves] values, as a layer."""
        parent = slots // layer.ranks
        column = parent + (self._begin + 1) if self._begin else self.root_offset[:, None].expand_as(slots)
        token = candidates.tokens.flatten(1).gather(1, slots)
        if layer.leaves:
            self._leaves.append((column[:, layer.width :], token[:, layer.width :], chosen[:, layer.width :]))
        self.add_below(column[:, :width], token[:, :width], chosen[:, :width], is_taken[:, :width])
        self.frontier_value = chosen[:, :width]
        self.left = self.left - is_taken.sum(1)

    def _launch(self, layer: Layer, chosen: Chosen, width: int) -> int:
        """Append a layer by one kernel; return its width."""
        layout = Layout(
            width,
            frontier=self._begin + 1 if self._begin else 0,
            size=self.size,
            num_nodes=self._plan.num_nodes if self._is_contested(chosen.slots) else None,
            is_cut=layer.slots is None,
        )
        appended = append(self._columns, chosen, self.left, layout)
        if not appended.width:
            return 0
        if layer.leaves and appended.column is not None and appended.tokens is not None:
            leaves = (appended.column, appended.tokens, appended.values)
            column, token, value = (part[:, layer.width :] for part in leaves)
            self._leaves.append((column, token, value))
        self.frontier_value = appended.values[:, : appended.width]
        self.size += appended.width
        return appended.width

    def _is_contested(self, slots: Tensor) -> bool:
        """Return whether a pruned tree with these slots has more nodes than can be proposed."""
        return self._plan.is_pruned and self.size - 1 + slots.shape[1] > self._plan.num_nodes

    def _are_worthwhile(self, chosen: Tensor, is_taken: Tensor) -> Tensor:
        """Return which nodes of a layer can still be proposed: bool[batch, width + leaves].

        A pruned tree keeps its best nodes and values never grow along a path, so a node that is not among the best so
        far has no descendant among the best of the finished tree.
        """
        if not self._is_contested(chosen):
            return is_taken
        values = torch.cat([self._value[:, : self.size - 1], chosen], 1)
        least = values.topk(self._plan.num_nodes + 1).values[:, -1:]
        return is_taken & (chosen >= least)

    def stop(self, goes_on: Tensor) -> bool:
        """Stop growth below the frontier where bool[batch] is False; return whether any sequence may continue."""
        self.frontier_value = self.frontier_value * goes_on[:, None]
        return not host_can_read(goes_on) or bool(goes_on.any())

    def add_leaves(self) -> None:
        """Append the best of all leaves; they are not run."""
        if not self._leaves:
            return
        column, token, value = (torch.cat(parts, 1) for parts in zip(*self._leaves, strict=True))
        kept = value.sort(dim=1, descending=True, stable=True).indices[:, : self._plan.num_nodes]
        if host_can_read(value):
            kept = kept[:, : int((value > 0).sum(1).max())]
        value = value.gather(1, kept)
        self.add_below(column.gather(1, kept), token.gather(1, kept), value, value > 0)

    def add_below(self, column: Tensor, token: Tensor, value: Tensor, is_taken: Tensor) -> None:
        """Append nodes with the given tokens and values below int64[batch, width] columns; padding where not taken."""
        begin = self.size
        self._value[:, begin - 1 : begin - 1 + column.shape[1]] = value
        end = self.size = begin + column.shape[1]
        above = self._mask[:, :begin, :begin]
        self._mask[:, begin:end, :begin] = above.take_along_dim(column[..., None], 1) & is_taken[..., None]
        self._depths[:, begin:end] = (self._depths.gather(1, column) + 1) * is_taken
        self._tokens[:, begin:end] = token * is_taken
        self._parents[:, begin:end] = torch.where(is_taken, column, -1)

    def select(self, plan: Plan) -> Tensor | None:
        """Choose the nodes of the target's tree that are proposed: int64[batch, count], or None for all.

        Values never grow along a path and the sort is stable, so a kept node's parent is kept.  Every drawn node is
        proposed: of a sampled tree only padding is dropped.
        """
        n = self.size - 1
        if not self._is_selected(plan):
            return None
        if uses_triton(self._tokens) and not host_can_read(self._tokens) and n <= MAX_SLOTS:
            return select(self._columns, self.size, min(n, plan.num_nodes + 1), by_value=plan.is_pruned)
        if plan.is_pruned:
            # Equal values keep their order, so a parent comes before its children.
            order = self._value[:, :n].sort(dim=1, descending=True, stable=True).indices
            return order[:, : plan.num_nodes + 1].sort(1).values
        is_padding = self._parents[:, 1 : self.size] < 0
        is_padding[:, 0] = False
        return is_padding.to(torch.int8).sort(dim=1, stable=True).indices[:, : plan.num_nodes + 1]

    def _is_selected(self, plan: Plan) -> bool:
        """Return whether ``select`` has to drop nodes or padding."""
        if plan.is_pruned:
            return self.size - 1 > plan.num_nodes + 1
        # Where the host may read tensors, a single row has no padding.
        return not (plan.is_heap or plan.is_fixed or (host_can_read(self._tokens) and len(self._tokens) == 1))

    def proposed(self, selected: Tensor | None) -> Proposed:
        """Return the tree of int64[batch, count] nodes, or of all, for the target."""
        if uses_triton(self._tokens) and not host_can_read(self._tokens):
            return cut(self._columns, selected, self.size)
        tree = self.target_tree()
        rows, values = tree.parents, self._value[:, : self.size - 1]
        if selected is not None:
            rows, values = (tensor.gather(1, selected) for tensor in (rows, values))
            tree = tree.prune(selected)
        return Proposed(tree.tokens, tree.parents, tree.depths, tree.ancestor_mask, values, rows)

    def target_tree(self) -> TokenTree:
        """Return the tree for the target: the columns without the one before the root or the padding behind it."""
        offset, size = self.root_offset[:, None], self.size
        tokens = self._tokens[:, 1:size].clone()
        tokens[:, :1] = self._tokens.gather(1, offset)
        is_node = self._parents[:, 2:size] >= 0
        parents = self._parents[:, 1:size].clone()
        parents[:, 0] = -1
        parents[:, 1:] = torch.where(is_node, (parents[:, 1:] - 1).clamp_(min=0), -1)
        depths = self._depths[:, 1:size].clone()
        depths[:, 0] = 0
        depths[:, 1:] -= offset * is_node
        mask = self._mask[:, 1:size, 1:size].clone()
        mask[:, 1:, 0] = is_node
        return TokenTree.unchecked(tokens, parents, depths, mask)


def _begin(pending: Tensor, leaf: Tensor, has_leaf: Tensor, room: int) -> Columns:
    """Allocate the columns as ``begin`` does, in torch."""
    batch, device, root_offset = len(pending), pending.device, has_leaf.long()
    tokens = pending.new_zeros(batch, room)
    tokens[:, 0] = torch.where(has_leaf, leaf, pending)
    tokens[:, 1] = pending * root_offset
    parents = torch.full((batch, room), -1, dtype=torch.int32, device=device)
    parents[:, 1] += root_offset
    depths = torch.zeros(batch, room, dtype=torch.int32, device=device)
    depths[:, 1] = root_offset
    mask = torch.eye(room, dtype=torch.bool, device=device).repeat(batch, 1, 1)
    mask[:, 1, 0] = has_leaf
    values = torch.ones(batch, room - 1, dtype=torch.float32, device=device)
    return Columns(root_offset, tokens, parents, depths, mask, values)
