"""Two drafters' trees in one: what was retrieved and what a model drafts (RASD, arXiv 2503.03434).

Lossless in either order, because retrieved nodes are DELTA and the verifier tests siblings in the order of the tree.
Drafted first: at every node the model's children are tested in draw order and then the retrieved ones that it does not
have already.  Retrieved first: the retrieved children of the root are tested, then the model's, which are drawn from
its distribution without them, so none is drawn twice.  Whether a retrieved node is kept depends on the texts, on the
draft's distribution and on tokens drawn above it, never on the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stree.checks import check_shares
from stree.drafters.base import Draft, Drafter, DraftRun, in_turn
from stree.drafters.budget_split import draws_by_value, retrieved_share
from stree.drafters.draft_state import Grown
from stree.drafters.hiding import Hiding, has_share
from stree.drafters.host_copies import AcceptedTokens, downloaded
from stree.drafters.merge import append_best, keep_best, with_delta
from stree.drafters.retrieval_calibration import RetrievalCalibration
from stree.growth import Growth, Plan
from stree.kernels.dispatch import host_can_read
from stree.kernels.host_copies import upload
from stree.models.tree_lm import TreeLM
from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["FusedDrafter"]


class FusedDrafter(Drafter):
    """Draft with a model and from retrieved text at once.

    Both share one budget by value, the probability that a node is right: retrieval may take nearly all of it, or
    nothing.  Where the model's children are chosen without chance, both trees are made and the best nodes of their
    union kept.  Where they are drawn, what was retrieved takes the places at which it is worth more than a model's node
    typically is, before anything is drawn, and places that are left.  ``FusedDrafter(model, suffix)`` lets siblings of
    the model be tested first, and what was retrieved extends the model's branches; ``FusedDrafter(suffix, model)``
    tests retrieved ones first, and the model drafts beside them.

    Args:
        first: whose nodes are tested first.
        second: the other.  Both give their nodes values.  One of the two retrieves: its nodes are all DELTA, such as
            ``SuffixDrafter``'s; the nodes of the other may be sampled.
        least_value: least value of a retrieved node.
        least_share: least probability that the draft's distribution gives a retrieved first token, at temperature 0
            that of the logits themselves (RASD's pruning; the paper's own threshold was not found).  With the
            retrieving drafter first it is used when sampling alone.

    Raises:
        TypeError: a part that is no drafter, or two that run models.
        ValueError: a threshold outside [0, 1].
    """

    def __init__(self, first: Drafter, second: Drafter, *, least_value: float = 0.0, least_share: float = 0.01) -> None:
        check_shares(least_value=least_value, least_share=least_share)
        for part in (first, second):
            if not isinstance(part, Drafter):
                raise TypeError(f"FusedDrafter needs drafters, such as ModelDrafter(lm), got {type(part).__name__}")
        if first.models and second.models:
            names = f"{type(first).__name__} and {type(second).__name__}"
            raise TypeError(f"FusedDrafter needs a drafter that runs no model, got {names}")
        self.first, self.second, self.least_value, self.least_share = first, second, least_value, least_share

    @property
    def default_growth(self) -> Growth | None:
        """That of the drafter that has one, the first before the second."""
        return self.first.default_growth or self.second.default_growth

    @property
    def models(self) -> Sequence[TreeLM]:
        """The models of both parts."""
        return [*self.first.models, *self.second.models]

    @property
    def hidden_layers(self) -> Sequence[int] | None:
        """What the head among the parts reads."""
        return self.first.hidden_layers or self.second.hidden_layers

    def with_model(self, change: Callable[[TreeLM], TreeLM]) -> FusedDrafter:
        """Return a drafter over ``change`` of the parts' models."""
        first, second = self.first.with_model(change), self.second.with_model(change)
        return FusedDrafter(first, second, least_value=self.least_value, least_share=self.least_share)

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> _FusedRun:
        """Begin a run of both.

        Raises:
            TypeError: a part whose tree cannot be extended.
        """
        parts = (self.second, self.first) if self.second.models else (self.first, self.second)
        run = _FusedRun(parts, vocab_size, prompts, rng, self.least_value, self.least_share)
        run.hiding = Hiding() if self.second.models else None
        return run


