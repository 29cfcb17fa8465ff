"""The state of a SpecBlock head: blocks of slots behind accepted tokens and below the nodes of a growing tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from stree.drafters.draft_state import CHUNK
from stree.drafters.head_state import HeadState
from stree.drafters.tree_builder import run_widths
from stree.growth import Plan
from stree.kernels.dispatch import fixes_shapes
from stree.models.heads.specblock import SpecBlockHead
from stree.models.layers.base import state_dtype
from stree.models.state import DecodeState
from stree.tree import TokenTree

__all__ = ["SlotState", "block_calls"]


def block_calls(widths: Sequence[int], num_slots: int, *, anywhere: bool) -> list[int]:
    """Return the most blocks of each call for a tree whose layers of these widths are run; the first runs the root's.

    Args:
        widths: of the layers.
        num_slots: of a block.
        anywhere: whether every layer may begin blocks, not only each ``num_slots``-th one.
    """
    first, *others = [width for layer, width in enumerate(widths, 1) if anywhere or layer % num_slots == 0] or [0]
    return [1 + first, *others]


class SlotState(HeadState):
    """A node of the tree is drawn from a slot; its own children are drawn from the next slot, or from a block below it.

    A block hangs below a node where its slot is the last one of a block, or where the rank head expects another token
    than the likeliest at the slot that it was drawn from, so that later slots of that block know too little.  Blocks of
    a layer are run in one draft call; a layer whose nodes all go on along their blocks takes none.  Where the host does
    not read the device, the rank head is not asked: blocks hang below every node of each ``num_slots``-th layer.

    Nodes are drawn from distributions that are stored, so trees are lossless whatever the rank head says.

    Args:
        head: runs blocks.
        prompts: of the first texts.

    Attributes:
        num_block_calls: draft calls for the blocks of the last tree.
    """

    head: SpecBlockHead

    def __init__(self, head: SpecBlockHead, prompts: Sequence[Sequence[int]]) -> None:
        super().__init__(head, prompts)
        batch, slots = len(prompts), head.num_slots
        logits = torch.zeros(batch, slots, head.vocab_size, dtype=state_dtype(head.dtype), device=head.device)
        self._root_logits, self._root_feedback = logits, self._queue.new_zeros(batch, slots, head.num_features)
        self._chunk = head.num_columns(CHUNK) // slots
        self._logits = logits[:, :0]  # of the columns of a growing tree
        self._most_columns = 0  # of the next tree
        self.num_block_calls = 0

    def select(self, rows: Tensor, prompts: list[Sequence[int]] | None = None) -> Self:
        """Copy the state of some sequences, int64[batch']."""
        other = super().select(rows, prompts)
        other._logits = other._root_logits[:, :0]
        return other

    def fitted(self, plan: Plan) -> Plan:
        """Return a plan whose trees the head can run; the next tree is of this plan."""
        plan = super().fitted(plan)
        calls = block_calls(run_widths(plan), self.head.num_slots, anywhere=not fixes_shapes(self._queue))
        self._most_columns = self.head.num_columns(sum(calls))
        return plan

    def reserve_nodes(self, nodes: int) -> None:
        """Make the state larger where the blocks of a tree need it."""
        super().reserve_nodes(self.head.num_columns(nodes))

    def num_calls(self, num_scored: int) -> int:
        """Count the calls for blocks; there are none for the layers that go on along them."""
        return self.num_block_calls

    def node_logits(self, tree: TokenTree, first: int) -> Tensor:
        """Look up the logits of the slots that the children of the nodes ``first``.. are drawn from."""
        if first == 0:
            self._begin_tree(tree)
        else:
            self._place_nodes(self.decode_state, tree, first)
        return self._logits.gather(1, self._place[:, first:, None].expand(-1, -1, self._logits.shape[2]))

    def _begin_tree(self, tree: TokenTree) -> None:
        """Begin with the block of the root, whose logits are known; it is run again with the first blocks below it."""
        batch, n = tree.tokens.shape
        if self._logits.shape[1] < self._most_columns:
            self._logits = self._logits.new_empty(batch, self._most_columns, self._logits.shape[2])
            self.version += 1
        self._logits[:, : self.head.num_slots] = self._root_logits
        self._outputs = self._root_feedback
        self._is_sure = self._expects_first(self._root_logits, self._outputs)  # bool[batch, columns]
        self._place = torch.zeros(batch, n, dtype=torch.long, device=tree.tokens.device)  # of the slot below each node
        self._root, self._num_layers, self.num_block_calls = tree.tokens[:, :1], 0, 0
        self._columns = TokenTree.unchecked(*self._blocks(self._root, self._place.new_full((batch, 1), -1), 0))

    def _place_nodes(self, state: DecodeState, tree: TokenTree, first: int) -> None:
        """Find the slot whose logits follow each new node; run blocks for the nodes that begin one."""
        slots = self.head.num_slots
        drawn_from = self._place.gather(1, tree.parents[:, first:].clamp(min=0).long())
        is_last = drawn_from % slots == slots - 1
        self._num_layers += 1
        if state.fixed_shapes:
            begins, count = is_last, is_last.shape[1] * (self._num_layers % slots == 0)
        else:
            begins = (is_last | ~self._is_sure.gather(1, drawn_from)) & (tree.parents[:, first:] >= 0)
            count = int(begins.sum(1).max())
        used = self._columns.tokens.shape[1]
        count = min(count, (self._most_columns - used) // slots)
        place = torch.where(is_last, drawn_from, drawn_from + 1)
        if count:
            chosen = begins.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :count]
            self._run_blocks(state, tree.tokens[:, first:].gather(1, chosen), drawn_from.gather(1, chosen))
            block = used + slots * torch.arange(count, device=place.device)
            place = place.scatter(1, chosen, torch.where(begins.gather(1, chosen), block, place.gather(1, chosen)))
        self._place = torch.cat([self._place, place], 1)

    def _run_blocks(self, state: DecodeState, tokens: Tensor, above: Tensor) -> None:
        """Run blocks of int64[batch, m] tokens below the slots int64[batch, m]."""
        used = self._columns.tokens.shape[1]
        features = self._outputs.take_along_dim(above[..., None], 1)
        begin = used
        if not self.num_block_calls:
            begin, features = 0, torch.cat([self._queue[:, :1], features], 1)
        more = self._blocks(tokens, above, used)
        parts = ((self._columns.tokens, more[0]), (self._columns.parents, more[1]))
        self._columns = TokenTree.unchecked(*(torch.cat(part, 1) for part in parts))
        logits, outputs = self.head.verify_features(state, self._columns, begin, features)
        logits, outputs = logits[:, used - begin :], outputs[:, used - begin :]
        self._logits[:, used : used + logits.shape[1]] = logits
        self._outputs = torch.cat([self._outputs, outputs], 1)
        self._is_sure = torch.cat([self._is_sure, self._expects_first(logits, outputs)], 1)
        self.num_block_calls += 1

    def _expects_first(self, logits: Tensor, outputs: Tensor) -> Tensor:
        """Return where the rank head expects the likeliest token; everywhere where shapes must not depend on it."""
        if self.decode_state.fixed_shapes:
            return torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
        return self.head.ranks(logits, outputs) == 0

    def _blocks(self, tokens: Tensor, above: Tensor, begin: int) -> tuple[Tensor, Tensor]:
        """Return tokens and parents, [batch, m * slots], of the columns ``begin``.. of m blocks below slots."""
        slots, count = self.head.num_slots, tokens.shape[1]
        before = torch.arange(begin - 1, begin - 1 + slots * count, device=tokens.device).view(1, count, slots)
        parents = before.repeat(len(tokens), 1, 1)
        parents[:, :, 0] = above
        return tokens.repeat_interleave(slots, 1), parents.flatten(1).to(torch.int32)

    def _run_piece(self, tokens: Tensor, features: Tensor, number: Tensor) -> None:
        """Run the blocks of the first ``number + 1``, int64[batch], of [batch, m] pairs; commit all but the root's."""
        (batch, width), slots = tokens.shape, self.head.num_slots
        self.reserve_nodes(width)
        place = torch.arange(width, device=tokens.device)
        is_pair = (place <= number[:, None]) | (place == 0)
        chain = torch.arange(-1, width * slots - 1, dtype=torch.int32, device=tokens.device)
        is_slot = is_pair.repeat_interleave(slots, 1)
        columns = TokenTree.unchecked(
            (tokens * is_pair).repeat_interleave(slots, 1), torch.where(is_slot, chain, -1).to(torch.int32)
        )
        places = place[:, None] + torch.arange(slots, device=place.device)
        logits, outputs = self.head.verify_features(
            self.decode_state, columns, 0, features, places.flatten().expand(batch, -1)
        )
        path = torch.arange(width * slots, dtype=torch.int32, device=place.device).expand(batch, -1)
        self.head.commit(self.decode_state, path, (slots * number.clamp(0, width)).to(torch.int32))
        is_root, root = ((number >= 0) & (number < width))[:, None, None], number.clamp(0, width - 1)
        rows = torch.arange(batch, device=place.device)
        for held, given in ((self._root_logits, logits), (self._root_feedback, outputs)):
            of_root = given.unflatten(1, (width, slots))[rows, root]
            held.copy_(torch.where(is_root, of_root.to(held.dtype), held))
