"""Two drafters' trees in one: what was retrieved and what a model drafts (RASD, arXiv 2503.03434).

Lossless, because retrieved nodes are DELTA and the verifier tests siblings in the order of the tree: at every node the
model's children in draw order, and then the retrieved ones that it does not have already.  Whether a retrieved node is
kept depends on the texts, on the draft's distribution and on tokens drawn above it, never on the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from stree.checks import check_shares
from stree.drafters.base import Draft, Drafter, DraftRun
from stree.drafters.budget_split import draws_by_value, retrieved_share
from stree.drafters.checked import proposed, selected, started
from stree.drafters.draft_state import Grown
from stree.drafters.merge import append_best, has_share, keep_best, with_delta
from stree.growth import Growth, Plan
from stree.kernels.host_copies import download, upload
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
    typically is, before anything is drawn, and places that are left.  What was retrieved extends the model's branches,
    and siblings of the model are tested first, whichever drafter is named first.

    Args:
        first: a drafter; one of the two retrieves: its nodes are all DELTA, such as ``SuffixDrafter``'s; the nodes of
            the other may be sampled.  Both give their nodes values.
        second: the other.
        least_share: least probability that the draft's distribution gives a retrieved first token, at temperature 0
            that of the logits themselves (RASD's pruning; the paper's own threshold was not found).

    Raises:
        TypeError: a part that is no drafter, or two that run models.
        ValueError: a threshold outside [0, 1].
    """

    def __init__(self, first: Drafter, second: Drafter, *, least_share: float = 0.01) -> None:
        check_shares(least_share=least_share)
        for part in (first, second):
            if not isinstance(part, Drafter):
                raise TypeError(f"FusedDrafter needs drafters, such as ModelDrafter(lm), got {type(part).__name__}")
        if first.models and second.models:
            names = f"{type(first).__name__} and {type(second).__name__}"
            raise TypeError(f"FusedDrafter needs a drafter that runs no model, got {names}")
        self.first, self.second, self.least_share = first, second, least_share

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
        return FusedDrafter(self.first.with_model(change), self.second.with_model(change), least_share=self.least_share)

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> _FusedRun:
        """Begin a run of both.

        Raises:
            TypeError: a part whose tree cannot be extended.
        """
        parts = (self.second, self.first) if self.second.models else (self.first, self.second)
        return _FusedRun(parts, vocab_size, prompts, rng, self.least_share)