class _FusedRun(DraftRun):
    """Both runs; trees are united on the host, where retrieval happens anyway.

    The tree that is verified has all nodes in the order of testing, without padding between them, so that a node's
    number depends on its own row only.

    Args:
        drafters: the one whose nodes may be sampled, and the one that retrieves.
        vocab_size: of the target.
        prompts: of the first texts.
        rng: random numbers at the ends of the prompts.
        least_value: see ``FusedDrafter``.
        least_share: likewise.

    Attributes:
        hiding: hides retrieved tokens from the drafting run's model, where they are tested first; else None.
    """

    hiding: Hiding | None = None
    _accepted: AcceptedTokens | None = None  # of the last step, where they were not read

    def __init__(
        self,
        drafters: tuple[Drafter, Drafter],
        vocab_size: int,
        prompts: Sequence[Sequence[int]],
        rng: Random,
        least_value: float,
        least_share: float,
    ) -> None:
        self._least_value, self._least_share = least_value, least_share
        self._drafting, self._retrieving = (self._start(drafter, vocab_size, prompts, rng) for drafter in drafters)
        self.can_begin = self._drafting.can_begin and self._retrieving.can_begin
        self._calibration = RetrievalCalibration(len(prompts))

    @staticmethod
    def _start(drafter: Drafter, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> DraftRun:
        run = drafter.start(vocab_size, prompts, rng)
        if not run.can_extend:
            raise TypeError(f"FusedDrafter needs drafters whose trees can be extended, got {type(drafter).__name__}")
        return run

    @property
    def version(self) -> int:  # type: ignore[override]
        """That of the drafting run."""
        return self._drafting.version

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Retrieve, draft with what the budget leaves, unite both trees."""
        self._learn()
        temperature = 0.0 if growth is None else growth.sampling.temperature
        self._retrieving.forced = self.forced
        self._retrieving.sampling = self._drafting.sampling = self.sampling
        found = self._retrieving.propose(pending, growth, budget)
        retrieved = self._rated(found, temperature)
        assert retrieved.values is not None, "retrieved trees have values"
        is_kept = (retrieved.values >= self._least_value) & ~retrieved.tree.is_padding
        plan = None if growth is None else growth.plan(budget)
        share, own = retrieved_share(retrieved, is_kept, budget), budget
        is_by_value = plan is not None and draws_by_value(plan, growth)
        is_shared = plan is None or plan.is_pruned or (is_by_value and self._drafting.leave(*upload([share], pending)))
        if plan is not None and not is_shared:
            own = plan.num_nodes + 1
            share = torch.full_like(share, budget - own)
        if self.hiding is not None:
            # Tokens that are hidden from the model must be in the tree: the best ones, as many as certainly fit.
            is_kept[:, 1:] &= is_kept[:, 1:].cumsum(1) <= share[:, None]
            (shown,) = upload([is_kept.int()], pending)
            self.hiding.hide(found.tree, shown > 0, growth, self._least_share)
        self._drafting.processor = in_turn(self.processor, self.hiding)
        num_calls = 0 if self.seen is None else self._drafting.prepare(self.seen, own)
        work = partial(self._drafting.propose, pending, growth, own)
        # What is hidden is chosen on the host, so such a draft is another one in every step.
        is_alike = self.hiding is None and self._drafting.is_on_device
        draft = self.launch(self, (f"drafts of budget {own}", growth), work) if is_alike else work()
        draft = replace(draft, num_calls=draft.num_calls + num_calls)
        if self.hiding is not None:
            is_likely = self.hiding.shown
        elif draft.probs is not None or isinstance(draft.grown, Grown):
            root = draft.grown.root_logits.softmax(-1) if draft.probs is None else draft.probs.probs[:, 0]
            is_likely = has_share(found.tree, root, self._least_share)
        else:
            is_likely = None
        self.draft = self._united(draft, retrieved, is_kept, is_likely, plan, budget)
        self._drafting.draft = self._retrieving.draft = self.draft
        return self.draft

    def _rated(self, retrieved: Draft, temperature: float | Tensor) -> Draft:
        """Return what the retrieving run has proposed, on the host, with calibrated values."""
        if retrieved.probs is not None or retrieved.values is None:
            raise ValueError("a drafter of FusedDrafter must draft deterministic nodes with values")
        given = torch.as_tensor(temperature, dtype=torch.float64, device=retrieved.values.device)
        tree, values, given = _on_host(retrieved.tree, retrieved.values, given)
        return replace(retrieved, tree=tree, values=self._calibration.rate(tree, values, given))

    def _united(
        self, on_device: Draft, retrieved: Draft, is_kept: Tensor, is_likely: Tensor | None, plan: Plan | None,
        budget: int,
    ) -> Draft:  # fmt: skip
        """Unite both trees on the host in the order of testing."""
        if on_device.values is None:
            raise ValueError("a drafter of FusedDrafter must give its nodes values")
        host_tree, host_values, *likely = _on_host(
            on_device.tree, on_device.values, *([] if is_likely is None else [is_likely])
        )
        draft = replace(on_device, tree=host_tree, values=host_values)
        is_kept = is_kept & likely[0] if likely else is_kept
        # Only nodes that were chosen without chance may be dropped again; those that were drawn stay.
        is_chosen_after = (plan is None or plan.is_pruned) and draft.probs is None
        most = budget - (1 if is_chosen_after else draft.tree.num_nodes)
        tree, values = append_best(draft, retrieved, is_kept, most, shares=self.hiding is None)
        if is_chosen_after:
            tree = keep_best(tree, values, budget)
        key = tree.is_padding.long()
        if self.hiding is not None:
            is_own = torch.arange(key.shape[1], device=key.device) < draft.tree.tokens.shape[1]
            key = 2 * key + is_own
            key[:, 0] = 0
        size = int((~tree.is_padding).sum(1).max())
        order = key.sort(dim=1, stable=True).indices[:, :size].contiguous()
        values = (values * ~tree.is_padding).gather(1, order)
        pruned = tree.prune(order)
        if not host_can_read(on_device.values):
            parts = [order, pruned.tokens, values.float(), pruned.parents.int(), pruned.depths.int()]
            order, tokens, values, parents, depths = upload([part.contiguous() for part in parts], on_device.values)
            pruned = TokenTree.unchecked(tokens, parents, depths)
        probs, column = with_delta(on_device, key.shape[1] - draft.tree.tokens.shape[1], order)
        depth = max(draft.max_depth, retrieved.max_depth)
        return Draft(pruned, probs, depth, draft.num_calls, values, column=column, is_united=True, grown=draft.grown)

    def observe(self, acceptance: Acceptance) -> None:
        """Pass the accepted paths to both runs."""
        self._drafting.observe(acceptance)
        self._retrieving.observe(acceptance)
        self._accepted = AcceptedTokens(self.draft.tree.tokens, acceptance)

    def _learn(self) -> None:
        """Learn from the tokens that were accepted in the last step."""
        if self._accepted is not None:
            self._calibration.learn(self._accepted.read())
            self._accepted = None

    def begin(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Begin other texts in both."""
        self._learn()
        self._drafting.begin(rows, prompts)
        self._retrieving.begin(rows, prompts)
        for row in rows:
            self._calibration.forget(row)

    @property
    def can_select(self) -> bool:  # type: ignore[override]
        """Where nothing is hidden from the model, rows can be selected if both runs can do it."""
        return self.hiding is None and self._drafting.can_select and self._retrieving.can_select

    def select(self, rows: Tensor, rng: Random) -> _FusedRun:
        self._learn()
        other = copy(self)
        other._calibration = self._calibration.select(rows.tolist())
        other._drafting, other._retrieving = (run.select(rows, rng) for run in (self._drafting, self._retrieving))
        return other

    def read_prompts(self, rows: Sequence[int], hidden: Tensor) -> None:
        self._drafting.read_prompts(rows, hidden)

    def reserve(self, max_length: int, growth: Growth | None, budget: int, *, begins: bool) -> None:
        """Reserve memory for both."""
        for run in (self._drafting, self._retrieving):
            run.reserve(max_length, growth, budget, begins=begins)


def _on_host(tree: TokenTree, values: Tensor, *more: Tensor) -> tuple[Any, ...]:
    """Copy a tree, the values of its nodes and other tensors to the host; where it can read them, nothing is copied."""
    if host_can_read(values):
        return tree, values, *more
    tokens, parents, values, *more_copies = downloaded([tree.tokens, tree.parents, values, *more])
    return TokenTree.unchecked(tokens, parents), values, *more_copies
