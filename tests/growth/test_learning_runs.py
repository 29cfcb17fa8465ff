"""What a draft model's run lets its acceptance model learn: tests, prompts and accepted tokens, per sequence."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.random_rows import random_rows
from helpers.table_drafts import draft_of, nodes_by_path
from torch import Tensor

from stree.growth import Calibrated, DepthStop, Growth, Slots
from stree.growth.learned_acceptance import prior_when_greedy
from stree.sampling import Sampling
from stree.testing.tables import TableModel, table_drafter
from stree.verify import Acceptance


def rated(run: Any) -> Tensor:
    """Rate the children of two flat distributions."""
    slots = Slots(torch.ones(2, 1), torch.full((2, 1, 4), 0.2), torch.full((2, 1, 5), 0.2))
    priority: Tensor = run.acceptance_model.rate(slots)[0]
    return priority


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_greedy_tree_looks_up_the_pairs_and_triples_of_every_node(is_stopped: bool) -> None:
    dist, prompt, pending = TableModel.random(6, 3), [3, 1, 0, 2, 5, 4, 0, 1, 3, 3, 0, 4], 2
    growth: Growth = Calibrated(depth=3).bind(Sampling())
    growth = DepthStop(growth, threshold=-50.0, layers=None) if is_stopped else growth
    run = table_drafter(dist).start(6, [prompt], random_rows(1))
    draft = run.propose(torch.tensor([pending]), growth, 17)
    pairs, triples = set(pairwise(prompt)), set(zip(prompt, prompt[1:], prompt[2:], strict=False))
    probs, values = dist.logits.softmax(-1), dict[tuple[int, ...], float]()

    def visit(path: tuple[int, ...], value: float) -> None:
        before, token = [prompt[-1], pending, *path][-2:]
        row = probs[token]
        children = row.argsort(descending=True).tolist()
        says = [((token, child) in pairs, (before, token, child) in triples) for child in children]
        for rank, child in enumerate(children):
            level, by_confidence, by_sharpness, *by_text = prior_when_greedy(rank)
            odds = level + by_confidence * math.log(row[child]) - by_sharpness * math.log(1 - float((row * row).sum()))
            others = [any(said[kind] for place, said in enumerate(says) if place != rank) for kind in range(2)]
            odds += sum(slope * is_said for slope, is_said in zip(by_text, [*says[rank], *others], strict=True))
            values[(*path, child)] = value / (1 + math.exp(-odds))
            if len(path) < 2:
                visit((*path, child), values[(*path, child)])

    visit((), 1.0)
    assert draft.values is not None
    assert sorted(nodes_by_path(draft.tree)) == sorted(sorted(values, key=lambda path: -values[path])[:16])
    wanted = [1.0, *(values[path] for path in nodes_by_path(draft.tree))]
    assert draft.values[0].tolist() == pytest.approx(wanted, rel=1e-5)
    plain = sorted(nodes_by_path(draft_of(dist, growth, 17, Sampling(), random_rows(1)).tree))
    assert max(map(len, values)) == 3 and sorted(nodes_by_path(draft.tree)) != plain


def test_a_greedy_run_learns_from_its_paths_and_its_growth_does_not() -> None:
    dist, growth = TableModel.random(5, 1), Calibrated(depth=2).bind(Sampling())
    run = table_drafter(dist).start(5, [[0], [0]], random_rows(2))
    pending, text = torch.zeros(2, dtype=torch.long), [0]

    def eldest() -> Tensor:
        return rated(run)[:, 0, 0]

    run.propose(pending, growth, 2)
    begun = eldest()
    for path, sign in (([0, 1], 1), ([0], -1)):
        draft, before = run.propose(pending, growth, 2), eldest()
        lengths = torch.tensor([len(path), 0], dtype=torch.int32)
        run.observe(Acceptance(torch.tensor([path, path], dtype=torch.int32), lengths, pending))
        text = [*text, *draft.tree.tokens[0, path].tolist()]
        assert draft.tree.tokens.shape[1] == 2 and draft.probs is None
        assert sign * float(eldest()[0] - before[0]) > 0.01 and eldest()[1] == before[1]
    run.begin([0, 1], [[0], [0]])
    assert torch.equal(eldest(), begun), "other texts begin anew"
