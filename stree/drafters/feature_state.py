"""The part of a draft head's state that all heads share: a queue of features that the head has not read yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, cast

import torch
from torch import Tensor

from stree.drafters.base import Draft
from stree.drafters.draft_state import DraftState
from stree.models.heads.causal import CausalHead
from stree.models.heads.dflash import OneShotHead
from stree.models.prefix_cache import RequestPrefixes
from stree.models.tree_lm import TreeLM
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["FeatureState"]


class FeatureState(DraftState):
    """The state of a head, and the features of tokens that follow it, until the next tree is drafted.

    Args:
        head: projects hidden states of the target to features.
        prompts: of the first texts; ``read_prompts`` follows.
    """

    def __init__(self, head: CausalHead | OneShotHead, prompts: Sequence[Sequence[int]]) -> None:
        super().__init__(cast(TreeLM, head), prompts)
        self.head = head
        # [batch, capacity + 1, num_features], whose last place takes writes that are to be ignored, and each length.
        self._queue = torch.zeros(len(prompts), 2, head.num_features, dtype=head.dtype, device=head.device)
        self._number = torch.zeros(len(prompts), dtype=torch.long, device=head.device)

    def read_prompts(self, rows: Sequence[int], hidden: Tensor) -> None:
        """Take the target's hidden states of prompts, float[len(rows), longest, layers, hidden]."""
        device, batch = self._queue.device, len(self.prompts)
        index = torch.tensor(rows, device=device)
        lengths = torch.tensor([len(self.prompts[row]) for row in rows], device=device)
        features = self.head.project(hidden.to(self._queue))
        every = features.new_zeros(batch, *features.shape[1:]).index_copy_(0, index, features)
        self.most_behind += every.shape[1]
        self._put(every, torch.zeros_like(self._number).index_copy_(0, index, lengths))

    def score(self, tree: TokenTree, first: int) -> Tensor:
        """As a draft model, without the first column's token, which was read with the target's features."""
        below = TokenTree.unchecked(
            tree.tokens[:, 1:], (tree.parents[:, 1:] - 1).clamp_(min=-1), (tree.depths[:, 1:] - 1).clamp_(min=0),
            tree.ancestor_mask[:, 1:, 1:],
        )  # fmt: skip
        return self.node_logits(below, max(first - 1, 0))

    def node_logits(self, tree: TokenTree, first: int) -> Tensor:
        """Return the logits of what follows the nodes ``first``.. of a growing tree; 0 begins another tree."""
        raise NotImplementedError

    def begin(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], prefixes: RequestPrefixes | None = None
    ) -> None:
        """Begin other texts in some rows, or all; ``read_prompts`` follows."""
        self._empty(rows, prompts)
        self._number[list(rows)] = 0

    def select(self, rows: Tensor, prompts: list[Sequence[int]] | None = None) -> Self:
        """Copy the state of some sequences, int64[batch']."""
        other = super().select(rows, prompts)
        other._queue, other._number = self._queue[rows], self._number[rows]
        return other

    def reserve_length(self, max_length: int) -> None:
        """Bound the length of all texts to come."""
        super().reserve_length(max_length)
        if max_length >= self._queue.shape[1]:
            self._lengthen(max_length)

    def _features(self, draft: Draft, acceptance: Acceptance) -> Tensor:
        """Return the features of a path's nodes, float[batch, m, num_features]."""
        if acceptance.hidden is None:
            raise ValueError(f"a draft head needs the target's hidden states of layers {self.head.hidden_layers}")
        self._is_united = draft.is_united
        self.most_behind += acceptance.path.shape[1] * draft.is_united
        return self.head.project(acceptance.hidden.to(self._queue))

    def _put(self, features: Tensor, count: Tensor) -> None:
        """Append the first int64[batch] of float[batch, m, num_features] to the queues."""
        width = features.shape[1]
        if self._max_length is None and self.most_behind + 1 >= self._queue.shape[1]:
            self._lengthen(2 * self.most_behind)
        end = self._queue.shape[1] - 1
        place = torch.arange(width, device=count.device)
        index = torch.where(place < count[:, None], self._number[:, None] + place, end).clamp_(max=end)
        self._queue.scatter_(1, index[..., None].expand_as(features), features)
        self._number += count

    def _lengthen(self, length: int) -> None:
        """Make room for ``length`` features of every text."""
        longer = self._queue.new_zeros(len(self._queue), length + 1, self._queue.shape[2])
        longer[:, : self._queue.shape[1] - 1] = self._queue[:, :-1]
        self._queue = longer
        self.version += 1
