"""Draft trees of growths on table models, one at a time or with every outcome of every draw."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from helpers.enumeration import DraftedTrees, Outcomes, TableLM, TableModel, as_random, short_texts
from stree.drafters import Draft, ModelDrafter
from stree.growth import Growth
from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify import DELTA, DraftProbs

PLAIN, GREEDY = Sampling(1.0), Sampling()
EXACT = 1e-12  # total variation: sums in float64


def random_rows(batch: int, seed: int = 0) -> Random:
    return Random(seed, torch.arange(batch), torch.zeros(batch, dtype=torch.long))


def draft_of(dist: TableModel, growth: Growth, budget: int, sampling: Sampling, rng: Random, batch: int = 1) -> Draft:
    """Propose trees below pending tokens 0 of one-token texts."""
    run = ModelDrafter(TableLM(dist).as_lm()).start(dist.vocab, [[0]] * batch, rng)
    return run.propose(torch.zeros(batch, dtype=torch.long), growth.bind(sampling), budget)


def nodes_by_path(tree: TokenTree, row: int = 0) -> list[tuple[int, ...]]:
    """List the token path below the root of every node that is not padding."""
    parents, tokens = tree.parents[row].tolist(), tree.tokens[row].tolist()
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, len(parents)):
        if parents[node] >= 0:
            paths[node] = (*paths[parents[node]], tokens[node])
    return [path for node, path in paths.items() if node]


def path_prob(dist: TableModel, path: Sequence[int]) -> float:
    prob, last = 1.0, 0
    for token in path:
        prob *= float(dist.logits[last].softmax(-1)[token])
        last = token
    return prob


def num_draws(growth: Growth, budget: int) -> int:
    plan = growth.plan(budget)
    above = [1] + [layer.width for layer in plan.layers]
    return (
        plan.num_nodes if plan.is_heap else sum(w * layer.ranks for w, layer in zip(above, plan.layers, strict=False))
    )


class TimedOutcomes(Outcomes):
    """Outcomes with fixed uniform numbers besides: growth may ask for them, verification may not."""

    seed = 1

    def uniform(self, purpose: str, offset: Tensor, node: Tensor) -> Tensor:
        assert purpose == "draft"
        numbers = (node.long() * 2654435761 % 2**32).double() / 2**32
        return (numbers + self.seed * 0.3819660113) % 1.0


def all_drafts(dist: TableModel, growth: Growth, budget: int, sampling: Sampling, seed: int = 1) -> DraftedTrees:
    """Draft with every outcome of every draw; ``seed`` is of the uniform numbers that a growth asks for."""
    plan = growth.bind(sampling).plan(budget)
    is_drawn = plan.drawing != "top" and not sampling.is_greedy
    outcomes = TimedOutcomes.all(0, num_draws(growth.bind(sampling), budget) if is_drawn else 0, dist.vocab)
    outcomes.seed = seed
    with short_texts():
        draft = draft_of(dist, growth, budget, sampling, as_random(outcomes), len(outcomes.weight))
    rows = (outcomes.weight > 0).nonzero()[:, 0]
    parents = draft.tree.parents
    nothing = torch.zeros(len(outcomes.weight), 1, dist.vocab, dtype=dist.logits.dtype)
    dists = draft.probs or DraftProbs(nothing, parents, torch.full_like(parents, DELTA, dtype=torch.int8))
    return DraftedTrees(draft.tree.tokens, draft.tree.parents, dists, outcomes.weight).select(rows)


def counted_draft(
    dist: TableModel, growth: Growth, budget: int, sampling: Sampling = GREEDY, batch: int = 1, first: int = 0
) -> tuple[Draft, int]:
    """Propose below pending tokens first, first + 1, ...; return the draft and the draft calls really made."""
    lm = TableLM(dist)
    run = ModelDrafter(lm.as_lm()).start(dist.vocab, [[0]] * batch, random_rows(batch))
    pending = (torch.arange(batch) + first) % dist.vocab
    draft = run.propose(pending, growth.bind(sampling), budget)
    assert draft.num_calls == lm.num_calls
    return draft, lm.num_calls
