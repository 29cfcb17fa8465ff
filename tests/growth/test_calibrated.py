"""Calibrated growth: its plans, its trees against oracles in plain Python, and exactness while it learns."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from helpers.enumeration import TableModel, emitted_probs, total_variation
from helpers.growth_drafts import EXACT, PLAIN, all_drafts, draft_of, nodes_by_path, random_rows

from stree.drafters import ModelDrafter
from stree.growth import AcceptanceModel, Calibrated, Layer, Proposal, Slots, choose_slots
from stree.growth.calibrated import typical_rate, typical_values
from stree.growth.learned_acceptance import prior_when_greedy
from stree.sampling import Sampling
from stree.tree import TokenTree


def test_it_is_the_default_of_a_model_drafter() -> None:
    assert ModelDrafter.default_growth == Calibrated()


def test_ranks_and_depths_of_a_plan_by_budget() -> None:
    drawn, chosen = (Calibrated().bind(sampling).plan(64) for sampling in (PLAIN, Sampling()))
    assert [layer.ranks for layer in drawn.layers] == [12, 6, 6, 6, 6, 6]
    assert [layer.ranks for layer in chosen.layers] == [8] * 6
    assert [layer.ranks for layer in Calibrated().bind(PLAIN).plan(16).layers] == [12, 4, 4, 4]
    assert [layer.ranks for layer in Calibrated(2, ranks=3).bind(PLAIN).plan(16).layers] == [3, 3]
    assert [layer.ranks for layer in Calibrated(2, ranks=10**9).bind(PLAIN).plan(8).layers] == [7, 7]
    assert [layer.ranks for layer in Calibrated(2).bind(PLAIN).plan(8).layers] == [7, 4]
    assert not Calibrated().bind(PLAIN).plan(1).layers
    assert [layer.ranks for layer in Calibrated(depth=2).bind(PLAIN).plan(32).layers] == [12, 4]
    assert [layer.ranks for layer in Calibrated(depth=2).bind(PLAIN).plan(33).layers] == [12, 6]
    assert [layer.ranks for layer in Calibrated(depth=2).plan(33).layers] == [8, 8]
    assert [layer.ranks for layer in Calibrated(depth=2, ranks=3).plan(33).layers] == [3, 3]
    assert [len(Calibrated().plan(budget).layers) for budget in (2, 16, 17, 64)] == [4, 4, 6, 6]
    assert [len(Calibrated(depth=3).plan(budget).layers) for budget in (16, 64)] == [3, 3]


@pytest.mark.parametrize("budget", [2, 9, 17])
def test_at_temperature_0_the_tree_is_that_of_the_greatest_chances(budget: int) -> None:
    dist = TableModel.random(6, 3, scale=2.0)
    draft = draft_of(dist, Calibrated(depth=3), budget, Sampling(), random_rows(1))
    assert draft.probs is None
    probs = dist.logits.softmax(-1)
    values: dict[tuple[int, ...], float] = {}

    def visit(path: tuple[int, ...], value: float) -> None:
        row = probs[path[-1] if path else 0]
        for rank, token in enumerate(row.argsort(descending=True)[: budget - 1].tolist()):
            level, by_confidence, by_sharpness, *_ = prior_when_greedy(rank)
            odds = level + by_confidence * math.log(row[token]) - by_sharpness * math.log(1 - float((row * row).sum()))
            chance = 1 / (1 + math.exp(-odds))
            values[(*path, token)] = value * chance
            if len(path) < 2:
                visit((*path, token), value * chance)

    visit((), 1.0)
    assert draft.values is not None
    assert sorted(nodes_by_path(draft.tree)) == sorted(sorted(values, key=lambda path: -values[path])[: budget - 1])
    wanted = [1.0, *(values[path] for path in nodes_by_path(draft.tree))]
    assert draft.values[0].tolist() == pytest.approx(wanted, rel=1e-5)


def typical(depth: int, ranks: int, value: float = 1.0) -> list[float]:
    """List the values of all nodes below one, by recursion."""
    values = []
    for chance in map(typical_rate, range(ranks if depth else 0)):
        values += [value * chance, *typical(depth - 1, ranks, value * chance)]
        value *= 1 - chance
    return values


@pytest.mark.parametrize(("depth", "ranks"), [(3, 4), (2, 6), (4, 1), (0, 3)])
def test_typical_values_are_those_of_the_best_nodes_of_the_whole_tree(depth: int, ranks: int) -> None:
    values = sorted(typical(depth, ranks), reverse=True)
    for nodes in {1, 2, 7, 30, len(values) + 1}:
        assert typical_values(nodes, depth, ranks) == pytest.approx(tuple(values[:nodes]))


@pytest.mark.parametrize("left", [0, 1, 4, 9, 40])
def test_a_layer_leaves_room_for_what_is_worth_as_much_below_it(left: int) -> None:
    below = tuple(typical_values(63, 2, 4))
    value = torch.tensor([[0.9, 0.06, 0.03, 0.0], [0.4, 0.35, 0.3, 0.2], [0.0, 0.0, 0.0, 0.0]])
    layer = Layer(4, 4, below=below)
    _, is_taken = choose_slots(layer, value, torch.full((3,), left), 0.0, 1)
    for row, values in enumerate(value.tolist()):
        wanted = 0
        for count, least in enumerate(values, 1):
            size = count + sum(above * each >= least for above in values[:count] for each in below)
            if least and count <= left and (size <= left or count == 1):
                wanted = count
        assert is_taken[row].tolist() == [place < wanted for place in range(4)]


def test_a_sure_root_grows_deep_and_another_wide() -> None:
    plan = Calibrated(depth=4).bind(PLAIN).plan(16)
    sure, unsure = torch.tensor([[0.97, 0.01, 0.01, 0.005]]), torch.tensor([[0.4, 0.3, 0.2, 0.15]])
    taken = [
        int(choose_slots(plan.layers[0], value, torch.tensor([15]), plan.threshold, 1)[1].sum())
        for value in (sure, unsure)
    ]
    assert taken[0] == 1 < taken[1]


@dataclass(frozen=True)
class Taught(Calibrated):
    """A growth that begins with what a log taught it: that eldest children are accepted."""

    def acceptance_model(self, batch: int, device: torch.device) -> AcceptanceModel:
        model = super().acceptance_model(batch, device)
        tree = TokenTree(torch.zeros(batch, 3).long(), torch.tensor([[-1, 0, 0]]).expand(batch, 3))
        dist = torch.tensor([[[0.42, 0.36, 0.22]]]).expand(batch, 1, 3)
        probs = torch.tensor([[[0.42, 0.36]]]).expand(batch, 1, 2)
        for _ in range(100):
            model.rate(Slots(torch.ones(batch, 1), probs, dist))
            kept_slots = [model.keep(torch.tensor([[0, 1]]).expand(batch, 2))]
            ratios = torch.tensor([[0.0, 1.0, 0.0]]).expand(batch, 3)
            proposal = Proposal(tree, torch.ones_like(ratios), None, kept_slots)
            model.learn(proposal, ratios, torch.ones(batch, dtype=torch.bool))
        return model


@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
def test_the_emitted_distribution_is_the_target_s_whatever_was_learnt(verifier: str) -> None:
    target, dist = TableModel.random(3, 11, scale=0.5), TableModel.random(3, 12, scale=0.5)
    trees = all_drafts(dist, Taught(2, 2), 4, PLAIN)
    naive = all_drafts(dist, Calibrated(2, 2), 4, PLAIN)
    shapes = [set(map(tuple, one.parents.tolist())) for one in (trees, naive)]
    assert shapes[0] != shapes[1], "what was learnt should change trees"
    trees = replace(trees, weight=trees.weight / trees.weight.sum())  # unused draws count each outcome
    assert total_variation(emitted_probs(target, trees, PLAIN, verifier, 3), target.joint(PLAIN, 3)) < EXACT
