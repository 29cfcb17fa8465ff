"""The state of a one-shot draft head: keys and values of its context, which are projections of the target's states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self, cast

import torch
from torch import Tensor

from stree.drafters.base import Draft
from stree.drafters.catch_up import CatchUpTokens
from stree.drafters.draft_state import DraftState
from stree.growth import Plan
from stree.kernels.dispatch import host_bound
from stree.models.heads.dflash import OneShotHead
from stree.models.heads.dflash_head import BlockCache, BlockSlots
from stree.models.state import DecodeState
from stree.models.tree_lm import TreeLM
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["BlockState", "within_block"]


class BlockState(DraftState):
    """One forward of the head serves a whole tree: the nodes of a depth share the distribution of their position.

    What the target has computed at accepted tokens is projected and appended to the context after every step; what a
    block leaves is dropped.  The first layer of a tree runs the block, later ones only look up what it gave.

    A node is drawn from the distribution that is stored for it: that of its position, whatever its ancestors are, or,
    with DSpark's bias or DFlash2's selector, that of its position after its parent's token.  Distributions that ignore
    ancestors are worse drafts, never wrong ones, so every verifier and growth is lossless as with a draft model.

    Args:
        head: projects the context and runs blocks.
        prompts: of the first texts.
    """

    _slots: BlockSlots  # of the tree that grows

    def __init__(self, head: OneShotHead, prompts: Sequence[Sequence[int]]) -> None:
        self.head = head
        super().__init__(cast(TreeLM, head), prompts)
        empty = torch.zeros(len(prompts), 0, head.num_features, dtype=head.dtype, device=head.device)
        self._behind = CatchUpTokens(empty)
        self._cache: BlockCache | None = None

    @property
    def decode_state(self) -> DecodeState:
        """The context, once ``begin`` was called; it has lengths as a decode state has."""
        assert self._cache is not None, "a tree begins the run"
        return cast(DecodeState, self._cache)

    def read_prompts(self, rows: Sequence[int], hidden: Tensor) -> None:
        """Take the target's hidden states of prompts, float[len(rows), longest, layers, hidden]; appended later."""
        features = self.head.project(hidden.to(self.leaf.device))
        index = torch.tensor(rows, device=self.leaf.device)
        entries = features.new_zeros(len(self.prompts), *features.shape[1:])
        entries[index] = features
        lengths = torch.tensor([len(self.prompts[row]) for row in rows], device=self.leaf.device)
        count = torch.zeros_like(self.leaf).index_copy(0, index, lengths)
        self._behind.put([entries], count, self._max_length)

    def begin(self) -> None:
        """Allocate the context, unless there is one; ``catch_up`` fills it."""
        self._reserve(self._max_length or 2 * max(map(len, self.prompts)) + 1024)

    def restart(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin as many other texts; ``read_prompts`` follows."""
        self.prompts = list(prompts)
        self._behind.clear()
        if self._cache is not None:
            self._cache.lengths.zero_()

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        """Begin another text in a row; ``read_prompts`` follows."""
        self.prompts[row] = prompt
        self._behind.forget(row)
        if self._cache is not None:
            self._cache.lengths[row] = 0

    def select(self, rows: Tensor) -> Self:
        """Copy the contexts of some sequences, int64[batch']."""
        other = super().select(rows)
        other._cache = None if self._cache is None else self._cache.select(rows)
        return other

    def reserve_nodes(self, nodes: int) -> None:
        """Do nothing: a context has room for a block, and nodes take none."""

    def follow(self, draft: Draft, acceptance: Acceptance) -> None:
        """Append the features of accepted tokens, from ``acceptance.hidden``, or queue them if none was drafted.

        Raises:
            ValueError: the caller has recorded no hidden states.
        """
        if acceptance.hidden is None:
            raise ValueError(f"a draft head needs the target's hidden states of layers {self.head.hidden_layers}")
        features = self.head.project(acceptance.hidden.to(self.leaf.device))
        if draft.grown is not None:
            self._append(features, acceptance.path_lengths)
        else:
            self._behind.put([features], acceptance.path_lengths.long(), self._max_length)

    def catch_up(self, pending: Tensor) -> int:
        """Append what is queued; projections are no draft call."""
        if self._behind.most:
            (features,), number = self._behind.all()
            most = host_bound(number, self._behind.most, waits=self.is_extended)
            if most:
                self._append(features[:, :most], number)
            self._behind.clear()
        return 0

    def verify(self, state: DecodeState, tree: TokenTree, first: int = 0) -> Tensor:
        """Return the logits of what follows the columns of a growing tree, as ``TreeLM.verify``; the first runs."""
        if first == 0:
            self._slots = self.head.slots(cast(BlockCache, state), tree.tokens[:, 0])
        return self.head.node_logits(self._slots, tree.depths[:, first:], tree.tokens[:, first:])

    def _append(self, features: Tensor, count: Tensor) -> None:
        """Append the first int[batch] of float[batch, n, num_features] features to the context."""
        if self._max_length is None:
            self._reserve(int(cast(BlockCache, self._cache).lengths.max()) + features.shape[1])
        self.head.append(cast(BlockCache, self._cache), features, count)

    def _reserve(self, length: int) -> None:
        """Allocate room for contexts of this length."""
        if self._cache is not None and length <= self._cache.max_length:
            return
        larger = BlockCache(self.head, len(self.prompts), length if self._max_length else 2 * length)
        if self._cache is not None:
            larger.copy_from(self._cache)
        self._cache = larger
        self.version += 1


def within_block(plan: Plan, depth: int) -> Plan:
    """Leave out the layers of a plan below ``depth``, which a block does not reach."""
    layers = plan.layers[:depth]
    most = plan.num_nodes if plan.is_heap else sum(layer.width + layer.leaves for layer in layers)
    return replace(plan, layers=layers, num_nodes=min(plan.num_nodes, most), max_depth=depth)
