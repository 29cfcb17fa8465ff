"""Two drafters' trees in one: what was retrieved and what a model drafts (RASD, arXiv 2503.03434).

Lossless in either order, because retrieved nodes are DELTA and the verifier tests siblings in the order of the tree.
Drafted first: at every node the model's children are tested in draw order and then the retrieved ones that it does not
have already.  Retrieved first: the retrieved children of the root are tested, then the model's, which are drawn from
its distribution without them, so none is drawn twice.  Whether a retrieved node is kept depends on the texts, on the
draft's distribution and on tokens drawn above it, never on the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from stree.drafters.base import (
    Bounded,
    Draft,
    Drafter,
    DraftRun,
    Extensible,
    HasModel,
    Replay,
    Restartable,
    Resumable,
    Slotted,
    padded_prompts,
)
from stree.drafters.merge import graft, keep_best, with_delta
from stree.drafters.retrieval_calibration import RetrievalCalibration
from stree.drafters.tree_builder import prune
from stree.growth import Growth, Plan
from stree.growth.calibrated import typical_values
from stree.models.tree_lm import TreeLM
from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["FusedDrafter"]

TYPICAL_DEPTH, TYPICAL_RANKS = 6, 4  # of the tree that retrieved nodes are compared with before one is drawn
UNLIKELY = -1e30  # logit of a hidden token: its probability is 0 unless nothing else is left, and then no NaN


class FusedDrafter:
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
        least_share: least probability that the draft's distribution gives a retrieved first token; used when sampling,
            where the distribution is at hand (RASD's pruning).

    Raises:
        TypeError: a part that is no drafter, or two that run models.
        ValueError: a threshold outside [0, 1].
    """

    def __init__(self, first: Drafter, second: Drafter, *, least_value: float = 0.0, least_share: float = 0.01) -> None:
        for name, value in (("least_value", least_value), ("least_share", least_share)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}")
        for part in (first, second):
            if not hasattr(part, "start"):
                raise TypeError(f"FusedDrafter needs drafters, such as ModelDrafter(lm), got {type(part).__name__}")
        if isinstance(first, HasModel) and isinstance(second, HasModel):
            names = f"{type(first).__name__} and {type(second).__name__}"
            raise TypeError(f"FusedDrafter needs a drafter that runs no model, got {names}")
        self.first, self.second, self.least_value, self.least_share = first, second, least_value, least_share

    @property
    def default_growth(self) -> Growth | None:
        """That of the drafter that has one, the first before the second."""
        growths = (getattr(part, "default_growth", None) for part in (self.first, self.second))
        return next((growth for growth in growths if growth is not None), None)

    @property
    def models(self) -> Sequence[TreeLM]:
        """The models of both parts."""
        parts = (self.first, self.second)
        return [model for part in parts if isinstance(part, HasModel) for model in part.models]

    def with_model(self, change: Callable[[TreeLM], TreeLM]) -> FusedDrafter:
        """Give a drafter over ``change`` of the parts' models."""
        first, second = (
            part.with_model(change) if isinstance(part, HasModel) else part for part in (self.first, self.second)
        )
        return FusedDrafter(first, second, least_value=self.least_value, least_share=self.least_share)

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> _FusedRun:
        """Begin a run of both.

        Raises:
            TypeError: a part whose tree cannot be extended.
        """
        drafting, retrieving = self.first, self.second
        hiding: list[_HidingLM] = []
        if isinstance(self.second, HasModel):
            drafting, retrieving = self.second.with_model(lambda lm: _hidden(lm, hiding)), self.first
        begin = [partial(_begin, part, vocab_size) for part in (drafting, retrieving)]
        run = _FusedRun(begin[0], begin[1], prompts, rng, self.least_value, self.least_share)
        run.hiding = hiding[0] if hiding else None
        return run


