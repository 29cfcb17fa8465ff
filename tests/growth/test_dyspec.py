"""DySpec's trees against oracles in plain Python, and what every dynamic tree keeps to."""

from __future__ import annotations

import heapq
from dataclasses import replace

import pytest
import torch
from helpers.random_rows import random_rows
from helpers.table_drafts import draft_of, nodes_by_path, path_prob
from torch import Tensor

from stree.growth import Calibrated, DySpec, Growth
from stree.sampling import Random, Sampling
from stree.testing.enumeration import PLAIN
from stree.testing.tables import TableModel
from stree.tree import TokenTree


@pytest.mark.parametrize(
    ("growth", "sampling"),
    [
        (DySpec(depth=2, ranks=3), Sampling()),
        (DySpec(width=3), Sampling(0.6, top_k=2)),
        (DySpec(threshold=0.0), PLAIN),
        (DySpec(form="heap"), PLAIN),
        (Calibrated(), PLAIN),
    ],
    ids=["shallow", "narrow", "no-threshold", "heap", "calibrated"],
)
def test_a_dynamic_tree_keeps_the_budget_and_is_a_tree(growth: Growth, sampling: Sampling) -> None:
    for budget in (2, 3, 8, 17):
        draft = draft_of(TableModel.random(9, 1, scale=3.0), growth, budget, sampling, random_rows(5), 5)
        draft.tree.check()
        assert draft.tree.tokens.shape[1] <= budget and int(draft.tree.depths.max()) <= draft.max_depth
        derived = TokenTree(draft.tree.tokens, draft.tree.parents)
        assert torch.equal(draft.tree.depths, derived.depths)
        assert torch.equal(draft.tree.ancestor_mask, derived.ancestor_mask)
        for row in range(5):
            paths = nodes_by_path(draft.tree, row)
            assert len(set(paths)) == len(paths), "siblings are drawn without replacement"


@pytest.mark.parametrize(("form", "sampling"), [("layers", PLAIN), ("heap", Sampling())])
def test_a_dynamic_tree_fills_the_budget_when_the_draft_is_unsure(form: str, sampling: Sampling) -> None:
    for budget in (2, 5, 33):
        draft = draft_of(TableModel.random(50, 2, scale=0.5), DySpec(form=form), budget, sampling, random_rows(3), 3)
        assert draft.tree.num_nodes.tolist() == [budget] * 3


@pytest.mark.parametrize("form", ["layers", "heap"])
@pytest.mark.parametrize("seed", range(2))
def test_at_temperature_0_the_nodes_are_those_of_greatest_path_probability(form: str, seed: int) -> None:
    dist, nodes = TableModel.random(6, seed, scale=2.0), 11
    heap: list[tuple[float, tuple[int, ...]]] = [(-path_prob(dist, (token,)), (token,)) for token in range(6)]
    heapq.heapify(heap)
    best: list[tuple[int, ...]] = []
    while len(best) < nodes:
        negative, path = heapq.heappop(heap)
        best.append(path)
        for token in range(6):
            heapq.heappush(heap, (-path_prob(dist, (*path, token)), (*path, token)))
    draft = draft_of(dist, DySpec(depth=nodes, ranks=6, form=form), nodes + 1, Sampling(), random_rows(1))
    assert draft.probs is None
    assert set(nodes_by_path(draft.tree)) == set(best)


def draw(rng: Random, dist: Tensor, node: int) -> int:
    """Draw from one distribution by inversion in plain Python."""
    level = float(rng.uniform("draft", torch.zeros(1, dtype=torch.long), node)) * float(dist.sum())
    for token, prob in enumerate(dist.tolist()):
        level -= prob
        if level < 0:
            return token
    raise AssertionError("the distribution ran out before the number did")


@pytest.mark.parametrize("seed", range(3))
def test_the_heap_draws_at_the_slot_of_greatest_value(seed: int) -> None:
    dist, sampling = TableModel.random(6, seed), Sampling(0.9)
    draft = draft_of(dist, DySpec(form="heap"), 12, sampling, random_rows(1, seed))
    rows = [sampling.probs(dist.logits[[0]])[0]]
    values, counts, tokens, parents = [1.0], [0], [0], [-1]
    for _ in range(11):
        parent = max(range(len(values)), key=lambda node: values[node])
        token = draw(random_rows(1, seed).at(torch.tensor([1])), rows[parent], (parent << 20) + counts[parent])
        share = float(rows[parent][token] / rows[parent].sum())
        counts[parent] += 1
        rows[parent][token] = 0.0
        values.append(values[parent] * share)
        values[parent] *= 1 - share
        rows.append(sampling.probs(dist.logits[[token]])[0])
        counts.append(0)
        tokens.append(token)
        parents.append(parent)
    assert draft.tree.parents.tolist() == [parents]
    assert draft.tree.tokens.tolist() == [tokens]


