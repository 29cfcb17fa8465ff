"""The decode state of a draft model, which follows the accepted tokens of its texts."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from stree.drafters.base import Draft, padded_prompts
from stree.drafters.tree_builder import narrowed
from stree.growth import Plan, Proposal
from stree.kernels.dispatch import fixes_shapes, host_bound
from stree.kernels.step.bookkeeping import path_on_columns
from stree.kernels.step.texts import Seen
from stree.models.prefix_cache import PromptRun, RequestPrefixes
from stree.models.state import DecodeState
from stree.models.tree_lm import TreeLM
from stree.sampling import AnySampling, Random
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["DraftState", "Grown"]

CHUNK = 32  # most tokens of a chain by which a model catches up
MAX_NODES = 66  # of a state's trees, where the largest tree is not known beforehand
ROOM = 4096  # tokens behind the longest prompt, where no step has bounded the texts' lengths


@dataclass(frozen=True, slots=True, eq=False)
class Grown:
    """What a run reads of a tree that it has grown, once that is verified.

    Attributes:
        proposal: what the growth's acceptance model learns from.
        num_columns: of the tree.
        scored: the columns that were run.
        root_logits: float[batch, vocab], after the root.
    """

    proposal: Proposal
    num_columns: int
    scored: TokenTree
    root_logits: Tensor


class DraftState:
    """A draft model's state of all tokens before a text's last one, which is run with the pending token.

    Prompts, and what else was never run, are run before the next tree: a text that is decoded plainly costs nothing.

    Args:
        lm: the draft model.
        prompts: of the first texts.

    Attributes:
        prompts: of the present texts.
        max_nodes: most columns of a tree, where it is known.
        most_behind: bound of the tokens of a text that were never run, but for the last one.
        last_logits: float[batch, vocab], of what follows the texts that ``catch_up`` has run tokens of.
        version: changes whenever tensors that outlive a step are replaced.
    """

    last_logits: Tensor

    def __init__(self, lm: TreeLM, prompts: Sequence[Sequence[int]]) -> None:
        self._lm, self.prompts = lm, list(prompts)
        self.max_nodes: int | None = None
        self.version = 0
        self._max_length: int | None = None  # of a text, where it is known
        self._state: DecodeState | None = None  # None until the first prompts have been run
        self._unread: dict[int, RequestPrefixes | None] = dict.fromkeys(range(len(prompts)))  # rows of prompts to run
        self.most_behind = 0
        self._is_united = False  # whether another drafter added nodes, which reads every step on the host anyway

    @property
    def decode_state(self) -> DecodeState:
        """The model's own state, once ``run_prompts`` was called."""
        assert self._state is not None, "a tree begins the run"
        return self._state

    @property
    def max_length(self) -> int:
        """Most tokens of a text."""
        return max(map(len, self.prompts)) + ROOM if self._max_length is None else self._max_length

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._lm.device

    def fitted(self, plan: Plan) -> Plan:
        """Return a plan whose trees the model can run."""
        return narrowed(plan)

    def score(self, tree: TokenTree, first: int) -> Tensor:
        """Run the columns ``first``.. of a growing tree; return their logits, but for the first column's."""
        logits = self._lm.verify(self.decode_state, tree, first)
        return logits if first else logits[:, 1:]

    def num_calls(self, num_scored: int) -> int:
        """Count the model's calls for a tree after ``score`` was called so often."""
        return num_scored

    def begin_tree(self, rng: Random, sampling: AnySampling) -> None:
        """Take the random numbers of a step, and how tokens are drawn in it, where drafting needs them."""

    def read_prompts(self, rows: Sequence[int], hidden: Tensor) -> None:
        """Read the target's hidden states of prompts, where they are needed: see ``DraftRun.read_prompts``."""

    def run_prompts(self) -> None:
        """Run the prompts that were not run yet; plain decoding never needs them."""
        if self._state is None:
            nodes = MAX_NODES if self.max_nodes is None else max(self.max_nodes, CHUNK + 1)
            self._state = self._lm.new_state(len(self.prompts), self.max_length, nodes)
            self._state.fixed_shapes = fixes_shapes(self._state.lengths)
        elif len(self._unread) == len(self.prompts):
            self._state.reset()  # prefill takes an empty state; rows emptied one by one leave a used one
        unread, self._unread = self._unread, {}
        if len(unread) == len(self.prompts) and not any(unread.values()):
            return self._prefill(self._state)
        for row, prefixes in unread.items():
            self._prefill_row(self._state, row, self.prompts[row][:-1], prefixes)

    def _prefill(self, state: DecodeState) -> None:
        """Run all tokens but the last of each prompt, if there are any."""
        if max(map(len, self.prompts)) == 1:
            return
        input_ids, lengths = padded_prompts([prompt[:-1] or prompt for prompt in self.prompts])
        self._lm.prefill(state, input_ids, lengths)
        if empty := [row for row, prompt in enumerate(self.prompts) if len(prompt) == 1]:
            state.reset_rows(empty)

    def _prefill_row(
        self, state: DecodeState, row: int, tokens: Sequence[int], prefixes: RequestPrefixes | None
    ) -> None:
        """Run the tokens of one prompt, if there are any, from a state that was kept."""
        if not tokens:
            return
        if prefixes is None:
            self._lm.prefill_row(state, row, torch.tensor([tokens]))
        else:
            single = self._lm.new_state(1, state.max_length, state.max_nodes)
            PromptRun(self._lm, tokens, single, prefixes).run()
            state.write_row(row, single)

    def begin(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], prefixes: RequestPrefixes | None = None
    ) -> None:
        """Begin other texts in some rows, or all, in the same memory, from states that were kept."""
        self._empty(rows, prompts)
        self._unread |= dict.fromkeys(rows, prefixes)

    def _empty(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Forget the texts of some rows, or all."""
        for row, prompt in zip(rows, prompts, strict=True):
            self.prompts[row] = prompt
        if len(rows) < len(self.prompts):
            if self._state is not None:
                self._state.reset_rows(rows)
            return
        self.most_behind = 0
        if self._state is not None:
            self._state.reset()

    def select(self, rows: Tensor, prompts: list[Sequence[int]] | None = None) -> Self:
        """Copy the state of some sequences, int64[batch'].

        The host reads the rows, unless it is given their prompts, which were run.
        """
        other = copy(self)
        kept = {} if prompts is not None else dict(enumerate(rows.tolist()))
        other.prompts = [self.prompts[row] for row in kept.values()] if prompts is None else [*prompts]
        other._unread = {row: self._unread[old] for row, old in kept.items() if old in self._unread}
        other._state = None if self._state is None else self._state.select(rows)
        other.version += 1
        return other

    def reserve_length(self, max_length: int) -> None:
        """Bound the length of all texts to come."""
        self._max_length = max_length

    def reserve_nodes(self, nodes: int) -> None:
        """Make the state larger where a tree of ``nodes`` needs it."""
        if nodes > self.decode_state.max_nodes:
            self._state = self.decode_state.resized(self.decode_state.max_length, nodes)
            self.version += 1

    def follow(self, draft: Draft, acceptance: Acceptance) -> None:
        """Advance the state by what was run; what was not is run before the next tree."""
        path, lengths, grown = acceptance.path, acceptance.path_lengths, draft.grown
        self._is_united = draft.is_united
        self.most_behind += path.shape[1] * draft.is_united  # the token of a plain step was counted before it
        if grown is not None:
            state = self.decode_state
            state.pending_tree = grown.scored  # the host did not see it run where a proposal was replayed
            self._lm.commit(state, *path_on_columns(path, lengths, draft.column, grown.scored.tokens.shape[1]))

    def catch_up(self, seen: Seen) -> int:
        """Run and commit what is missing of the texts, but for the last tokens; return the draft calls it took."""
        if not self.most_behind:
            return 0
        missing = (seen.lengths - 1 - self.decode_state.lengths).clamp(min=0)
        most = host_bound(missing, min(self.most_behind, seen.tokens.shape[1]), waits=self._is_united)
        for begin in range(0, most, CHUNK):
            self._run_text(seen, min(CHUNK, most - begin))
        self.most_behind = 0
        return -(-most // CHUNK)

    def _run_text(self, seen: Seen, most: int) -> None:
        """Run up to ``most`` tokens of every text behind those that the state holds, and the one behind them."""
        self.reserve_nodes(most + 1)
        state = self.decode_state
        count = (seen.lengths - 1 - state.lengths).clamp(0, most)
        place = torch.arange(most + 1, device=count.device)
        index = (state.lengths[:, None] + place).clamp(max=seen.tokens.shape[1] - 1)
        is_node = place <= count[:, None]
        chain = TokenTree.unchecked(
            seen.tokens.gather(1, index) * is_node, torch.where(is_node, place - 1, -1).to(torch.int32)
        )
        logits = self._lm.verify(state, chain)
        self.last_logits = logits.take_along_dim(count.view(-1, 1, 1), 1)[:, 0]
        path = place.to(torch.int32).expand(len(count), -1)
        self._lm.commit(state, path, count.to(torch.int32))
