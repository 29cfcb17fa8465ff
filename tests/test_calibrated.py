"""Calibrated growth: its estimate against one kept in plain Python, and exactness while it learns."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.enumeration import TableLM, TableModel, emitted_probs, total_variation
from test_growth import all_drafts, draft_of, nodes_by_path, random_rows
from torch import Tensor

from stree.drafters import ModelDrafter
from stree.growth import (
    Calibrated,
    Chain,
    DepthStop,
    Estimate,
    Growth,
    Layer,
    Proposal,
    Slots,
    choose_slots,
    parse_growth,
)
from stree.growth.acceptance_model import (
    AFTER,
    BEFORE,
    BY_TEMPERATURE,
    CERTAIN,
    CONFIDENCE_EDGES,
    LEVEL_WEIGHT,
    PRIOR_TESTS,
    SHARPNESS_EDGES,
    Calibration,
)
from stree.growth.calibrated import TYPICAL, typical_values
from stree.kernels.tree_growth.operands import Words
from stree.sampling import Sampling
from stree.tree import TokenTree
from stree.verify import SAMPLED, Acceptance

PLAIN = Sampling(1.0)
EXACT = 1e-12  # total variation: sums in float64
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Calibrated(depth=0), "depth must be at least 1, got 0"),
        (lambda: Calibrated(ranks=0), "ranks must be at least 1, got 0"),
    ],
    ids=["depth", "ranks"],
)
def test_a_shape_that_is_none_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


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
            level, by_confidence, by_sharpness, *_ = CERTAIN[rank]
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


def test_drawn_trees_may_have_a_wider_root_and_others_not() -> None:
    drawn, chosen = (Calibrated().bind(sampling).plan(64) for sampling in (PLAIN, Sampling()))
    assert [layer.ranks for layer in drawn.layers] == [12, 6, 6, 6, 6, 6]
    assert [layer.ranks for layer in chosen.layers] == [8] * 6
    assert [layer.ranks for layer in Calibrated().bind(PLAIN).plan(16).layers] == [12, 4, 4, 4]
    assert [layer.ranks for layer in Calibrated(2, ranks=3).bind(PLAIN).plan(16).layers] == [3, 3]
    assert [layer.ranks for layer in Calibrated(2, ranks=10**9).bind(PLAIN).plan(8).layers] == [7, 7]
    assert [layer.ranks for layer in Calibrated(2).bind(PLAIN).plan(8).layers] == [7, 4]
    assert not Calibrated().bind(PLAIN).plan(1).layers


def test_the_eldest_child_is_believed_by_the_temperature() -> None:
    dist = torch.full((1, 1, 10), 0.1)
    eldest = {}
    for temperature in (0.3, 0.6, 0.8, 1.0, 1.5):
        growth = Calibrated().bind(Sampling(temperature))
        priority, value = growth.estimate(1, CPU).rate(Slots(torch.ones(1, 1), dist[..., :3], dist))
        eldest[temperature] = (float(priority[0, 0, 0]), float(value[0, 0, 0]))
        younger = float(priority[0, 0, 1]) / (1 - eldest[temperature][1])
        assert younger == pytest.approx(1 / (1 + math.exp(1.35 + 0.73 * math.log(1 - 0.075))), rel=1e-4)
    for place in range(2):
        logit = {t: math.log(chances[place] / (1 - chances[place])) for t, chances in eldest.items()}
        assert logit[0.6] - logit[0.8] == pytest.approx(-0.2 * BY_TEMPERATURE, rel=1e-3)
        assert logit[1.0] - logit[0.8] == pytest.approx(0.2 * BY_TEMPERATURE, rel=1e-3)
        assert logit[0.3] == logit[0.6] and logit[1.5] == logit[1.0], "believed no further than it was seen"


def typical(depth: int, ranks: int, value: float = 1.0) -> list[float]:
    """List the values of all nodes below one, by recursion."""
    values = []
    for chance in TYPICAL[:ranks] if depth else ():
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


def place(value: float, edges: tuple[float, ...]) -> int:
    return sum(value > edge for edge in edges)


def middle(edges: tuple[float, ...], number: int) -> float:
    bounds = [0.0, *edges, 1.0]
    return (bounds[number] + bounds[number + 1]) / 2


@pytest.mark.parametrize("policy", [(2, 2, 5), (2, 2, 4), (1, 3, 3)], ids=["whole", "cut", "star"])
@pytest.mark.parametrize("verifier", ["match", "rejection", "traversal"])
def test_the_emitted_distribution_is_the_target_s(policy: tuple[int, int, int], verifier: str) -> None:
    depth, ranks, budget = policy
    target, dist = TableModel.random(3, 11), TableModel.random(3, 12)
    trees, _ = all_drafts(dist, Calibrated(depth, ranks), budget, PLAIN)
    assert abs(float(trees.weight.sum()) - 1) < EXACT
    assert set(trees.probs.kind.unique().tolist()) == {SAMPLED}
    length = int(trees.tree.depths.max()) + 1
    assert total_variation(emitted_probs(target, trees, PLAIN, verifier, length), target.joint(PLAIN, length)) < EXACT


@dataclass(frozen=True)
class Taught(Calibrated):
    """A growth that begins with what a log taught it: that eldest children are accepted."""

    def estimate(self, batch: int, device: torch.device) -> Estimate:
        estimate = super().estimate(batch, device)
        tree = TokenTree(torch.zeros(batch, 3).long(), torch.tensor([[-1, 0, 0]]).expand(batch, 3))
        dist = torch.tensor([[[0.42, 0.36, 0.22]]]).expand(batch, 1, 3)
        probs = torch.tensor([[[0.42, 0.36]]]).expand(batch, 1, 2)
        for _ in range(100):
            estimate.rate(Slots(torch.ones(batch, 1), probs, dist))
            notes = [estimate.note(torch.tensor([[0, 1]]).expand(batch, 2))]
            ratios = torch.tensor([[0.0, 1.0, 0.0]]).expand(batch, 3)
            proposal = Proposal(tree, torch.ones_like(ratios), None, notes)
            estimate.learn(proposal, ratios, torch.ones(batch, dtype=torch.bool))
        return estimate


@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
def test_the_emitted_distribution_is_the_target_s_whatever_was_learnt(verifier: str) -> None:
    target, dist = TableModel.random(3, 11, scale=0.5), TableModel.random(3, 12, scale=0.5)
    trees, _ = all_drafts(dist, Taught(2, 2), 4, PLAIN)
    naive, _ = all_drafts(dist, Calibrated(2, 2), 4, PLAIN)
    shapes = [set(map(tuple, one.parents.tolist())) for one in (trees, naive)]
    assert shapes[0] != shapes[1], "what was learnt should change trees"
    trees = replace(trees, weight=trees.weight / trees.weight.sum())  # draws that nothing asked for count each outcome
    assert total_variation(emitted_probs(target, trees, PLAIN, verifier, 3), target.joint(PLAIN, 3)) < EXACT


def test_ratings_and_what_is_learnt_are_those_of_a_table_kept_by_hand() -> None:
    dist = torch.tensor([[[0.7, 0.2, 0.06, 0.04], [0.25, 0.25, 0.25, 0.25], [0.97, 0.01, 0.01, 0.01]]])
    probs = torch.tensor([[[0.7, 0.2], [0.25, 0.25], [0.01, 0.97]]])
    reach = torch.tensor([[0.5, 0.3, 0.1]])
    #  the rated nodes are 0, 1, 2 of the layer above; kept: both children of the first, the eldest of the third
    tree = TokenTree(torch.zeros(1, 4).long(), torch.tensor([[-1, 0, 0, 1]]))
    ratios = [0.0, 0.6, 0.3, 0.9]
    made = {1: 1.0, 2: 1 - 0.6, 3: 0.6}
    estimate = Calibration(1, 2, CPU, 0.8)
    counted: dict[str, dict[tuple[int, ...], tuple[float, float]]] = {"before": {}, "after": {}}

    def cells(node: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sharpness = float((dist[0, node] ** 2).sum())
        spent = float(probs[0, node, :rank].sum())
        confidence = float(probs[0, node, rank]) / (1 - spent)
        before = (rank, place(sharpness, SHARPNESS_EDGES))
        return before, (*before, place(confidence, CONFIDENCE_EDGES))

    def odds(table: str, cell: tuple[int, ...]) -> float:
        sharpness = -math.log(1 - middle(SHARPNESS_EDGES, cell[1]))
        if table == "before":
            logit = BEFORE[cell[0]][0] + BEFORE[cell[0]][1] * sharpness
        else:
            level, slope, steep = AFTER[cell[0]]
            logit = level + slope * sharpness + steep * math.log(middle(CONFIDENCE_EDGES, cell[2]))
        passed, tests = counted[table].get(cell, (0.0, 0.0))
        return (PRIOR_TESTS / (1 + math.exp(-logit)) + passed) / (PRIOR_TESTS + tests)

    for _ in range(3):
        priority, value = estimate.rate(Slots(reach, probs, dist))
        for node in range(3):
            (before, after), (younger, _) = cells(node, 0), cells(node, 1)
            eldest = float(reach[0, node]) * odds("before", before)
            assert float(priority[0, node, 0]) == pytest.approx(eldest, rel=1e-5)
            assert float(value[0, node, 0]) == pytest.approx(float(reach[0, node]) * odds("after", after), rel=1e-5)
            left = float(reach[0, node]) * (1 - odds("after", after))
            assert float(priority[0, node, 1]) == pytest.approx(min(eldest, left * odds("before", younger)), rel=1e-5)
        proposal = Proposal(tree, torch.ones(1, len(ratios)), None, [estimate.note(torch.tensor([[0, 1, 4]]))])
        estimate.learn(proposal, torch.tensor([ratios]), torch.tensor([True]))
        for node, slot in ((1, (0, 0)), (2, (0, 1)), (3, (2, 0))):
            for table, cell in zip(("before", "after"), cells(*slot), strict=True):
                passed, tests = counted[table].get(cell, (0.0, 0.0))
                counted[table][cell] = passed + made[node] * ratios[node], tests + made[node]


def test_values_of_a_drawn_tree_are_those_of_a_new_table_whatever_the_text_says() -> None:
    dist, prompt, pending = TableModel.random(6, 3), [3, 1, 0, 2, 5, 4, 0, 1, 3, 3, 0, 4], 2
    growth, depths = Calibrated(depth=3).bind(PLAIN), set()
    for seed in range(6):
        run: Any = ModelDrafter(TableLM(dist).as_lm()).start(6, [prompt], random_rows(1, seed))
        draft = run.propose(torch.tensor([pending]), growth, 17)
        assert draft.values is not None
        tokens, parents = draft.tree.tokens[0].tolist(), draft.tree.parents[0].tolist()
        left = dict[int, tuple[float, float, int]]()  # untested, of the distribution, rank of the next child
        for node in range(1, len(tokens)):
            parent = parents[node]
            token, child = tokens[parent], tokens[node]
            untested, rest, rank = left.get(parent, (float(draft.values[0, parent]), 1.0, 0))
            row = dist.logits[token].softmax(-1)
            share = float(row[child]) / rest
            level, slope, steep = AFTER[min(rank, len(AFTER) - 1)]
            level += 0.2 * BY_TEMPERATURE * (rank == 0)
            sharp = -math.log(1 - middle(SHARPNESS_EDGES, place(float((row * row).sum()), SHARPNESS_EDGES)))
            odds = level + slope * sharp + steep * math.log(middle(CONFIDENCE_EDGES, place(share, CONFIDENCE_EDGES)))
            depths.add(draft.tree.depths[0, node].item())
            chance = 1 / (1 + math.exp(-odds))
            assert float(draft.values[0, node]) == pytest.approx(untested * chance, rel=1e-4), (seed, node)
            left[parent] = untested * (1 - chance), rest - float(row[child]), rank + 1
    assert depths == {1, 2, 3}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_is_learnt_does_not_depend_on_the_padding_that_a_neighbour_s_larger_tree_brings(
    temperature: float,
) -> None:
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(400, 30, generator=generator)
    parents = (uniform * torch.arange(30)).int() - (torch.arange(30) == 0).int()
    values, ratios = torch.ones(400, 30), torch.rand(400, 30, generator=generator)
    for node in range(1, 30):
        above = values.gather(1, parents[:, node : node + 1].long())[:, 0]
        values[:, node] = above * torch.rand(400, generator=generator)
    slots = torch.randint(0, 64, (400, 29), generator=generator)
    probs, dist = torch.rand(400, 16, 4, generator=generator) / 4, torch.rand(400, 16, 9, generator=generator) / 5
    rated = []
    for more in (0, 1, 5, 37):
        estimate = Calibrated().bind(Sampling(temperature)).estimate(400, CPU)
        estimate.rate(Slots(torch.ones(400, 16), probs, dist))
        tree = TokenTree.unchecked(torch.zeros(400, 30 + more).long(), F.pad(parents, (0, more), value=-1))
        notes = [estimate.note(F.pad(slots, (0, more)))]
        proposal = Proposal(tree, F.pad(values, (0, more)), None, notes)
        estimate.learn(proposal, F.pad(ratios, (0, more)), torch.ones(400, dtype=torch.bool))
        rated.append(estimate.rate(Slots(torch.ones(400, 16), probs, dist))[0])
    assert all(torch.equal(rated[0], other) for other in rated[1:])


def test_sequences_learn_by_themselves_and_finished_ones_not_at_all() -> None:
    tree = TokenTree(torch.zeros(3, 2).long(), torch.tensor([[-1, 0]]).expand(3, 2))
    dist = torch.full((3, 1, 4), 0.25)
    estimate, alone = Calibration(3, 2, CPU, 0.8), Calibration(1, 2, CPU, 0.8)
    ratios, is_live = torch.tensor([[0.0, 0.1], [0.0, 0.9], [0.0, 0.9]]), torch.tensor([True, True, False])
    for one, rows, chain in ((estimate, 3, tree), (alone, 1, TokenTree.chain([0, 0]))):
        one.rate(Slots(torch.ones(rows, 1), dist[:rows, :, :2], dist[:rows]))
        proposal = Proposal(chain, torch.ones(rows, 2), None, [one.note(torch.zeros(rows, 1).long())])
        one.learn(proposal, ratios[:rows], is_live[:rows])
    priority, _ = estimate.rate(Slots(torch.ones(3, 1), dist[..., :2], dist))
    fresh, _ = Calibration(1, 2, CPU, 0.8).rate(Slots(torch.ones(1, 1), dist[:1, :, :2], dist[:1]))
    expected, _ = alone.rate(Slots(torch.ones(1, 1), dist[:1, :, :2], dist[:1]))
    assert torch.equal(priority[0], expected[0])
    assert float(priority[0, 0, 0]) < float(fresh[0, 0, 0]) < float(priority[1, 0, 0])
    assert torch.equal(priority[2], fresh[0])


def test_a_run_learns_from_the_log_and_its_growth_does_not() -> None:
    dist, growth = TableModel.random(5, 1), Calibrated(depth=2).bind(PLAIN)
    runs = [ModelDrafter(TableLM(dist).as_lm()).start(5, [[0], [0]], random_rows(2)) for _ in range(2)]
    pending = torch.zeros(2, dtype=torch.long)
    for run in runs:
        draft = run.propose(pending, growth, 8)
        before = run._estimate.rate(Slots(torch.ones(2, 1), torch.full((2, 1, 4), 0.2), torch.full((2, 1, 5), 0.2)))[0]
        run.observe(
            Acceptance(
                torch.zeros(2, 1, dtype=torch.int32),
                torch.tensor([1, 0], dtype=torch.int32),
                pending,
                torch.full(draft.tree.tokens.shape, 0.9),
            )
        )
        after = run._estimate.rate(Slots(torch.ones(2, 1), torch.full((2, 1, 4), 0.2), torch.full((2, 1, 5), 0.2)))[0]
        assert float(after[0, 0, 0] - before[0, 0, 0]) > 0.01
        assert torch.equal(after[1], before[1]), "the second sequence stood still"
        run.restart([[0], [0]])
        again = run._estimate.rate(Slots(torch.ones(2, 1), torch.full((2, 1, 4), 0.2), torch.full((2, 1, 5), 0.2)))[0]
        assert torch.equal(again, before), "other texts begin anew"
    assert runs[0]._estimate is not runs[1]._estimate


def test_at_temperature_0_the_eldest_is_believed_as_the_text_goes_and_the_others_share_what_it_leaves() -> None:
    dist = torch.tensor([0.5, 0.3, 0.15, 0.05]).expand(2, 1, 4)
    estimate, fresh = (Calibrated().bind(Sampling()).estimate(2, CPU) for _ in range(2))
    before = estimate.rate(Slots(torch.ones(2, 1), dist[..., :3], dist))[0][:, 0].tolist()
    tree = TokenTree(torch.zeros(2, 5).long(), torch.tensor([[-1, 0, 0, 1, 2]] * 2))
    values = torch.tensor([[1.0, 0.75, 0.1, 0.3, 0.05]] * 2)
    # The first text accepts the eldest child and not its child; the second one stands still.
    ratios = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]] * 2)
    estimate.learn(Proposal(tree, values, None, []), ratios, torch.tensor([True, False]))
    after = estimate.rate(Slots(torch.ones(2, 1), dist[..., :3], dist))[0][:, 0].tolist()
    assert after[1] == before[1]
    weight = LEVEL_WEIGHT + 0.75 * 0.25 + 0.4 * 0.6
    odds = math.log(before[0][0] / (1 - before[0][0])) + (0.25 - 0.4) / weight
    eldest = 1 / (1 + math.exp(-odds))
    wanted = [eldest, *(chance * (1 - eldest) / (1 - before[0][0]) for chance in before[0][1:])]
    assert after[0] == pytest.approx(wanted, rel=1e-5) and after[0] != pytest.approx(before[0], rel=1e-3)
    estimate.forget(0)
    for one in (estimate, fresh):
        one.learn(Proposal(tree, values, None, []), ratios, torch.tensor([True, True]))
    again, expected = (one.rate(Slots(torch.ones(2, 1), dist[..., :3], dist))[0] for one in (estimate, fresh))
    assert torch.equal(again[0], expected[0]), "as a text that begins"


def test_at_temperature_0_what_a_text_says_already_counts_for_more_whoever_says_it() -> None:
    dist = torch.tensor([0.3, 0.3, 0.2, 0.2]).expand(3, 1, 4)
    estimate = Calibrated().bind(Sampling()).estimate(3, CPU)
    # Of three texts, which end in 9 7, the first says 9 7 2, the second 8 7 2, the third neither.
    texts = torch.tensor([[9, 7, 2, 4, 9], [8, 7, 2, 4, 9], [9, 1, 2, 4, 9]])
    estimate.remember(texts, None, torch.tensor([5, 5, 5], dtype=torch.int32))
    root = torch.zeros(3, dtype=torch.long)
    words = Words(torch.tensor([[[1, 2, 3]]] * 3), torch.tensor([[7, 0]] * 3), -torch.ones(3, 2).int(), 1, root)
    found = estimate.rate(Slots(torch.ones(3, 1), dist[..., :3], dist, words=words))[0][:, 0]
    for row, held in enumerate(([1, 1], [1, 0], [0, 0])):
        for rank in range(3):
            level, by_confidence, by_sharpness, *by_text = CERTAIN[rank]
            says = [*held, 0, 0] if rank == 1 else [0, 0, *held]
            odds = level + by_confidence * math.log(dist[0, 0, rank]) - by_sharpness * math.log(1 - 0.26)
            odds += sum(slope * is_said for slope, is_said in zip(by_text, says, strict=True))
            assert float(found[row, rank]) == pytest.approx(1 / (1 + math.exp(-odds)), rel=1e-5), (row, rank)
    assert found[0].argmax() == 1 and found[2].argmax() == 0
    estimate.forget(0)
    assert torch.equal(estimate.rate(Slots(torch.ones(3, 1), dist[..., :3], dist, words=words))[0][0, 0], found[2])


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_greedy_tree_looks_up_what_every_node_would_say(is_stopped: bool) -> None:
    dist, prompt, pending = TableModel.random(6, 3), [3, 1, 0, 2, 5, 4, 0, 1, 3, 3, 0, 4], 2
    growth: Growth = Calibrated(depth=3).bind(Sampling())
    growth = DepthStop(growth, threshold=-50.0, layers=None) if is_stopped else growth
    run = ModelDrafter(TableLM(dist).as_lm()).start(6, [prompt], random_rows(1))
    draft = run.propose(torch.tensor([pending]), growth, 17)
    pairs, triples = set(pairwise(prompt)), set(zip(prompt, prompt[1:], prompt[2:], strict=False))
    probs, values = dist.logits.softmax(-1), dict[tuple[int, ...], float]()

    def visit(path: tuple[int, ...], value: float) -> None:
        before, token = [prompt[-1], pending, *path][-2:]
        row = probs[token]
        children = row.argsort(descending=True).tolist()
        says = [((token, child) in pairs, (before, token, child) in triples) for child in children]
        for rank, child in enumerate(children):
            level, by_confidence, by_sharpness, *by_text = CERTAIN[rank]
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


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_greedy_run_remembers_prompts_and_what_was_accepted_whatever_the_budget(is_fused: bool) -> None:
    dist, growth = TableModel.random(9, 1), Calibrated(depth=2).bind(Sampling())
    run: Any = ModelDrafter(TableLM(dist).as_lm()).start(9, [[1, 2, 3], [4]], random_rows(2))
    texts, pending = [[1, 2, 3], [4]], torch.tensor([5, 6])
    run.reserve(60, DepthStop(growth, threshold=-50.0, layers=None), 6, begins=False)
    growth = run._growth
    for step, budget in enumerate((1, 4, 1, 1, 6, 4)):
        draft = run.propose(pending, growth, budget)
        tree = draft.tree
        if is_fused:  # others append a chain below the root
            tokens = torch.cat([tree.tokens, torch.tensor([[7, 8]] * 2)], 1)
            below = torch.tensor([[0, tree.tokens.shape[1]]] * 2, dtype=torch.int32)
            tree = TokenTree(tokens, torch.cat([tree.parents, below], 1))
            run.extend(tree)
        n = tree.tokens.shape[1]
        path = torch.tensor([[0, n - 2, n - 1] if is_fused else [0, min(1, n - 1), -1], [0, -1, -1]], dtype=torch.int32)
        lengths = torch.tensor([3 if is_fused else min(2, n), step % 2], dtype=torch.int32)
        for row, length in enumerate(lengths.tolist()):
            texts[row] += tree.tokens[row, path[row, :length].long()].tolist()
        pending = torch.where(lengths > 0, (pending + 1) % 9, pending)
        run.observe(Acceptance(path, lengths, pending))
        check_memory(run, texts)
    run.admit(1, [2, 2, 7])
    check_memory(run, [texts[0], [2, 2, 7]])
    run.restart([[8, 1], [3]])
    check_memory(run, [[8, 1], [3]])


def check_memory(run: Any, texts: list[list[int]]) -> None:
    """Compare what an estimate remembers with whole texts that are read at once."""
    fresh = Calibrated().bind(Sampling()).estimate(len(texts), CPU)
    size = max(len(text) for text in texts)
    tokens = torch.tensor([text + [0] * (size - len(text)) for text in texts])
    fresh.remember(tokens, None, torch.tensor([len(text) for text in texts], dtype=torch.int32))
    one, other = run._estimate._base._memory, getattr(fresh, "_memory")  # noqa: B009
    assert torch.equal(one.places[:, :-1], other.places[:, :-1]) and torch.equal(one.last, other.last)


def test_a_greedy_run_learns_from_its_paths_and_its_growth_does_not() -> None:
    dist, growth = TableModel.random(5, 1), Calibrated(depth=2).bind(Sampling())
    run = ModelDrafter(TableLM(dist).as_lm()).start(5, [[0], [0]], random_rows(2))
    pending = torch.zeros(2, dtype=torch.long)

    def eldest() -> Tensor:
        return run._estimate.rate(Slots(torch.ones(2, 1), torch.full((2, 1, 4), 0.2), torch.full((2, 1, 5), 0.2)))[0][
            :, 0, 0
        ]

    run.propose(pending, growth, 2)
    begun = eldest()
    for path, sign in (([0, 1], 1), ([0], -1)):
        draft, before = run.propose(pending, growth, 2), eldest()
        lengths = torch.tensor([len(path), 0], dtype=torch.int32)
        run.observe(Acceptance(torch.tensor([path, path], dtype=torch.int32), lengths, pending))
        assert draft.tree.tokens.shape[1] == 2 and draft.probs is None
        assert sign * float(eldest()[0] - before[0]) > 0.01 and eldest()[1] == before[1]
    run.restart([[0], [0]])
    assert torch.equal(eldest(), begun), "other texts begin anew"


def test_a_run_may_change_its_growth_and_skip_observing() -> None:
    dist, calibrated, chain = TableModel.random(5, 1), Calibrated(depth=2).bind(PLAIN), Chain(2).bind(PLAIN)
    run = ModelDrafter(TableLM(dist).as_lm()).start(5, [[0]], random_rows(1))
    pending = torch.zeros(1, dtype=torch.long)
    for growth, budget in ((calibrated, 8), (calibrated, 3), (chain, 8), (calibrated, 1), (calibrated, 8)):
        run.propose(pending, growth, budget)
        draft = run.propose(pending, growth, budget)
        ratios = torch.full(draft.tree.tokens.shape, 0.5)
        nothing = torch.zeros(1, 1, dtype=torch.int32)
        run.observe(Acceptance(nothing, torch.zeros(1, dtype=torch.int32), pending, ratios))


def test_it_is_the_default_of_a_model_drafter_and_has_a_name() -> None:
    assert ModelDrafter.default_growth == parse_growth("calibrated") == Calibrated()
    assert parse_growth("calibrated:3") == Calibrated(depth=3)
    with pytest.raises(ValueError, match="growth 'calibrated:0' cannot be read: depth must be at least 1, got 0"):
        parse_growth("calibrated:0")


def test_large_budgets_offer_more_children() -> None:
    assert [layer.ranks for layer in Calibrated(depth=2).bind(PLAIN).plan(32).layers] == [12, 4]
    assert [layer.ranks for layer in Calibrated(depth=2).bind(PLAIN).plan(33).layers] == [12, 6]
    assert [layer.ranks for layer in Calibrated(depth=2).plan(33).layers] == [8, 8]
    assert [layer.ranks for layer in Calibrated(depth=2, ranks=3).plan(33).layers] == [3, 3]


def test_large_budgets_grow_deeper_unless_a_depth_is_given() -> None:
    assert [len(Calibrated().plan(budget).layers) for budget in (2, 16, 17, 64)] == [4, 4, 6, 6]
    assert [len(Calibrated(depth=3).plan(budget).layers) for budget in (16, 64)] == [3, 3]
    assert parse_growth("calibrated:5") == Calibrated(depth=5)