def _begin(part: Drafter, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> DraftRun:
    """Begin a part's run.

    Raises:
        TypeError: its tree cannot be extended.
    """
    run = part.start(vocab_size, prompts, rng)
    if not isinstance(run, Extensible):
        raise TypeError(f"FusedDrafter needs drafters whose trees can be extended, got {type(part).__name__}")
    return run


@runtime_checkable
class Yielding(Protocol):
    """A run that can leave places of its budget to others, as many in every row as that row needs."""

    def leave(self, count: Tensor) -> None:
        """Leave int64[batch] nodes of the next budget to others; a growth that draws by value heeds it."""
        ...


class _FusedRun:
    """Both runs; trees are united on the host, where retrieval happens anyway.

    The drafting run sees its own nodes first and the retrieved ones behind them; the tree that is verified has them in
    the order of testing, without padding between them, so that a node's number is a matter of its own row.

    Args:
        drafting: begins the run whose nodes may be sampled.
        retrieving: begins the other.
        prompts: of the first texts.
        rng: numbers behind them.
        least_value: see ``FusedDrafter``.
        least_share: likewise.

    Attributes:
        hiding: the model of the drafting run, where retrieved nodes are tested first; else None.
        replay: see ``Composed``.
    """

    hiding: _HidingLM | None = None
    replay: Replay | None = None

    def __init__(
        self,
        drafting: Callable[[Sequence[Sequence[int]], Random], DraftRun],
        retrieving: Callable[[Sequence[Sequence[int]], Random], DraftRun],
        prompts: Sequence[Sequence[int]],
        rng: Random,
        least_value: float,
        least_share: float,
    ) -> None:
        self._begin, self._rng = (drafting, retrieving), rng
        self._least_value, self._least_share = least_value, least_share
        self._runs = drafting(prompts, rng), retrieving(prompts, rng)
        self._calibration = RetrievalCalibration(len(prompts))
        self._tokens: Tensor  # int64[batch, n], of the tree verified
        self._order: Tensor | None = None  # int64[batch, n], the drafting run's number of each node verified

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Retrieve, draft with what the budget leaves, graft."""
        drafting, retrieving = self._runs
        retrieved = retrieving.propose(pending, growth, budget)
        if retrieved.probs is not None or retrieved.values is None:
            raise ValueError("a drafter of FusedDrafter must draft deterministic nodes with values")
        temperature = 0.0 if growth is None else growth.sampling.temperature
        retrieved = replace(retrieved, values=self._calibration.rate(retrieved.tree, retrieved.values, temperature))
        assert retrieved.values is not None, "just rated"
        is_worth = (retrieved.values >= self._least_value) & ~retrieved.tree.is_padding
        plan = None if growth is None else growth.plan(budget)
        room, own = _room(retrieved, is_worth, budget), budget
        if plan is not None and not plan.is_pruned:
            if isinstance(drafting, Yielding) and _goes_by_row(plan, growth):
                drafting.leave(room)
            else:
                own = plan.num_nodes + 1
                room = torch.full_like(room, budget - own)
        if self.hiding is not None:
            # What is hidden from the model must be in the tree: the best, as many as there is room for for sure.
            is_worth[:, 1:] &= is_worth[:, 1:].cumsum(1) <= room[:, None]
            self.hiding.hide(retrieved.tree, is_worth, growth, self._least_share)
        draft = self._drafted(pending, growth, own)
        if self.hiding is not None:
            is_worth = self.hiding.shown
        elif draft.probs is not None:
            is_worth &= _has_share(retrieved.tree, draft.probs.probs[:, 0], self._least_share)
        return self._united(draft, retrieved, is_worth, budget, is_chosen_after=plan is None or plan.is_pruned)

    def _drafted(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Let the model draft: captured and replayed where it is told nothing by the host."""
        run = self._runs[0]
        if self.replay is None or self.hiding is not None or budget == 1 or not isinstance(run, Resumable):
            return run.propose(pending, growth, budget)
        num_calls = run.settle(budget)

        def work() -> tuple[Draft, Any]:
            return run.propose(pending, growth, budget), run.made

        found, is_replayed = self.replay(run, f"drafts of budget {budget}, {growth!r}", work)
        draft: Draft = found[0]
        if is_replayed:
            run.made = found[1]
            run.replayed(budget)
        return replace(draft, num_calls=draft.num_calls + num_calls)

    def _united(self, draft: Draft, retrieved: Draft, is_worth: Tensor, budget: int, *, is_chosen_after: bool) -> Draft:
        """Unite both trees, bring the nodes into the order of testing and tell both runs."""
        assert retrieved.values is not None, "propose looked"
        drafting, retrieving = self._runs
        assert isinstance(drafting, Extensible) and isinstance(retrieving, Extensible), "start looked"
        if draft.values is None:
            raise ValueError("a drafter of FusedDrafter must give its nodes values")
        is_chosen_after &= draft.probs is None  # what was drawn stays
        room = budget - (1 if is_chosen_after else draft.tree.num_nodes)
        tree, values = graft(draft, retrieved, is_worth, room, shares=self.hiding is None)
        drafting.extend(tree)
        if is_chosen_after:
            tree = keep_best(tree, values, budget)
        place = tree.is_padding.long()
        if self.hiding is not None:
            is_own = torch.arange(place.shape[1], device=place.device) < draft.tree.tokens.shape[1]
            place = 2 * place + is_own
            place[:, 0] = 0
        size = int((~tree.is_padding).sum(1).max())
        self._order = order = place.sort(dim=1, stable=True).indices[:, :size]
        self._num_columns = place.shape[1]
        probs = with_delta(draft.probs, place.shape[1] - draft.tree.tokens.shape[1], order)
        values = (values * ~tree.is_padding).gather(1, order)
        tree = prune(tree, order)
        retrieving.extend(tree)
        self._tokens = tree.tokens
        return Draft(tree, probs, max(draft.max_depth, retrieved.max_depth), draft.num_calls, values)

    def observe(self, acceptance: Acceptance) -> None:
        """Tell both, the drafting run by its own numbers."""
        assert self._order is not None, "observe follows propose"
        drafting, retrieving = self._runs
        path, ratios = acceptance.path, acceptance.ratios
        own = torch.where(path >= 0, self._order.gather(1, path.clamp(min=0).long()), -1).to(path.dtype)
        if ratios is not None:
            ratios = ratios.new_zeros(len(ratios), self._num_columns).scatter_(1, self._order, ratios)
        drafting.observe(replace(acceptance, path=own, ratios=ratios))
        retrieving.observe(acceptance)
        accepted = self._tokens.gather(1, path.clamp(min=0).long()).tolist()
        following = acceptance.next_token.tolist()
        self._calibration.learn(
            [
                [*accepted[row][1:length], following[row]] if length else []
                for row, length in enumerate(acceptance.path_lengths.tolist())
            ]
        )

    def restart(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin as many other texts; a model keeps its memory."""
        drafting, (begin, retrieve) = self._runs[0], self._begin
        rng = self._rng.at(padded_prompts(prompts)[1].to(self._rng.positions.device))
        if isinstance(drafting, Restartable):
            drafting.restart(prompts)
        else:
            drafting = begin(prompts, rng)
        self._runs, self._calibration, self._order = (
            (drafting, retrieve(prompts, rng)),
            RetrievalCalibration(len(prompts)),
            None,
        )

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        """Tell both."""
        for run in self._runs:
            assert isinstance(run, Slotted), f"{type(run).__name__} cannot take up a text in mid-run"
            run.admit(row, prompt)
        self._calibration.forget(row)

    def reserve(self, max_length: int, growth: Growth | None, budget: int, *, begins: bool) -> None:
        """Tell those that it matters to."""
        for run in self._runs:
            if isinstance(run, Bounded):
                run.reserve(max_length, growth, budget, begins=begins)


class _HidingLM:
    """A draft model that does not know the first tokens that were retrieved: its tree grows beside theirs."""

    def __init__(self, lm: TreeLM) -> None:
        self._lm = lm
        self._offered: TokenTree | None = None
        self._sampling, self._least_share = Sampling(), 0.0
        self.shown: Tensor  # bool[batch, n], the retrieved nodes that stay; the model's first call prunes them

    def __getattr__(self, name: str) -> Any:
        """Pass on whatever else the model has."""
        return getattr(self._lm, name)

    def hide(self, tree: TokenTree, is_worth: Tensor, growth: Growth | None, least_share: float) -> None:
        """Hide the first tokens of bool[batch, n] nodes of a tree while the next one is drafted."""
        self._offered, self.shown, self._worth = tree, is_worth, is_worth
        self._sampling, self._least_share = Sampling() if growth is None else growth.sampling, least_share

    def verify(self, state: Any, tree: TokenTree, first: int = 0) -> Tensor:
        """Score a tree; the root is scored by a tree's first call."""
        logits = self._lm.verify(state, tree, first)
        if first or self._offered is None:
            return logits
        if not self._sampling.is_greedy:
            # The model's tree begins with its last leaf and the root, or with the root and padding.
            root = (tree.parents[:, 1] >= 0).long()
            dist = self._sampling.probs(logits[torch.arange(len(root), device=root.device), root])
            self.shown = self._worth & _has_share(self._offered, dist, self._least_share)
        is_first = self.shown & (self._offered.depths == 1)
        hidden = torch.zeros(len(logits), logits.shape[-1], dtype=torch.int32, device=logits.device)
        hidden.scatter_add_(1, self._offered.tokens, is_first.to(torch.int32))
        return logits.masked_fill(hidden[:, None] > 0, UNLIKELY)


def _hidden(lm: TreeLM, made: list[_HidingLM]) -> TreeLM:
    """Wrap a model, and keep what it is wrapped in."""
    made.append(_HidingLM(lm))
    return cast(TreeLM, made[-1])


def _has_share(tree: TokenTree, dist: Tensor, least: float) -> Tensor:
    """Tell which nodes stand below a first token that the root's distribution finds likely enough: bool[batch, n]."""
    unlikely = (tree.depths == 1) & (dist.gather(1, tree.tokens) < least)
    return ~(tree.ancestor_mask & unlikely[:, None]).any(-1)


def _goes_by_row(plan: Plan, growth: Growth | None) -> bool:
    """Tell whether a growth draws by value, so that every row may have a budget of its own and its numbers stay."""
    is_by_value = all(layer.slots is None for layer in plan.layers)
    return growth is not None and not growth.sampling.is_greedy and is_by_value


def _room(retrieved: Draft, is_worth: Tensor, budget: int) -> Tensor:
    """Count the retrieved nodes that are worth more than what a model's tree typically has in their places.

    Where retrieval is right a model's nodes beside it are of no use, so they count half as far as its first tokens are
    probable.

    Returns:
        int64[batch], at most ``budget - 2`` where that is not negative: the model drafts in any case.
    """
    assert retrieved.values is not None, "propose looked"
    values = retrieved.values * is_worth
    sure = (values * (retrieved.tree.depths == 1)).sum(1, keepdim=True).clamp(max=1)
    typical = values.new_tensor(typical_values(budget - 1, TYPICAL_DEPTH, TYPICAL_RANKS)) * (1 - 0.5 * sure)
    both = torch.cat([values[:, 1:], typical.expand(len(values), -1)], 1)
    most = max(budget - 2, 0)
    best = both.sort(dim=1, descending=True, stable=True).indices[:, : budget - 1]
    is_taken = (best < values.shape[1] - 1) & (both.gather(1, best) > 0)
    return is_taken.sum(1).clamp(max=most)
