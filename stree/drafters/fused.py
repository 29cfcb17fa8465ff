"""Two drafters' trees in one: what was retrieved and what a model drafts (RASD, arXiv 2503.03434).

Lossless in either order, because retrieved nodes are DELTA and the verifier tests siblings in the order of the tree.
Drafted first: at every node the model's children are tested in draw order and then the retrieved ones that it does not
have already.  Retrieved first: the retrieved children of the root are tested, then the model's, which are drawn from
its law without them, so none is drawn twice.  Whether a retrieved node is kept depends on the texts, on the draft's law
and on tokens drawn above it, never on the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from stree.drafters.grown import prune
from stree.drafters.protocol import Bounded, Draft, Drafter, DraftRun, Extensible, HasModel, Slotted
from stree.growth import Growth
from stree.models.tree_lm import TreeLM
from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify import DELTA, Acceptance, DraftLaws

__all__ = ["FusedDrafter"]

UNLIKELY = -1e30  # logit of a hidden token: its probability is 0 unless nothing else is left, and then no NaN


class FusedDrafter:
    """Draft with a model and from retrieved text at once.

    Retrieved continuations of enough value take their places in the budget first, at most half of it; the model's tree
    has the rest, and places that retrieval leaves empty.  ``FusedDrafter(model, suffix)`` lets siblings of the model
    be tested first, and what was retrieved extends the model's branches; ``FusedDrafter(suffix, model)`` tests
    retrieved ones first, and the model drafts beside them.

    Args:
        first: whose nodes are tested first.
        second: the other.  One of the two retrieves: its nodes are all DELTA and carry values, such as
            ``SuffixDrafter``'s; the nodes of the other may be sampled.
        least_value: least value of a retrieved node.
        least_share: least probability that the draft's law gives a retrieved first token; used when sampling, where the
            law is at hand (RASD's pruning).

    Raises:
        ValueError: a threshold outside [0, 1].
    """

    def __init__(self, first: Drafter, second: Drafter, *, least_value: float = 0.2, least_share: float = 0.01) -> None:
        for name, value in (("least_value", least_value), ("least_share", least_share)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value}")
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
            TypeError: a part whose tree cannot be extended, or two that run models.
        """
        drafting, retrieving = self.first, self.second
        hiding: list[_HidingLM] = []
        if isinstance(self.second, HasModel):
            if isinstance(self.first, HasModel):
                raise TypeError(
                    "FusedDrafter needs a drafter that runs no model, "
                    f"got {type(self.first).__name__} and {type(self.second).__name__}"
                )
            drafting, retrieving = self.second.with_model(lambda lm: _hidden(lm, hiding)), self.first
        runs = [part.start(vocab_size, prompts, rng) for part in (drafting, retrieving)]
        for part, run in zip((drafting, retrieving), runs, strict=True):
            if not isinstance(run, Extensible):
                raise TypeError(f"FusedDrafter needs drafters whose trees can be extended, got {type(part).__name__}")
        return _FusedRun(runs[0], runs[1], self.least_value, self.least_share, hiding[0] if hiding else None)


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
    """

    def __init__(
        self, drafting: DraftRun, retrieving: DraftRun, least_value: float, least_share: float, hiding: _HidingLM | None
    ) -> None:
        self._runs = (drafting, retrieving)
        self._least_value, self._least_share, self._hiding = least_value, least_share, hiding
        self._order: Tensor | None = None  # int64[batch, n], the drafting run's number of each node verified

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Retrieve, draft with what the budget leaves, graft."""
        drafting, retrieving = self._runs
        retrieved = retrieving.propose(pending, growth, budget)
        if retrieved.laws is not None or retrieved.values is None:
            raise ValueError("a drafter of FusedDrafter must draft deterministic nodes with values")
        is_worth = (retrieved.values >= self._least_value) & ~retrieved.tree.is_padding
        room = is_worth[:, 1:].sum(1).clamp(max=budget // 2)
        own = budget
        if isinstance(drafting, Yielding) and _goes_by_row(growth, budget):
            drafting.leave(room)
        else:
            own = max(budget - int(room.max()), _least_budget(growth, budget))
            room = torch.full_like(room, budget - own)
        if self._hiding is not None:
            # What is hidden from the model must be in the tree: the best, as many as there is room for for sure.
            is_worth[:, 1:] &= is_worth[:, 1:].cumsum(1) <= room[:, None]
            self._hiding.hide(retrieved.tree, is_worth, growth, self._least_share)
        draft = drafting.propose(pending, growth, own)
        if self._hiding is not None:
            is_worth = self._hiding.shown
        elif draft.laws is not None:
            is_worth &= _has_share(retrieved.tree, draft.laws.probs[:, 0], self._least_share)
        return self._united(draft, retrieved, is_worth, budget)

    def _united(self, draft: Draft, retrieved: Draft, is_worth: Tensor, budget: int) -> Draft:
        """Unite both trees, bring the nodes into the order of testing and tell both runs."""
        assert retrieved.values is not None, "propose looked"
        drafting, retrieving = self._runs
        assert isinstance(drafting, Extensible) and isinstance(retrieving, Extensible), "start looked"
        kept = retrieved.values * is_worth
        tree, added = _graft(draft.tree, retrieved.tree, kept, budget, shares=self._hiding is None)
        drafting.extend(tree)
        rest = torch.ones_like(kept[:, 0])
        place = tree.is_padding.long()
        if self._hiding is not None:
            is_first = retrieved.tree.depths == 1
            rest = (1 - (kept * is_first).sum(1)).clamp(min=0)  # the model's nodes are right where those are not
            is_own = torch.arange(place.shape[1], device=place.device) < draft.tree.tokens.shape[1]
            place = 2 * place + is_own
            place[:, 0] = 0
        size = int((~tree.is_padding).sum(1).max())
        self._order = order = place.sort(dim=1, stable=True).indices[:, :size]
        self._num_columns = place.shape[1]
        tree = prune(tree, order)
        retrieving.extend(tree)
        values, laws = None, _with_delta(draft.laws, added.shape[1], order)
        if draft.values is not None:
            own = torch.cat([draft.values[:, :1], draft.values[:, 1:] * rest[:, None]], 1)
            values = _below_parents(torch.cat([own, added], 1).gather(1, order), tree)
        return Draft(tree, laws, max(draft.max_depth, retrieved.max_depth), draft.num_calls, values)

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

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        """Tell both."""
        for run in self._runs:
            assert isinstance(run, Slotted), f"{type(run).__name__} cannot take up a text in mid-run"
            run.admit(row, prompt)

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
            law = self._sampling.law(logits[torch.arange(len(root), device=root.device), root])
            self.shown = self._worth & _has_share(self._offered, law, self._least_share)
        is_first = self.shown & (self._offered.depths == 1)
        hidden = torch.zeros(len(logits), logits.shape[-1], dtype=torch.int32, device=logits.device)
        hidden.scatter_add_(1, self._offered.tokens, is_first.to(torch.int32))
        return logits.masked_fill(hidden[:, None] > 0, UNLIKELY)


def _hidden(lm: TreeLM, made: list[_HidingLM]) -> TreeLM:
    """Wrap a model, and keep what it is wrapped in."""
    made.append(_HidingLM(lm))
    return cast(TreeLM, made[-1])


def _has_share(tree: TokenTree, law: Tensor, least: float) -> Tensor:
    """Tell which nodes stand below a first token that the root's law finds likely enough: bool[batch, n]."""
    unlikely = (tree.depths == 1) & (law.gather(1, tree.tokens) < least)
    return ~(tree.ancestor_mask & unlikely[:, None]).any(-1)


def _goes_by_row(growth: Growth | None, budget: int) -> bool:
    """Tell whether a growth draws by value, so that every row may have a budget of its own and its numbers stay."""
    if growth is None or growth.sampling.is_greedy:
        return False
    plan = growth.plan(budget)
    return not plan.is_pruned and not plan.is_heap and all(layer.slots is None for layer in plan.layers)


def _least_budget(growth: Growth | None, budget: int) -> int:
    """Give the nodes that a fixed shape needs, root included; 1 for a shape that takes what it gets."""
    if growth is None:
        return 1
    plan = growth.plan(budget)
    return plan.num_nodes + 1 if plan.is_fixed else 1


def _graft(
    tree: TokenTree, retrieved: TokenTree, values: Tensor, budget: int, *, shares: bool
) -> tuple[TokenTree, Tensor]:
    """Append retrieved nodes of positive value, best first, below the longest prefixes that a tree shares with them.

    Unless it ``shares``, all of them are appended, as its nodes are to be tested after theirs.

    Returns the united tree and the values of the nodes appended, float[batch, more].
    """
    rows = zip(
        tree.tokens.tolist(), tree.parents.tolist(), retrieved.tokens.tolist(), retrieved.parents.tolist(),
        values.tolist(), strict=True,
    )  # fmt: skip
    room = (budget - tree.num_nodes).tolist()
    grafted = [_graft_row(*row, room=left, shares=shares) for row, left in zip(rows, room, strict=True)]
    more = max(len(row) for row in grafted)
    padded = [row + [(0, -1, 0.0)] * (more - len(row)) for row in grafted]
    added = torch.tensor(padded, dtype=torch.float64, device=tree.tokens.device).view(len(grafted), more, 3)
    tokens, parents = added[..., 0].long(), added[..., 1].to(torch.int32)
    united = TokenTree.unchecked(torch.cat([tree.tokens, tokens], 1), torch.cat([tree.parents, parents], 1))
    return united, added[..., 2].to(values.dtype)


def _graft_row(
    tokens: list[int],
    parents: list[int],
    others: list[int],
    above: list[int],
    values: list[float],
    *,
    room: int,
    shares: bool,
) -> list[tuple[int, int, float]]:
    """Unite one row; return token, parent and value of the nodes to append."""
    children = {(parent, tokens[node]): node for node, parent in enumerate(parents) if parent >= 0} if shares else {}
    place = {0: 0}  # node of the united tree for each retrieved one
    added: list[tuple[int, int, float]] = []
    for node in range(1, len(others)):
        if not values[node] or above[node] not in place:
            continue
        key = (place[above[node]], others[node])
        if key not in children:
            if len(added) == room:
                continue
            children[key] = len(tokens) + len(added)
            added.append((others[node], key[0], values[node]))
        place[node] = children[key]
    return added


def _below_parents(values: Tensor, tree: TokenTree) -> Tensor:
    """Let no value exceed one above it, whoever estimated them: float[batch, n]."""
    return torch.where(tree.ancestor_mask, values[:, None], torch.inf).amin(-1)


def _with_delta(laws: DraftLaws | None, more: int, order: Tensor) -> DraftLaws | None:
    """Widen laws to ``more`` nodes that are DELTA, and bring all nodes into another order."""
    if laws is None:
        return None
    batch = len(laws.row)
    row = torch.cat([laws.row, laws.row.new_zeros(batch, more)], 1).gather(1, order)
    kind = torch.cat([laws.kind, laws.kind.new_full((batch, more), DELTA)], 1).gather(1, order)
    most = None if laws.max_children is None else laws.max_children + more
    return DraftLaws(laws.probs, row, kind, most)
