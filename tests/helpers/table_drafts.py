"""Draft trees of growths on toy language models, and their nodes by path."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from helpers.random_rows import random_rows
from stree.drafters import Draft, ModelDrafter
from stree.growth import Growth
from stree.sampling import Random, Sampling
from stree.testing.tables import TableLM, TableModel, table_drafter
from stree.tree import TokenTree

GREEDY = Sampling()


def draft_of(dist: TableModel, growth: Growth, budget: int, sampling: Sampling, rng: Random, batch: int = 1) -> Draft:
    """Propose trees below pending tokens 0 of one-token texts."""
    run = table_drafter(dist).start(dist.vocab, [[0]] * batch, rng)
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
