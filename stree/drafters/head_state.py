"""The state of a causal draft head: keys and values of accepted tokens, run with the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.drafters.base import Draft
from stree.drafters.draft_state import CHUNK
from stree.drafters.feature_state import FeatureState
from stree.kernels.dispatch import fixes_shapes, host_bound
from stree.kernels.step.texts import Seen
from stree.models.heads.causal import CausalHead
from stree.models.layers.base import state_dtype
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["HeadState"]


class HeadState(FeatureState):
    """Accepted tokens are run with the target's features, the nodes of a growing tree with their parents' feedback.

    What a tree leaves in the head's cache is dropped: after a step, the accepted tokens are run again with the features
    that the target has computed meanwhile.  The same call runs the root of the next tree, so that its logits are known
    before the tree grows.  A tree of depth d takes d calls, as with a draft model.

    The head runs pairs of a token and the feature before it.  The first feature in a queue is that before the first
    token that was not committed; once the root was run, it is that before the root, and the only one.

    Args:
        head: runs tokens and features.
        prompts: of the first texts.
    """

    head: CausalHead

    def __init__(self, head: CausalHead, prompts: Sequence[Sequence[int]]) -> None:
        super().__init__(head, prompts)
        batch, width = len(prompts), head.num_features
        self._root_feedback = self._queue.new_zeros(batch, width)
        self._root_logits = torch.zeros(batch, head.vocab_size, dtype=state_dtype(head.dtype), device=head.device)
        self._feedback = self._queue.new_zeros(batch, 0, width)  # of the columns of a growing tree
        self._num_run = 0  # columns of the tree
        self._chunk = CHUNK  # most pairs that are run at once

    def run_prompts(self) -> None:
        """Allocate the cache, unless there is one; ``catch_up`` runs the prompts."""
        if self._state is None:
            self._state = self.head.new_state(len(self.prompts), self.max_length, max(self.max_nodes or 0, CHUNK + 1))
            self._state.fixed_shapes = fixes_shapes(self._state.lengths)

    def select(self, rows: Tensor, prompts: list[Sequence[int]] | None = None) -> Self:
        """Copy the state of some sequences, int64[batch']."""
        other = super().select(rows, prompts)
        for name in ("_root_feedback", "_root_logits", "_feedback"):
            setattr(other, name, getattr(self, name)[rows])
        return other

    def follow(self, draft: Draft, acceptance: Acceptance) -> None:
        """Read accepted tokens, and their features from ``acceptance.hidden``; run them if the next step drafts, too.

        Raises:
            ValueError: the caller has recorded no hidden states.
        """
        features, length = self._features(draft, acceptance), acceptance.path_lengths.long()
        if draft.grown is None:
            return self._put(features, length)
        self.decode_state.pending_tree = None  # the accepted tokens are run with the target's features
        tokens = draft.tree.tokens.gather(1, acceptance.path.clamp(min=0).long())
        pending = torch.where(length > 0, acceptance.next_token, tokens[:, 0])
        most = host_bound(length, tokens.shape[1])
        is_root = torch.arange(most + 1, device=length.device) == length[:, None]
        tokens = torch.where(is_root, pending[:, None], F.pad(tokens, (0, 1))[:, : most + 1])
        self._run(tokens, torch.cat([self._queue[:, :1], features[:, :most]], 1), length)

    def catch_up(self, seen: Seen) -> int:
        """Run the accepted tokens that were never run, and the pending ones; return the calls it took."""
        if not self.most_behind:
            return 0
        number = self._number - 1
        most = host_bound(number, min(self.most_behind, self._queue.shape[1] - 2), waits=self._is_united)
        index = (seen.lengths - number)[:, None] + torch.arange(most + 1, device=number.device)
        tokens = seen.tokens.gather(1, index.clamp(0, seen.tokens.shape[1] - 1))
        return self._run(tokens, self._queue[:, : most + 1], number)

    def node_logits(self, tree: TokenTree, first: int) -> Tensor:
        """Run the nodes ``first``.. of a growing tree; the root's logits are known already."""
        state = self.decode_state
        if first == 0:
            self._num_run = 0
            return self._root_logits[:, None].expand(-1, tree.tokens.shape[1], -1)
        n, begin = tree.tokens.shape[1], self._num_run
        if self._feedback.shape[1] < n:
            self._feedback = self._feedback.new_zeros(len(self.prompts), state.max_nodes, self._feedback.shape[-1])
            self.version += 1
        if not begin:
            self._feedback[:, 0] = self._root_feedback
        above = tree.parents[:, begin:].clamp(min=0).long()
        features = self._feedback.take_along_dim(above[..., None], 1)
        if not begin:
            features[:, 0] = self._queue[:, 0]
        logits, feedback = self.head.verify_features(state, tree, begin, features)
        self._feedback[:, begin:n] = feedback
        self._num_run = n
        return logits[:, first - begin :].to(self._root_logits.dtype)

    def _run(self, tokens: Tensor, features: Tensor, number: Tensor) -> int:
        """Run and commit the first int64[batch] of [batch, m + 1] pairs of every sequence, and run the root after them.

        Returns:
            The calls it took.
        """
        width = tokens.shape[1]
        for begin in range(0, width, self._chunk):
            piece = slice(begin, begin + self._chunk)
            self._run_piece(tokens[:, piece], features[:, piece], number - begin)
        self._queue[:, 0] = features.take_along_dim(number.view(-1, 1, 1), 1)[:, 0]
        self._number.fill_(1)
        self.most_behind = 0
        return -(-width // self._chunk)

    def _run_piece(self, tokens: Tensor, features: Tensor, number: Tensor) -> None:
        """Run the first ``number + 1``, int64[batch], of [batch, m] pairs, and commit all but the last, the root."""
        width = tokens.shape[1]
        self.reserve_nodes(width)
        place = torch.arange(width, device=tokens.device)
        is_node = (place <= number[:, None]) | (place == 0)
        chain = TokenTree.unchecked(tokens * is_node, torch.where(is_node, place - 1, -1).to(torch.int32))
        logits, feedback = self.head.verify_features(self.decode_state, chain, 0, features)
        path = place.to(torch.int32).expand(len(tokens), -1)
        self.head.commit(self.decode_state, path, number.clamp(0, width).to(torch.int32))
        is_root, root = ((number >= 0) & (number < width))[:, None], number.clamp(0, width - 1)
        rows = torch.arange(len(tokens), device=place.device)
        for held, given in ((self._root_logits, logits), (self._root_feedback, feedback)):
            held.copy_(torch.where(is_root, given[rows, root].to(held.dtype), held))
