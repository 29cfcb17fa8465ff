"""Learned acceptance models against ones kept in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from stree.growth import Calibrated, Proposal, Slots
from stree.growth.learned_acceptance import (
    CONFIDENCE_EDGES,
    PRIOR_TESTS,
    SHARPNESS_EDGES,
    SampledAcceptance,
    prior_after_draw,
    prior_before_draw,
)
from stree.sampling import Sampling
from stree.tree import TokenTree

CPU = torch.device("cpu")


def cell_of(value: float, edges: tuple[float, ...]) -> int:
    return sum(value > edge for edge in edges)


def midpoint(edges: tuple[float, ...], number: int) -> float:
    bounds = [0.0, *edges, 1.0]
    return (bounds[number] + bounds[number + 1]) / 2


def test_ratings_and_what_is_learnt_are_those_of_a_table_kept_by_hand() -> None:
    dist = torch.tensor([[[0.7, 0.2, 0.06, 0.04], [0.25, 0.25, 0.25, 0.25], [0.97, 0.01, 0.01, 0.01]]])
    probs = torch.tensor([[[0.7, 0.2], [0.25, 0.25], [0.01, 0.97]]])
    above = torch.tensor([[0.5, 0.3, 0.1]])
    #  the rated nodes are 0, 1, 2 of the layer above; kept: both children of the first, the eldest of the third
    tree = TokenTree(torch.zeros(1, 4).long(), torch.tensor([[-1, 0, 0, 1]]))
    ratios = [0.0, 0.6, 0.3, 0.9]
    made = {1: 1.0, 2: 1 - 0.6, 3: 0.6}
    model = SampledAcceptance(1, 2, CPU)
    counted: dict[str, dict[tuple[int, ...], tuple[float, float]]] = {"before": {}, "after": {}}

    def cells(node: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sharpness = float((dist[0, node] ** 2).sum())
        spent = float(probs[0, node, :rank].sum())
        confidence = float(probs[0, node, rank]) / (1 - spent)
        before = (rank, cell_of(sharpness, SHARPNESS_EDGES))
        return before, (*before, cell_of(confidence, CONFIDENCE_EDGES))

    def odds(table: str, cell: tuple[int, ...]) -> float:
        sharpness = -math.log(1 - midpoint(SHARPNESS_EDGES, cell[1]))
        if table == "before":
            level, slope = prior_before_draw(cell[0])
            logit = level + slope * sharpness
        else:
            level, slope, steep = prior_after_draw(cell[0])
            logit = level + slope * sharpness + steep * math.log(midpoint(CONFIDENCE_EDGES, cell[2]))
        passed, tests = counted[table].get(cell, (0.0, 0.0))
        return (PRIOR_TESTS / (1 + math.exp(-logit)) + passed) / (PRIOR_TESTS + tests)

    for _ in range(3):
        priority, value = model.rate(Slots(above, probs, dist))
        for node in range(3):
            (before, after), (younger, _) = cells(node, 0), cells(node, 1)
            eldest = float(above[0, node]) * odds("before", before)
            assert float(priority[0, node, 0]) == pytest.approx(eldest, rel=1e-5)
            assert float(value[0, node, 0]) == pytest.approx(float(above[0, node]) * odds("after", after), rel=1e-5)
            left = float(above[0, node]) * (1 - odds("after", after))
            assert float(priority[0, node, 1]) == pytest.approx(min(eldest, left * odds("before", younger)), rel=1e-5)
        proposal = Proposal(tree, torch.ones(1, len(ratios)), None, [model.keep(torch.tensor([[0, 1, 4]]))])
        model.learn(proposal, torch.tensor([ratios]), torch.tensor([True]))
        for node, slot in ((1, (0, 0)), (2, (0, 1)), (3, (2, 0))):
            for table, cell in zip(("before", "after"), cells(*slot), strict=True):
                passed, tests = counted[table].get(cell, (0.0, 0.0))
                counted[table][cell] = passed + made[node] * ratios[node], tests + made[node]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_is_learnt_does_not_depend_on_padding(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(60, 30, generator=generator)
    parents = (uniform * torch.arange(30)).int() - (torch.arange(30) == 0).int()
    values, ratios = torch.ones(60, 30), torch.rand(60, 30, generator=generator)
    for node in range(1, 30):
        above = values.gather(1, parents[:, node : node + 1].long())[:, 0]
        values[:, node] = above * torch.rand(60, generator=generator)
    slots = torch.randint(0, 64, (60, 29), generator=generator)
    probs, dist = torch.rand(60, 16, 4, generator=generator) / 4, torch.rand(60, 16, 9, generator=generator) / 5
    rated = []
    for more in (0, 37):
        model = Calibrated().bind(Sampling(temperature)).acceptance_model(60, CPU)
        model.rate(Slots(torch.ones(60, 16), probs, dist))
        tree = TokenTree.unchecked(torch.zeros(60, 30 + more).long(), F.pad(parents, (0, more), value=-1))
        kept_slots = [model.keep(F.pad(slots, (0, more)))]
        proposal = Proposal(tree, F.pad(values, (0, more)), None, kept_slots)
        model.learn(proposal, F.pad(ratios, (0, more)), torch.ones(60, dtype=torch.bool))
        rated.append(model.rate(Slots(torch.ones(60, 16), probs, dist))[0])
    assert torch.equal(*rated)


def test_at_temperature_0_the_level_shifts_the_most_probable_child_and_its_siblings_share_the_rest() -> None:
    dist = torch.tensor([0.5, 0.3, 0.15, 0.05]).expand(2, 1, 4)
    model, fresh = (Calibrated().bind(Sampling()).acceptance_model(2, CPU) for _ in range(2))
    before = model.rate(Slots(torch.ones(2, 1), dist[..., :3], dist))[0][:, 0].tolist()
    tree = TokenTree(torch.zeros(2, 5).long(), torch.tensor([[-1, 0, 0, 1, 2]] * 2))
    values = torch.tensor([[1.0, 0.75, 0.1, 0.3, 0.05]] * 2)
    # The first text accepts the first child and not its child; the second one is inactive.
    ratios = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]] * 2)
    model.learn(Proposal(tree, values, None, []), ratios, torch.tensor([True, False]))
    after = model.rate(Slots(torch.ones(2, 1), dist[..., :3], dist))[0][:, 0].tolist()
    assert after[1] == before[1]
    weight = PRIOR_TESTS / 4 + 0.75 * 0.25 + 0.4 * 0.6
    odds = math.log(before[0][0] / (1 - before[0][0])) + (0.25 - 0.4) / weight
    eldest = 1 / (1 + math.exp(-odds))
    wanted = [eldest, *(chance * (1 - eldest) / (1 - before[0][0]) for chance in before[0][1:])]
    assert after[0] == pytest.approx(wanted, rel=1e-5) and after[0] != pytest.approx(before[0], rel=1e-3)
    model.reset(0)
    for one in (model, fresh):
        one.learn(Proposal(tree, values, None, []), ratios, torch.tensor([True, True]))
    again, expected = (one.rate(Slots(torch.ones(2, 1), dist[..., :3], dist))[0] for one in (model, fresh))
    assert torch.equal(again[0], expected[0]), "as a text that begins"
