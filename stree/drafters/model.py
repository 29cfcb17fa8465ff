"""Drafting with a smaller language model, whose state is committed in step with the target's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from stree.drafters.base import Draft, Drafter, DraftRun, check_vocabulary
from stree.drafters.draft_state import DraftState
from stree.drafters.draws import draft_probs
from stree.drafters.growing import grow_heap, grow_layers
from stree.drafters.merge import missed_nodes, without_children
from stree.drafters.none import root_only
from stree.drafters.tree_builder import GrownTree, columns_run, narrowed, num_run
from stree.growth import AcceptanceModel, Calibrated, Growth, KeptSlots, Limited, Plan, Proposal, learns_alike
from stree.kernels.step.bookkeeping import path_on_nodes
from stree.models.tree_lm import TreeLM
from stree.models.trimmed import TrimmedLM
from stree.sampling import AnySampling, Random
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["ModelDrafter"]


class ModelDrafter(Drafter):
    """Draft with a smaller language model, whose own state is committed in step with the target's.

    Args:
        lm: the draft model, of the target's vocabulary; its head may be padded to another number of rows.
        vocab: tokens that it may draft (``stree trim-vocab`` lists the most frequent ones), or None for all: a smaller
            head is faster, and what is left out is never drafted.

    Raises:
        TypeError: a model that is not patched.
        ValueError: tokens that are none of the vocabulary's, or that leave out a stop token.
    """

    default_growth: Growth = Calibrated()

    def __init__(self, lm: TreeLM, vocab: Sequence[int] | Tensor | None = None) -> None:
        if not hasattr(lm, "new_state"):
            raise TypeError(f"lm must be an object such as stree.TreeLM(model), got {type(lm).__name__}")
        self.lm = lm if vocab is None else TrimmedLM(lm, vocab)

    @property
    def models(self) -> Sequence[TreeLM]:
        """The draft model."""
        return [self.lm]

    def with_model(self, change: Callable[[TreeLM], TreeLM]) -> ModelDrafter:
        """Return a drafter over ``change`` of its model."""
        return ModelDrafter(change(self.lm))

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> _ModelRun:
        """Begin a run; the draft model reads the prompts when the first tree is drafted."""
        check_vocabulary(self.lm, vocab_size)
        return _ModelRun(self.lm, DraftState(self.lm, prompts), rng)


@dataclass(frozen=True, slots=True, eq=False)
class _Proposed:
    """What ``observe`` needs of a proposed tree.

    Attributes:
        proposal: what the growth's acceptance model learns from.
        columns: int64[batch, columns], tokens of the draft model's own tree.
        num_run: columns that were run.
    """

    proposal: Proposal
    columns: Tensor
    num_run: int


class _ModelRun(DraftRun):
    """A draft model's state for a batch of texts, and the tree that grows on it.

    The draft model's tree has one column more than the target's: it begins with the chain [leaf, pending] where the
    last accepted leaf was never run, and with [pending] and a padding column elsewhere.  Node i of the target's tree,
    i > 0, is node i + 1 of it.
    """

    can_admit = can_restart = can_select = can_extend = can_leave = is_capturable = can_replay_proposals = True

    def __init__(self, lm: TreeLM, state: DraftState, rng: Random) -> None:
        self._lm, self._state, self._rng = lm, state, rng
        self._largest: Plan | None = None  # of all plans to come, where it is known
        self._num_replaced = 0  # tensors that outlive a step, beside the state's
        self._growth: Growth | None = None  # the one that the acceptance model belongs to
        self.acceptance_model: AcceptanceModel
        self._proposed: _Proposed
        self._extension: tuple[int, Tensor] | None = None  # nodes of the own tree; tokens of the one verified instead
        self._root: Tensor | None = None  # the pending tokens where nothing else was proposed
        self._probs: Tensor | None = None  # memory for the distributions of a step
        self._left_out = torch.zeros_like(self._state.leaf)  # nodes of the next budget that others fill

    @property
    def version(self) -> int:
        """Changes whenever tensors that outlive a step were replaced by larger ones."""
        return self._num_replaced + self._state.version

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Grow a tree with a draft call a layer (a node for a heap), the first of which also runs the last leaf.

        A budget of 1 draws nothing and runs nothing.
        """
        growth = ModelDrafter.default_growth if growth is None else growth
        self._root = self._extension = None
        if budget == 1:
            self._root = pending
            return Draft(root_only(pending), None, 0, values=torch.ones_like(pending[:, None], dtype=torch.float32))
        plan = self._plan(growth, budget)
        self._use(growth)
        num_calls = self.settle(pending, budget)
        self._state.reserve_nodes(columns_run(plan))
        state = self._state.decode_state
        self._rng = self._rng.at(state.lengths + self._state.has_leaf)
        self.acceptance_model.begin(plan, self._rng)
        left = plan.num_nodes - self._left_out
        self._left_out.zero_()
        grown = GrownTree(pending, self._state.leaf, self._state.has_leaf, left, plan)
        probs, kept_slots = self._grow(grown, plan, growth.sampling)
        selected = grown.select(plan)
        nodes = grown.proposed(selected)
        tree = TokenTree.unchecked(nodes.tokens, nodes.parents, nodes.depths, nodes.mask)
        self._proposed = _Proposed(Proposal(tree, nodes.values, selected, kept_slots), grown.tokens, grown.num_run)
        depth = plan.num_nodes if plan.is_heap else grown.num_layers
        drawn_from = None if probs is None else draft_probs(probs, nodes.rows, plan, growth.sampling.greedy_rows)
        return Draft(tree, drawn_from, depth, num_calls + grown.num_calls, nodes.values)

    def _plan(self, growth: Growth, budget: int) -> Plan:
        """Return a growth's plan within what the drafter can run."""
        return narrowed(growth.plan(budget))

    def _grow(self, grown: GrownTree, plan: Plan, sampling: AnySampling) -> tuple[Tensor | None, KeptSlots]:
        run_frontier = partial(grown.run, self._score)
        if plan.is_heap:
            return grow_heap(grown, plan, sampling, self._rng, run_frontier), []
        buffer = partial(self._probs_buffer, plan)
        return grow_layers(grown, plan, sampling, self._rng, self.acceptance_model, run_frontier, buffer)

    def _score(self, tree: TokenTree, first: int) -> Tensor:
        """Return the logits of the columns ``first``.. of the draft model's own tree, processed as the target's are."""
        logits = self._lm.verify(self._state.decode_state, tree, first)
        return logits if self.processor is None else self.processor(tree, logits)

    def _probs_buffer(self, plan: Plan, logits: Tensor) -> Tensor:
        """Memory for the distributions of a tree's nodes that are run: the same in every step."""
        batch, vocab = len(logits), logits.shape[-1]
        rows = num_run(plan)
        if self._probs is None or self._probs.numel() < batch * rows * vocab:
            most = max(rows, 0 if self._largest is None else num_run(self._largest))
            self._probs = logits.new_empty(batch * most * vocab)
            self._num_replaced += 1
        return self._probs[: batch * rows * vocab].view(batch, rows, vocab)

    def observe(self, acceptance: Acceptance) -> None:
        """Commit the accepted nodes that were run; keep an accepted leaf that was not for the next call."""
        if self._root is not None:
            return self._observe_root(acceptance)
        is_extended, proposed = self._extension is not None, self._proposed
        tokens = proposed.proposal.tree.tokens if self._extension is None else self._extension[1]
        self.acceptance_model.read_text(tokens, acceptance.path, acceptance.path_lengths)
        proposal, own = proposed.proposal, self._own_part(acceptance)
        n = proposal.tree.tokens.shape[1]
        if acceptance.ratios is None:  # MATCH computes none
            ratios, is_live = path_on_nodes(own.path, own.path_lengths, n)
            if is_extended:
                is_missed = missed_nodes(proposal.tree, own, acceptance)
                proposal, ratios = without_children(proposal, is_missed), ratios.masked_fill(is_missed, 1.0)
        else:
            ratios, is_live = acceptance.ratios[:, :n], acceptance.path_lengths > 0  # others may have appended nodes
        self.acceptance_model.learn(proposal, ratios, is_live)
        self._state.commit(own, proposed.columns, proposed.proposal.selected, proposed.num_run)
        self._state.follow(tokens, acceptance, was_drafted=True)

    def _observe_root(self, acceptance: Acceptance) -> None:
        """Keep accepted tokens that were never run for the next tree."""
        assert self._root is not None, "the caller has checked"
        tokens, self._root = self._root[:, None], None
        path, lengths = acceptance.path, acceptance.path_lengths.long()
        if self._extension is not None:
            (_, tokens), self._extension = self._extension, None
        if self._growth is not None:
            self.acceptance_model.read_text(tokens, path, acceptance.path_lengths)
        self._state.commit_later(tokens.gather(1, path.clamp(min=0).long()), lengths)
        self._state.follow(tokens, acceptance, was_drafted=False)

    def _own_part(self, acceptance: Acceptance) -> Acceptance:
        """Cut accepted paths where they leave the own tree; what follows there is run before the next draft."""
        if self._extension is None:
            return acceptance
        (own, tokens), self._extension = self._extension, None
        path, lengths = acceptance.path.long(), acceptance.path_lengths
        place = torch.arange(path.shape[1], device=path.device)
        is_own = (path < own) & (place < lengths[:, None])
        count = is_own.sum(1, dtype=torch.int32)
        beyond = (place + count[:, None]).clamp(max=path.shape[1] - 1).long()
        unseen = tokens.gather(1, path.gather(1, beyond).clamp(min=0))
        self._state.commit_later(unseen, (lengths - count).long())
        own_path = torch.where(is_own, path, -1).to(torch.int32)
        return Acceptance(own_path, count, acceptance.next_token)

    @property
    def last_proposal(self) -> tuple[_Proposed, TokenTree | None]:
        """What observing the last tree takes; set when a captured proposal is replayed."""
        return self._proposed, self._state.decode_state.pending_tree

    @last_proposal.setter
    def last_proposal(self, proposal: tuple[_Proposed, TokenTree | None]) -> None:
        self._proposed, self._state.decode_state.pending_tree = proposal
        self._root = self._extension = None

    def leave(self, count: Tensor) -> None:
        self._left_out.copy_(count)

    def extend(self, tree: TokenTree) -> None:
        own = 1 if self._root is not None else self._proposed.proposal.tree.tokens.shape[1]
        self._extension, self._state.is_extended = (own, tree.tokens), True

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        self._state.admit(row, prompt)
        if self._growth is not None:
            self.acceptance_model.reset(row)
            self._read_prompts([row])

    def restart(self, prompts: Sequence[Sequence[int]]) -> None:
        self._root, self._extension = None, None
        self._state.restart(prompts)
        if self._growth is not None:
            for row in range(len(prompts)):
                self.acceptance_model.reset(row)
            self._read_prompts(range(len(prompts)))

    def select(self, rows: Tensor, rng: Random) -> Self:
        other = copy(self)
        other._state, other._rng, other._left_out = self._state.select(rows), rng, self._left_out[rows]
        if self._growth is not None:
            other.acceptance_model = self.acceptance_model.select(rows)
        other._root = other._extension = other._probs = None
        return other

    def reserve(self, max_length: int, growth: Growth | None, budget: int, *, begins: bool) -> None:
        if growth is not None:
            self._use(growth)
        if budget > 1:
            self._largest = self._plan(ModelDrafter.default_growth if growth is None else growth, budget)
            self._state.max_nodes = columns_run(self._largest)
        self._state.reserve_length(max_length)
        if begins:
            self._state.begin()

    def settle(self, pending: Tensor, budget: int) -> int:
        """Run the prompts and the accepted tokens that were never run, if a tree is to be drafted."""
        if budget == 1:
            return 0
        self._state.begin()
        return self._state.catch_up(pending)

    def replayed(self, budget: int) -> None:
        self._state.replayed(was_drafted=budget > 1)

    def give_up(self) -> None:
        self._root = self._extension = None
        self._state.forget_pending()

    def _use(self, growth: Growth) -> None:
        """Take the acceptance model of a growth, unless one of its kind is in use."""
        base = growth.base if isinstance(growth, Limited) else growth
        if base is self._growth:
            return
        if self._growth is None or not learns_alike(base, self._growth):
            self.acceptance_model = base.acceptance_model(len(self._state.leaf), self._state.leaf.device)
            self._read_prompts(range(len(self._state.leaf)))
            self._num_replaced += 1
        self._growth = base

    def _read_prompts(self, rows: Sequence[int]) -> None:
        """Let the acceptance model read the prompts of some rows."""
        prompts = [torch.tensor(prompt, dtype=torch.long) for prompt in self._state.prompts]
        lengths = torch.tensor([len(prompt) if row in rows else 0 for row, prompt in enumerate(prompts)])
        tokens = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        device = self._state.leaf.device
        self.acceptance_model.read_text(tokens.to(device), None, lengths.to(device, torch.int32))
