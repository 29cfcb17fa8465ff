"""Drafting with a smaller language model, whose state is committed in step with the target's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Self

import torch
from torch import Tensor

from stree.drafters.base import Draft, Drafter, DraftRun, check_vocabulary
from stree.drafters.candidates import Candidates, Offered
from stree.drafters.draft_state import DraftState, Grown
from stree.drafters.draws import draft_probs
from stree.drafters.growing import grow_heap, grow_layers
from stree.drafters.merge import keep_best, keep_first, on_own_nodes
from stree.drafters.none import root_only
from stree.drafters.own_texts import OwnTexts
from stree.drafters.tree_builder import GrownTree, columns_run, num_run
from stree.growth import AcceptanceModel, Calibrated, Growth, KeptSlots, Plan, Proposal, Stop, learns_alike
from stree.growth.stops import StoppedModel
from stree.kernels.step.bookkeeping import path_on_nodes
from stree.kernels.step.texts import Seen
from stree.models.tree_lm import TreeLM
from stree.models.trimmed import TrimmedLM
from stree.returned import check_kind, is_ours
from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["ModelDrafter", "ModelRun"]


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

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> ModelRun:
        """Begin a run; the draft model reads the prompts when the first tree is drafted."""
        check_vocabulary(self.lm, vocab_size)
        return ModelRun(DraftState(self.lm, prompts), rng)


class ModelRun(DraftRun):
    """A run of a draft model, or of a head: its state for a batch of texts, and the tree that grows on it.

    The draft model's tree has one column more than the target's: it begins with the chain [last, pending], as the state
    holds all tokens of a text but the last one before the pending one.  Node i of the target's tree is column i + 1.

    Args:
        state: of the model.
        rng: random numbers.

    Attributes:
        acceptance_model: of the growth that is used.
    """

    acceptance_model: AcceptanceModel
    can_begin = can_select = can_extend = is_on_device = True

    def __init__(self, state: DraftState, rng: Random) -> None:
        self.state, self.rng = state, rng
        self._most_run = 0  # nodes of a tree to come that are run, where that is known
        self._growth: Growth | None = None  # the one that the acceptance model and the plans belong to
        self._plans: dict[int, Plan] = {}  # by budget
        self._own: OwnTexts | None = None  # of a run that is used alone
        self._probs: Tensor | None = None  # memory for the distributions of a step
        # Nodes of the next budget that others fill.
        self._left_out = torch.zeros(len(state.prompts), dtype=torch.long, device=state.device)

    @property
    def version(self) -> int:  # type: ignore[override]
        """Another number whenever tensors that outlive a step were replaced by larger ones."""
        return self.state.version

    def prepare(self, seen: Seen, budget: int) -> int:
        """Run the prompts and the accepted tokens that were never run, if a tree is to be drafted."""
        self.seen = seen
        if budget == 1:
            self.state.most_behind += 1
            return 0
        self.state.run_prompts()
        return self.state.catch_up(seen)

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Grow a tree below the pending tokens; a budget of 1 draws nothing and runs nothing."""
        if self.seen is None:
            self._own = OwnTexts(self.state.prompts, pending.device)
        num_calls = 0 if self._own is None else self.prepare(self._own.seen(pending), budget)
        return self.grow(growth, budget, num_calls)

    def grow(self, growth: Growth | None, budget: int, num_calls: int = 0) -> Draft:
        """Grow a tree below the texts that ``prepare`` was given, after so many draft calls.

        It takes a draft call a layer (a node for a heap), the first of which also runs the last token.
        """
        growth, seen = ModelDrafter.default_growth if growth is None else growth, self.seen
        assert seen is not None, "prepare was called"
        if budget == 1:
            values = torch.ones_like(seen.pending[:, None], dtype=torch.float32)
            self.draft = Draft(root_only(seen.pending), None, 0, values=values)
            return self.draft
        self._use(growth)
        plan = self._plan(growth, budget)
        self.state.reserve_nodes(columns_run(plan))
        self.rng = self.rng.at(seen.lengths)
        self.acceptance_model.begin(plan, self.rng)
        self.state.begin_tree(self.rng, growth.sampling)
        grown = GrownTree(seen, self._left(plan, seen), plan)
        run_frontier = partial(grown.run, self.score)
        kept_slots: KeptSlots = []
        offered: list[Candidates] = []
        if plan.is_heap:
            probs = grow_heap(grown, plan, growth.sampling, self.rng, run_frontier)
        else:
            buffer = partial(self._probs_buffer, num_run(plan))
            probs, kept_slots, offered = grow_layers(
                grown, plan, growth.sampling, self.rng, self.acceptance_model, run_frontier, buffer
            )
        column = grown.select(plan)
        nodes = grown.proposed(column)
        tree = TokenTree.unchecked(nodes.tokens, nodes.parents, nodes.depths, nodes.mask)
        if seen.nodes is not None:  # of plans whose layers do not read what is left
            tree = keep_best(tree, nodes.values, seen.nodes) if plan.is_pruned else keep_first(tree, seen.nodes)
        proposal = Proposal(tree, nodes.values, column, kept_slots)
        depth = plan.num_nodes if plan.is_heap else grown.num_layers
        drawn_from = None if probs is None else draft_probs(probs, nodes.rows, plan, growth.sampling.greedy_rows)
        self.draft = Draft(
            tree, drawn_from, depth, num_calls + self.state.num_calls(grown.num_calls), nodes.values, column=column,
            grown=Grown(proposal, grown.size, grown.scored, grown.root_logits),
            offered=Offered(tuple(offered), nodes.rows) if offered else None,
        )  # fmt: skip
        return self.draft

    def _plan(self, growth: Growth, budget: int) -> Plan:
        """Return the plan of the growth in use for a budget, which is made once."""
        if budget not in self._plans:
            plan = growth.plan(budget)
            check_kind(growth, "plan", plan, Plan, "a stree.growth.Plan")
            self._plans[budget] = self.state.fitted(plan)
        return self._plans[budget]

    def _left(self, plan: Plan, seen: Seen) -> Tensor:
        """Return how many nodes each row's tree may grow: int64[batch]."""
        left = plan.num_nodes - self._left_out
        self._left_out.zero_()
        return left if seen.nodes is None else torch.minimum(left, seen.nodes - 1).clamp(min=0)

    def score(self, tree: TokenTree, first: int) -> Tensor:
        """Score columns of the tree that grows; process their logits as the target's are."""
        logits = self.state.score(tree, first)
        return logits if self.processor is None else self.processor(tree, logits)

    def _probs_buffer(self, rows: int, logits: Tensor) -> Tensor:
        """Memory for the distributions of so many nodes of a tree that are run: the same in every step."""
        batch, vocab = len(logits), logits.shape[-1]
        if self._probs is None or self._probs.numel() < batch * rows * vocab:
            self._probs = logits.new_empty(batch * max(rows, self._most_run) * vocab)
            self.state.version += 1
        return self._probs[: batch * rows * vocab].view(batch, rows, vocab)

    def observe(self, acceptance: Acceptance) -> None:
        """Learn from the accepted paths, and commit the accepted nodes that were run; the others are run later."""
        if self._growth is not None:
            self.acceptance_model.read_text(self.draft.tree.tokens, acceptance.path, acceptance.path_lengths)
        if self.draft.grown is not None:
            self._learn(self.draft, acceptance)
        self.append_own(self.draft, acceptance)
        self.state.follow(self.draft, acceptance)

    def append_own(self, draft: Draft, acceptance: Acceptance) -> None:
        """Append the accepted nodes of a draft to the texts, where no decode step holds them."""
        if self._own is not None:
            self._own.append(draft.tree.tokens, acceptance)

    def _learn(self, draft: Draft, acceptance: Acceptance) -> None:
        proposal, n = draft.grown.proposal, draft.tree.tokens.shape[1]
        if acceptance.ratios is None:  # MATCH computes none
            ratios, is_live = path_on_nodes(acceptance.path, acceptance.path_lengths, n)
        else:
            ratios, is_live = acceptance.ratios[:, :n], acceptance.path_lengths > 0  # a captured tree may be padded
        if draft.is_united:
            assert draft.column is not None, "united drafts have columns"
            ratios = on_own_nodes(ratios, draft.column, proposal, draft.grown.num_columns)
        self.acceptance_model.learn(proposal, ratios, is_live)

    def leave(self, count: Tensor) -> bool:
        """Leave nodes of the next tree to another drafter."""
        self._left_out.copy_(count)
        return True

    def read_prompts(self, rows: Sequence[int], hidden: Tensor) -> None:
        """Let a head read the target's hidden states."""
        self.state.read_prompts(rows, hidden)

    def begin(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Begin other texts; the draft model runs their prompts before the next tree."""
        self.state.begin(rows, prompts, self.prefixes)
        if self._own is not None:
            self._own.begin(rows, prompts)
        if self._growth is not None:
            for row in rows:
                self.acceptance_model.reset(row)
            self._read_prompts(rows)

    def select(self, rows: Tensor, rng: Random, prompts: list[Sequence[int]] | None = None) -> Self:
        """Copy the state and what the acceptance model has learnt; without ``prompts`` the host reads the rows."""
        other = copy(self)
        other.state, other.rng, other._left_out = self.state.select(rows, prompts), rng, self._left_out[rows]
        if self._growth is not None:
            other.acceptance_model = self.acceptance_model.select(rows)
        other._probs, other._own = None, None if self._own is None else self._own.select(rows)
        return other

    def reserve(self, max_length: int, growth: Growth | None, budget: int, *, begins: bool) -> None:
        """Note the sizes of the state; with ``begins`` allocate it and run the prompts."""
        growth = ModelDrafter.default_growth if growth is None else growth
        self._use(growth)
        if budget > 1:
            largest = self._plan(growth, budget)
            self._most_run, self.state.max_nodes = num_run(largest), columns_run(largest)
        self.state.reserve_length(max_length)
        if begins:
            self.state.run_prompts()

    def _use(self, growth: Growth) -> None:
        """Take the acceptance model of a growth, unless one of its kind is in use."""
        if growth is self._growth:
            return
        if self._growth is None or not learns_alike(growth, self._growth):
            model = growth.acceptance_model(len(self.state.prompts), self.state.device)
            check_kind(growth, "acceptance_model", model, AcceptanceModel, "a stree.growth.AcceptanceModel")
            self.acceptance_model = model if is_ours(model) else StoppedModel(model, Stop())  # it checks what returns
            self._read_prompts(range(len(self.state.prompts)))
            self.state.version += 1
        self._growth, self._plans = growth, {}

    def _read_prompts(self, rows: Sequence[int]) -> None:
        """Let the acceptance model read the prompts of some rows."""
        prompts = [torch.tensor(prompt, dtype=torch.long) for prompt in self.state.prompts]
        lengths = torch.tensor([len(prompt) if row in rows else 0 for row, prompt in enumerate(prompts)])
        tokens = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        device = self.state.device
        self.acceptance_model.read_text(tokens.to(device), None, lengths.to(device, torch.int32))