class _FusedRun(DraftRun):
    """Both runs; trees are united on the host, where retrieval happens anyway.

    The tree that is verified has all nodes in the order of testing, without padding between them, so that a node's
    number depends on its own row only.

    Args:
        drafters: the one whose nodes may be sampled, and the one that retrieves.
        vocab_size: of the target.
        prompts: of the first texts.
        rng: random numbers at the ends of the prompts.
        least_share: see ``FusedDrafter``.
    """

    def __init__(
        self,
        drafters: tuple[Drafter, Drafter],
        vocab_size: int,
        prompts: Sequence[Sequence[int]],
        rng: Random,
        least_share: float,
    ) -> None:
        self._least_share, self._vocab_size = least_share, vocab_size
        self._drafting, self._retrieving = (self._start(drafter, vocab_size, prompts, rng) for drafter in drafters)
        self.can_begin = self._drafting.can_begin and self._retrieving.can_begin
        self.can_select = self._drafting.can_select and self._retrieving.can_select

    @staticmethod
    def _start(drafter: Drafter, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> DraftRun:
        run = started(drafter, vocab_size, prompts, rng)
        if not run.can_extend:
            raise TypeError(f"FusedDrafter needs drafters whose trees can be extended, got {type(drafter).__name__}")
        return run

    @property
    def version(self) -> int:  # type: ignore[override]
        """That of the drafting run."""
        return self._drafting.version

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Retrieve, draft with what the budget leaves, unite both trees."""
        self._retrieving.forced = self.forced
        self._retrieving.sampling = self._drafting.sampling = self.sampling
        found = proposed(self._retrieving, self._vocab_size, pending, growth, budget, has_root=False)
        retrieved = self._retrieved(found)
        is_kept = ~retrieved.tree.is_padding
        plan = None if growth is None or budget == 1 else growth.plan(budget)  # 1: a plain step, without a tree
        share, own = retrieved_share(retrieved, is_kept, budget), budget
        is_by_value = plan is not None and draws_by_value(plan, growth)
        is_shared = plan is None or plan.is_pruned or (is_by_value and self._drafting.leave(*upload([share], pending)))
        if plan is not None and not is_shared:
            own = plan.num_nodes + 1
        self._drafting.processor = self.processor
        num_calls = 0 if self.seen is None else self._drafting.prepare(self.seen, own)
        work = partial(proposed, self._drafting, self._vocab_size, pending, growth, own)
        is_on_device = self._drafting.is_on_device
        draft = self.launch(self, (f"drafts of budget {own}", growth), work) if is_on_device else work()
        draft = replace(draft, num_calls=draft.num_calls + num_calls)
        is_likely = None
        if draft.probs is not None or isinstance(draft.grown, Grown):
            root = draft.grown.root_logits.softmax(-1) if draft.probs is None else draft.probs.probs[:, 0]
            is_likely = has_share(found.tree, root, self._least_share)
        self.draft = self._united(draft, retrieved, is_kept, is_likely, plan, budget)
        self._drafting.draft = self._retrieving.draft = self.draft
        return self.draft

    @staticmethod
    def _retrieved(draft: Draft) -> Draft:
        """Return what the retrieving run has proposed, on the host."""
        if draft.probs is not None or draft.values is None:
            raise ValueError("a drafter of FusedDrafter must draft deterministic nodes (probs=None) with values")
        tree, values = _on_host(draft.tree, draft.values)
        return replace(draft, tree=tree, values=values)

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
        tree, values = append_best(draft, retrieved, is_kept, most)
        if is_chosen_after:
            tree = keep_best(tree, values, budget)
        size = int((~tree.is_padding).sum(1).max())
        order = tree.is_padding.long().sort(dim=1, stable=True).indices[:, :size].contiguous()
        values = (values * ~tree.is_padding).gather(1, order)
        dense = tree.prune(order)  # without padding between nodes
        parts = [order, dense.tokens, values.float(), dense.parents.int(), dense.depths.int()]
        order, tokens, values, parents, depths = upload([part.contiguous() for part in parts], on_device.values)
        probs, column = with_delta(on_device, tree.tokens.shape[1] - draft.tree.tokens.shape[1], order)
        depth = max(draft.max_depth, retrieved.max_depth)
        tree = TokenTree.unchecked(tokens, parents, depths)
        return Draft(tree, probs, depth, draft.num_calls, values, column=column, is_united=True, grown=draft.grown)

    def observe(self, acceptance: Acceptance) -> None:
        """Pass the accepted paths to both runs."""
        self._drafting.observe(acceptance)
        self._retrieving.observe(acceptance)

    def begin(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Begin other texts in both."""
        self._drafting.prefixes = self.prefixes
        self._drafting.begin(rows, prompts)
        self._retrieving.begin(rows, prompts)

    def select(self, rows: Tensor, rng: Random) -> _FusedRun:
        other = copy(self)
        other._drafting, other._retrieving = (selected(run, rows, rng) for run in (self._drafting, self._retrieving))
        return other

    def read_prompts(self, rows: Sequence[int], hidden: Tensor) -> None:
        self._drafting.read_prompts(rows, hidden)

    def reserve(self, max_length: int, growth: Growth | None, budget: int, *, begins: bool) -> None:
        """Reserve memory for both."""
        for run in (self._drafting, self._retrieving):
            run.reserve(max_length, growth, budget, begins=begins)


def _on_host(tree: TokenTree, values: Tensor, *more: Tensor) -> tuple[Any, ...]:
    """Copy a tree, the values of its nodes and other tensors to the host; where it can read them, nothing is copied."""
    tokens, parents, values, *more_copies = download([tree.tokens, tree.parents, values, *more])
    return tree if tokens is tree.tokens else TokenTree.unchecked(tokens, parents), values, *more_copies
