"""The state of a causal draft head: keys and values of accepted tokens, run with the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from stree.drafters.base import Draft, padded_prompts
from stree.drafters.catch_up import CatchUpTokens
from stree.drafters.draft_state import CHUNK, DraftState
from stree.kernels.dispatch import fixes_shapes, host_bound
from stree.models.heads.causal import CausalHead
from stree.models.layers.base import state_dtype
from stree.models.state import DecodeState
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["HeadState"]


class HeadState(DraftState):
    """Accepted tokens are run with the target's features, the nodes of a growing tree with their parents' feedback.

    What a tree leaves in the head's cache is dropped: after a step, the accepted tokens are run again with the features
    that the target has computed meanwhile.  The same call runs the root of the next tree, so that its logits are known
    before the tree grows.  A tree of depth d takes d calls, as with a draft model.

    Args:
        head: runs tokens and features.
        prompts: of the first texts.
    """

    def __init__(self, head: CausalHead, prompts: Sequence[Sequence[int]]) -> None:
        self.head = head
        super().__init__(head, prompts)
        batch, width = len(prompts), head.num_features
        empty = torch.zeros(batch, 0, width, dtype=head.dtype, device=head.device)
        self._behind = CatchUpTokens(self.leaf.new_zeros(batch, 0), empty)
        self._root_feature, self._root_feedback = empty.new_zeros(batch, width), empty.new_zeros(batch, width)
        self._root_logits = torch.zeros(batch, head.vocab_size, dtype=state_dtype(head.dtype), device=head.device)
        self._feedback = empty  # of the columns of a growing tree
        self._is_root_run = False
        self._num_run = 0  # columns of the tree
        self._chunk = CHUNK  # most pairs that are run at once

    def read_prompts(self, rows: Sequence[int], hidden: Tensor) -> None:
        """Take the target's hidden states of prompts, float[len(rows), longest, layers, hidden]; they are run later."""
        features = self.head.project(hidden.to(self.leaf.device))
        tokens, lengths = (part.to(self.leaf.device) for part in padded_prompts([self.prompts[row] for row in rows]))
        index, last = torch.tensor(rows, device=self.leaf.device), (lengths - 1).view(-1, 1, 1)
        self._root_feature[index] = features.take_along_dim(last, 1)[:, 0]
        batch, width = len(self.prompts), tokens.shape[1] - 1
        entries = tokens.new_zeros(batch, width), features.new_zeros(batch, width, features.shape[-1])
        entries[0][index], entries[1][index] = tokens[:, 1:], features[:, :-1]
        count = lengths.new_zeros(batch).index_copy(0, index, lengths - 1)
        self._behind.put(entries, count, self._max_length)
        self._is_root_run = False

    def begin(self) -> None:
        """Allocate the cache, unless there is one; ``catch_up`` runs the prompts."""
        if self._state is None:
            length = self._max_length or 2 * max(map(len, self.prompts)) + 1024
            self._state = self.head.new_state(len(self.prompts), length, max(self.max_nodes or 0, CHUNK + 1))
            self._state.fixed_shapes = fixes_shapes(self.leaf)

    def restart(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin as many other texts; ``read_prompts`` follows."""
        self.prompts = list(prompts)
        self._behind.clear()
        if self._state is not None:
            self._state.reset()

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        """Begin another text in a row; ``read_prompts`` follows."""
        self.prompts[row] = prompt
        self._behind.forget(row)
        if self._state is not None:
            held = self._state
            held.write_row(row, DecodeState(held.specs, 1, held.max_length, held.max_nodes, self.leaf.device))

    def select(self, rows: Tensor) -> Self:
        """Copy the state of some sequences, int64[batch']."""
        other = super().select(rows)
        for name in ("_root_feature", "_root_feedback", "_root_logits", "_feedback"):
            setattr(other, name, getattr(self, name)[rows])
        return other

    def follow(self, draft: Draft, acceptance: Acceptance) -> None:
        """Read accepted tokens, and their features from ``acceptance.hidden``; run them if the next step drafts, too.

        Raises:
            ValueError: the caller has recorded no hidden states.
        """
        if acceptance.hidden is None:
            raise ValueError(f"a draft head needs the target's hidden states of layers {self.head.hidden_layers}")
        features, length = self.head.project(acceptance.hidden.to(self.leaf.device)), acceptance.path_lengths.long()
        before = torch.cat([self._root_feature[:, None], features], 1)
        root = draft.tree.tokens[:, 0]
        tokens = draft.tree.tokens.gather(1, acceptance.path.clamp(min=0).long())
        self._root_feature.copy_(before.take_along_dim(length.view(-1, 1, 1), 1)[:, 0])
        if draft.grown is None:
            self._is_root_run = False
            return self._behind.put((tokens, before[:, :-1]), length, self._max_length)
        self.decode_state.pending_tree = None  # the accepted tokens are run with the target's features
        pending = torch.where(length > 0, acceptance.next_token, root)
        self._run_pairs(tokens, before[:, :-1], length, pending)

    def replayed(self, *, was_drafted: bool) -> None:
        """Note what a replayed step has done on the device."""
        super().replayed(was_drafted=was_drafted)
        self._is_root_run = was_drafted

    def catch_up(self, pending: Tensor) -> int:
        """Run the accepted tokens that were never run, and int64[batch] pending ones; return the calls it took."""
        if self._is_root_run:
            return 0
        (tokens, features), number = self._behind.all()
        most = host_bound(number, self._behind.most, waits=self.is_extended)
        calls = self._run_pairs(tokens[:, :most], features[:, :most], number, pending)
        self._behind.clear()
        return calls

    def verify(self, state: DecodeState, tree: TokenTree, first: int = 0) -> Tensor:
        """Score the columns of a growing tree, as ``TreeLM.verify``; the root's logits are known already."""
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
            features[:, 0] = self._root_feature
        logits, feedback = self.head.verify_features(state, tree, begin, features)
        self._feedback[:, begin:n] = feedback
        self._num_run = n
        return logits[:, first - begin :]

    def _run_pairs(self, tokens: Tensor, features: Tensor, number: Tensor, pending: Tensor) -> int:
        """Run and commit the first int64[batch] of [batch, m] pairs of every sequence, then run its root.

        Returns:
            The calls it took.
        """
        most = host_bound(number, tokens.shape[1])
        place = torch.arange(most + 1, device=tokens.device)
        is_root = place == number[:, None]
        tokens = torch.where(is_root, pending[:, None], torch.cat([tokens[:, :most], pending[:, None]], 1))
        root = self._root_feature[:, None]
        features = torch.where(is_root[..., None], root, torch.cat([features[:, :most], root], 1))
        for begin in range(0, most + 1, self._chunk):
            piece = slice(begin, begin + self._chunk)
            self._run_piece(tokens[:, piece], features[:, piece], number - begin)
        self._is_root_run = True
        return -(-(most + 1) // self._chunk)

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
        is_root, root = ((number >= 0) & (number < width))[:, None], number.clamp(0, width - 1).view(-1, 1, 1)
        for held, given in ((self._root_logits, logits), (self._root_feedback, feedback)):
            held.copy_(torch.where(is_root, given.take_along_dim(root, 1)[:, 0].to(held.dtype), held))
