"""Two drafters' trees in one: what the second retrieved is grafted onto what the first drafted (RASD, 2503.03434).

Lossless because the second's nodes are DELTA: at every node the verifier tests the first's children in draw order and
then the retrieved ones that it does not have already.  Whether a retrieved node is kept depends on the texts, on the
draft's law and on tokens drawn above it, never on the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stree.drafters.protocol import Draft, Drafter, DraftRun, Extensible, HasModel
from stree.growth import Growth
from stree.models.tree_lm import TreeLM
from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify import DELTA, Acceptance, DraftLaws

__all__ = ["FusedDrafter"]


class FusedDrafter:
    """Draft with a model and from retrieved text at once.

    Retrieved continuations of enough value take their places in the budget first, at most half of it; the model's tree
    has the rest, and places that retrieval leaves empty.

    Args:
        first: whose tree comes first; its nodes may be sampled.
        second: whose nodes are all DELTA and carry values, such as ``SuffixDrafter``.
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
        """The first drafter's."""
        return getattr(self.first, "default_growth", None)

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
        runs = [part.start(vocab_size, prompts, rng) for part in (self.first, self.second)]
        for part, run in zip((self.first, self.second), runs, strict=True):
            if not isinstance(run, Extensible):
                raise TypeError(f"FusedDrafter needs drafters whose trees can be extended, got {type(part).__name__}")
        if isinstance(self.second, HasModel):
            raise TypeError(
                f"the second drafter of FusedDrafter must not run a model, got {type(self.second).__name__}"
            )
        return _FusedRun(runs[0], runs[1], self.least_value, self.least_share)


class _FusedRun:
    """Both runs; trees are united on the host, where retrieval happens anyway."""

    def __init__(self, first: DraftRun, second: DraftRun, least_value: float, least_share: float) -> None:
        self._runs = (first, second)
        self._least_value, self._least_share = least_value, least_share

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Retrieve, draft with what the budget leaves, graft."""
        first, second = self._runs
        retrieved = second.propose(pending, growth, budget)
        if retrieved.laws is not None or retrieved.values is None:
            raise ValueError("the second drafter of FusedDrafter must draft deterministic nodes with values")
        is_worth = (retrieved.values >= self._least_value) & ~retrieved.tree.is_padding
        wanted = int(is_worth[:, 1:].sum(1).max()) if is_worth.shape[1] > 1 else 0
        draft = first.propose(pending, growth, max(budget - min(wanted, budget // 2), _least_budget(growth, budget)))
        if draft.laws is not None:
            is_worth &= self._has_share(retrieved.tree, draft.laws)
        tree, added = _graft(draft.tree, retrieved.tree, retrieved.values * is_worth, budget)
        for run in self._runs:
            assert isinstance(run, Extensible), "start looked"
            run.extend(tree)
        depth = max(draft.max_depth, retrieved.max_depth)
        values = None if draft.values is None else _below_parents(torch.cat([draft.values, added], 1), tree)
        return Draft(tree, _with_delta(draft.laws, tree), depth, draft.num_calls, values)

    def observe(self, acceptance: Acceptance) -> None:
        """Tell both."""
        for run in self._runs:
            run.observe(acceptance)

    def _has_share(self, tree: TokenTree, laws: DraftLaws) -> Tensor:
        """Tell which nodes stand below a first token that the draft's law finds likely enough: bool[batch, n]."""
        share = laws.probs[:, 0].gather(1, tree.tokens)  # the first row is the root's law
        is_first = tree.depths == 1
        unlikely = is_first & (share < self._least_share)
        return ~(tree.ancestor_mask & unlikely[:, None]).any(-1)


def _least_budget(growth: Growth | None, budget: int) -> int:
    """Give the nodes that a fixed shape needs, root included; 1 for a shape that takes what it gets."""
    if growth is None:
        return 1
    plan = growth.plan(budget)
    is_fixed = bool(plan.layers) and all(layer.slots is not None for layer in plan.layers)
    return plan.num_nodes + 1 if is_fixed else 1


def _graft(tree: TokenTree, retrieved: TokenTree, values: Tensor, budget: int) -> tuple[TokenTree, Tensor]:
    """Append retrieved nodes of positive value, best first, below the longest prefixes that a tree shares with them.

    Returns the united tree and the values of the nodes appended, float[batch, more].
    """
    rows = zip(
        tree.tokens.tolist(), tree.parents.tolist(), retrieved.tokens.tolist(), retrieved.parents.tolist(),
        values.tolist(), strict=True,
    )  # fmt: skip
    n = tree.tokens.shape[1]
    grafted = [_graft_row(*row, room=budget - n) for row in rows]
    more = max(len(row) for row in grafted)
    padded = [row + [(0, -1, 0.0)] * (more - len(row)) for row in grafted]
    added = torch.tensor(padded, dtype=torch.float64, device=tree.tokens.device).view(len(grafted), more, 3)
    tokens, parents = added[..., 0].long(), added[..., 1].to(torch.int32)
    united = TokenTree.unchecked(torch.cat([tree.tokens, tokens], 1), torch.cat([tree.parents, parents], 1))
    return united, added[..., 2].to(values.dtype)


def _graft_row(
    tokens: list[int], parents: list[int], others: list[int], above: list[int], values: list[float], *, room: int
) -> list[tuple[int, int, float]]:
    """Unite one row; return token, parent and value of the nodes to append."""
    children = {(parent, tokens[node]): node for node, parent in enumerate(parents) if parent >= 0}
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


def _with_delta(laws: DraftLaws | None, tree: TokenTree) -> DraftLaws | None:
    """Widen laws to a tree whose further nodes are DELTA."""
    if laws is None:
        return None
    batch, n = laws.row.shape
    more = tree.tokens.shape[1] - n
    row = torch.cat([laws.row, laws.row.new_zeros(batch, more)], 1)
    kind = torch.cat([laws.kind, laws.kind.new_full((batch, more), DELTA)], 1)
    most = None if laws.max_children is None else laws.max_children + more
    return DraftLaws(laws.probs, row, kind, most)