def test_a_depth_bounds_the_heap_too() -> None:
    dist = TableModel.random(9, 1, scale=3.0)
    depths = [
        int(draft_of(dist, DySpec(depth=depth, form="heap"), 17, PLAIN, random_rows(5), 5).tree.depths.max())
        for depth in (2, None)
    ]
    assert depths[0] == 2 < depths[1]


@pytest.mark.parametrize("sampling", [Sampling(), PLAIN], ids=["greedy", "sampled"])
def test_sizes_of_threshold_trees_fall_with_entropy(sampling: Sampling) -> None:
    # Of about 1 / (threshold x entropy) paths the probability is at least the threshold.
    logits, sizes, entropies = TableModel.random(6, 3).logits, [], []
    for scale in (8.0, 4.0, 1.5, 0.6):
        dist = TableModel(logits * scale)
        probs = dist.logits.softmax(-1)
        entropies.append(float(-(probs * probs.log()).sum(-1).mean()))
        growth = DySpec(depth=30, ranks=6, threshold=0.05, form="threshold")
        draft = draft_of(dist, growth, 100, sampling, random_rows(4), 4)
        paths = [path for row in range(4) for path in nodes_by_path(draft.tree, row)]
        above = 1 if sampling.is_greedy else 0  # a slot is taken by what is known of it before its token is
        assert all(path_prob(dist, path if above else path[:-1]) >= 0.05 for path in paths)
        filled = draft_of(dist, replace(growth, form="layers"), 90, sampling, random_rows(4), 4)
        assert filled.tree.num_nodes.tolist() == [90] * 4, "the layers form fills its budget whatever the entropy"
        sizes.append(len(paths) / 4)
    assert entropies == sorted(entropies) and sizes == sorted(sizes, reverse=True) and sizes[0] > 3 * sizes[-1], sizes


@pytest.mark.parametrize("form", ["layers", "threshold"])
@pytest.mark.parametrize("threshold", [None, 0.0, 0.15])
@pytest.mark.parametrize("seed", range(2))
def test_layers_take_the_best_slots_before_their_tokens_are_drawn(
    seed: int, threshold: float | None, form: str
) -> None:
    dist, sampling, budget = TableModel.random(8, seed, scale=2.0), Sampling(0.9), 10
    growth = DySpec(depth=3, ranks=3, threshold=threshold, form=form)
    draft = draft_of(dist, growth, budget, sampling, random_rows(1, seed))
    least = 1 / budget if threshold is None else threshold
    rng = random_rows(1, seed).at(torch.tensor([1]))
    # The frontier: (number of the node, its path, value); numbers count the layers' places, padding included.
    frontier: list[tuple[int, tuple[int, ...], float]] = [(0, (), 1.0)]
    expected: list[tuple[int, ...]] = []
    number, width = 1, 1
    for depth in range(3):
        slots = []
        for node, path, value in frontier:
            row = sampling.probs(dist.logits[[path[-1] if path else 0]])[0]
            rest, spent = row.clone(), 0.0
            for rank in range(3):
                token = draw(rng, rest, (node << 20) + rank)
                slots.append((value * (1 - spent), node, rank, (*path, token), value * float(row[token])))
                spent += float(row[token])
                rest[token] = 0.0
        slots.sort(key=lambda slot: (-slot[0], slot[1], slot[2]))
        width = min(budget - 1, 3 * width)
        taken = slots[: min(width, budget - 1 - len(expected))]
        share = (budget - 1 - len(expected)) // (3 - depth) if form == "layers" else 0  # the last layer takes the rest
        taken = [slot for index, slot in enumerate(taken) if slot[0] >= least or index < share]
        frontier = [(number + index, slot[3], slot[4]) for index, slot in enumerate(taken)]
        number += width
        expected += [slot[3] for slot in taken]
    assert nodes_by_path(draft.tree) == expected
