"""The decode state of a draft model, which follows the accepted tokens of its texts."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from stree.drafters.base import Draft, padded_prompts
from stree.drafters.catch_up import CatchUpTokens
from stree.growth import Proposal
from stree.kernels.dispatch import fixes_shapes, host_bound
from stree.kernels.step.bookkeeping import Drafted, path_on_columns
from stree.models.state import DecodeState
from stree.models.tree_lm import TreeLM
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["DraftState", "Grown"]

CHUNK = 32  # most tokens of a chain by which a model catches up
MAX_NODES = 66  # of a state's trees, where the largest tree is not known beforehand


@dataclass(frozen=True, slots=True, eq=False)
class Grown:
    """What a run reads of a tree that it has grown, once that is verified.

    Attributes:
        proposal: what the growth's acceptance model learns from.
        tokens: int64[batch, columns], of all columns.
        scored: the columns that were run.
    """

    proposal: Proposal
    tokens: Tensor
    scored: TokenTree


class DraftState:
    """Prompts are run when the first tree is drafted; accepted tokens that were never run are run before the next one.

    Args:
        lm: the draft model.
        prompts: of the first texts.

    Attributes:
        prompts: of the present texts.
        leaf: int64[batch], the last accepted token where it was never run.
        has_leaf: bool[batch], where that is so.
        max_nodes: most columns of a tree, where it is known.
        is_extended: whether trees are extended by another drafter, which reads every step on the host anyway.
        last_logits: float[batch, vocab], of what follows the tokens that ``catch_up`` has run last.
        version: changes whenever tensors that outlive a step are replaced.
    """

    last_logits: Tensor

    def __init__(self, lm: TreeLM, prompts: Sequence[Sequence[int]]) -> None:
        self._lm, self.prompts = lm, list(prompts)
        self.leaf = torch.zeros(len(prompts), dtype=torch.long, device=lm.device)
        self.has_leaf = torch.zeros(len(prompts), dtype=torch.bool, device=lm.device)
        self.max_nodes: int | None = None
        self.is_extended = False
        self.version = 0
        self._max_length: int | None = None  # of a text, where it is known
        self._state: DecodeState | None = None  # None until the prompts have been run
        self._behind = CatchUpTokens(self.leaf.new_zeros(len(prompts), 0))

    @property
    def decode_state(self) -> DecodeState:
        """The model's own state, once ``begin`` was called."""
        assert self._state is not None, "a tree begins the run"
        return self._state

    def begin(self) -> None:
        """Run the prompts, unless they were run; plain decoding never needs them."""
        if self._state is not None:
            return
        input_ids, lengths = padded_prompts(self.prompts)
        width = input_ids.shape[1]
        nodes = MAX_NODES if self.max_nodes is None else max(self.max_nodes, CHUNK + 1)
        self._state = self._lm.new_state(len(lengths), max(self._max_length or 2 * width + 1024, width), nodes)
        self._state.fixed_shapes = fixes_shapes(self.leaf)
        self._lm.prefill(self._state, input_ids, lengths)

    def restart(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin as many other texts in the same memory."""
        self.prompts = list(prompts)
        self.has_leaf.zero_()
        self._behind.clear()
        if self._state is not None:
            input_ids, lengths = padded_prompts(prompts)
            self._state.reset()
            self._lm.prefill(self._state, input_ids, lengths)

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        """Begin another text in a row."""
        self.prompts[row] = prompt
        if self._state is not None:
            if len(prompt) > self._state.max_length:
                self._resize(2 * len(prompt), self._state.max_nodes)
            self._lm.prefill_row(self._state, row, torch.tensor([prompt]))
        self.has_leaf[row] = False
        self._behind.forget(row)

    def select(self, rows: Tensor) -> Self:
        """Copy the state of some sequences, int64[batch']."""
        other = copy(self)
        other.prompts = [self.prompts[row] for row in rows.tolist()]
        other.leaf, other.has_leaf, other._behind = self.leaf[rows], self.has_leaf[rows], self._behind.select(rows)
        other._state = None if self._state is None else self._state.select(rows)
        other.version += 1
        return other

    def reserve_length(self, max_length: int) -> None:
        """Bound the length of all texts to come."""
        if max_length != self._max_length:
            self._max_length = max_length
            self._behind.reserve(max_length)
            self.version += 1

    def reserve_nodes(self, nodes: int) -> None:
        """Make the state larger where a tree of ``nodes``, or a text of unknown length, needs it."""
        state = self.decode_state
        length = state.length_bound + nodes if self._max_length is None else self._max_length
        if length > state.max_length or nodes > state.max_nodes:
            longer = 2 * length if length > state.max_length else 0
            self._resize(max(state.max_length, longer), max(nodes, state.max_nodes))

    def forget_pending(self) -> None:
        """Drop a tree that was verified on the host only, by a capture that failed."""
        if self._state is not None:
            self._state.is_inconsistent = False

    def follow(self, draft: Draft, acceptance: Acceptance) -> None:
        """Advance the state by the accepted nodes that were run; what was not is run before the next tree."""
        path, lengths, grown = acceptance.path, acceptance.path_lengths, draft.grown
        if grown is None:
            return self.commit_later(draft.tree.tokens.gather(1, path.clamp(min=0).long()), lengths.long())
        if draft.is_united:
            lengths = self._own_lengths(draft, acceptance)
        self.decode_state.pending_tree = grown.scored  # the host did not see it run where a proposal was replayed
        num_run = grown.scored.tokens.shape[1]
        drafted = Drafted(draft.column, grown.tokens, self.has_leaf, self.leaf, num_run)
        self._lm.commit(self.decode_state, *path_on_columns(path, lengths, drafted))

    def _own_lengths(self, draft: Draft, acceptance: Acceptance) -> Tensor:
        """Return how many accepted nodes were drafted here, int32[batch]; those of others, which follow, are queued."""
        assert draft.column is not None, "united drafts have columns"
        path, lengths = acceptance.path.clamp(min=0).long(), acceptance.path_lengths
        place = torch.arange(path.shape[1], device=path.device)
        is_own = (draft.column.gather(1, path) >= 0) & (place < lengths[:, None])
        own = is_own.sum(1, dtype=torch.int32)
        beyond = (place + own[:, None]).clamp(max=path.shape[1] - 1).long()
        self.commit_later(draft.tree.tokens.gather(1, path.gather(1, beyond)), (lengths - own).long())
        return own

    def commit_later(self, tokens: Tensor, lengths: Tensor) -> None:
        """Append the first int64[batch] of int64[batch, m] accepted tokens to those that ``catch_up`` will run."""
        self._behind.put([tokens], lengths, self._max_length)

    def replayed(self, *, was_drafted: bool) -> None:
        """Count what a replayed step has appended on the device."""
        self._behind.most += not was_drafted

    def catch_up(self, pending: Tensor) -> int:
        """Run and commit the accepted tokens that were never run, as chains; return the draft calls it took."""
        if not self._behind.most:
            return 0
        (tokens,), number = self._behind.all()
        most = host_bound(number, self._behind.most, waits=self.is_extended)
        for begin in range(0, most, CHUNK):
            piece = tokens[:, begin : min(begin + CHUNK, most)]
            self._run_chain(piece, (number - begin).clamp(0, piece.shape[1]))
        self._behind.clear()
        return -(-most // CHUNK)

    def _run_chain(self, tokens: Tensor, count: Tensor) -> None:
        """Run and commit the last leaf and the first ``count`` of int64[batch, m] tokens of every sequence."""
        width = tokens.shape[1]
        self.reserve_nodes(width + 1)
        lead = self.has_leaf & (count > 0)
        tokens = torch.cat([self.leaf[:, None], tokens], 1)
        place = torch.arange(width + 1, device=tokens.device)
        tokens = tokens.gather(1, (place + (~lead).long()[:, None]).clamp(max=width))
        lengths = torch.where(count > 0, count + lead, 0)
        is_node = (place < lengths[:, None]) | (place == 0)
        chain = torch.where(is_node, place - 1, -1).to(torch.int32)
        logits = self._lm.verify(self.decode_state, TokenTree.unchecked(tokens * is_node, chain))
        self.last_logits = logits.take_along_dim((lengths - 1).clamp(min=0).view(-1, 1, 1), 1)[:, 0]
        path = place.to(torch.int32).expand(len(tokens), -1)
        self._lm.commit(self.decode_state, path, lengths.to(torch.int32))
        self.has_leaf &= count == 0

    def _resize(self, max_length: int, max_nodes: int) -> None:
        """Replace the state by a larger copy."""
        self._state = self.decode_state.resized(max_length, max_nodes)
        self.version += 1
