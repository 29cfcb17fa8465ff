"""Trees of the most probable tokens against the papers' procedures in plain Python, ties, and what they cost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.enumeration import TableLM, TableModel
from helpers.on_device import treat_as_on_device
from test_growth import nodes_by_path, path_prob, random_rows

from stree.drafters import Draft, ModelDrafter
from stree.growth import Chain, Confidence, DecisionStop, DepthStop, DySpec, Eagle2, Growth, OptTree, Static
from stree.sampling import Random, Sampling

GREEDY = Sampling()
Path = tuple[int, ...]


def proposed(
    dist: TableModel, growth: Growth, budget: int, sampling: Sampling = GREEDY, batch: int = 1, first: int = 0
) -> tuple[Draft, int]:
    """Propose below pending tokens first, first + 1, ...; return the draft and the draft calls really made."""
    lm = TableLM(dist)
    run = ModelDrafter(lm.as_lm()).start(dist.vocab, [[0]] * batch, random_rows(batch))
    pending = (torch.arange(batch) + first) % dist.vocab
    draft = run.propose(pending, growth.bind(sampling), budget)
    assert draft.num_calls == lm.num_calls
    return draft, lm.num_calls


def best(dist: TableModel, paths: list[Path], count: int) -> list[Path]:
    return sorted(paths, key=lambda path: -path_prob(dist, path))[:count]


def eagle2(dist: TableModel, depth: int, beam: int, nodes: int) -> set[Path]:
    """Expand beams, then rerank all candidates: EAGLE-2 by its description."""
    frontier: list[Path] = [()]
    pool: list[Path] = []
    for _ in range(depth):
        candidates = []
        for path in frontier:
            probs = dist.logits[path[-1] if path else 0].softmax(-1)
            candidates += [(*path, int(token)) for token in probs.topk(min(beam, dist.vocab)).indices]
        pool += candidates
        frontier = best(dist, candidates, beam)
    return set(best(dist, pool, nodes))


def opt_tree(dist: TableModel, depth: int, nodes: int, least_gain: float) -> tuple[set[Path], int]:
    """Expand the best nodes of each layer until a layer adds too little: OPT-Tree by its description."""
    frontier: list[Path] = [()]
    pool: list[Path] = []
    expected, calls = 0.0, 0
    for _ in range(depth):
        calls += 1
        frontier = best(dist, [(*path, token) for path in frontier for token in range(dist.vocab)], nodes)
        pool += frontier
        now = sum(path_prob(dist, path) for path in best(dist, pool, nodes))
        if now - expected <= least_gain:
            break
        expected = now
    return set(best(dist, pool, nodes)), calls


@pytest.mark.parametrize("waits", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(("depth", "beam", "nodes"), [(3, 2, 5), (4, 3, 14), (3, 4, 30), (2, 3, 2)])
def test_eagle2_keeps_the_best_of_all_candidates(
    depth: int, beam: int, nodes: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    treat_as_on_device(monkeypatch, host_can_read=not waits)
    for seed in range(4):
        dist = TableModel.random(6, seed, scale=1.0)
        draft, calls = proposed(dist, Eagle2(depth, beam), nodes + 1)
        draft.tree.check()
        assert set(nodes_by_path(draft.tree)) == eagle2(dist, depth, beam, nodes)
        assert calls <= depth


@pytest.mark.parametrize("waits", [False, True], ids=["host", "device"])
def test_opt_tree_stops_where_a_layer_adds_too_little(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    treat_as_on_device(monkeypatch, host_can_read=not waits)
    layers = set()
    for seed in range(4):
        dist = TableModel.random(5, seed, scale=2.0)
        for least_gain in (0.0, 0.2, 0.5):
            draft, calls = proposed(dist, OptTree(5, least_gain), 13)
            expected, layer = opt_tree(dist, 5, 12, least_gain)
            assert set(nodes_by_path(draft.tree)) == expected
            assert calls <= 5 if waits else calls == layer
            layers.add(layer)
    assert len(layers) > 2, "growth stops at several depths"


@pytest.mark.parametrize(
    "growth", [Eagle2(4, 3), OptTree(4, 0.0), DySpec(depth=4)], ids=["eagle2", "opt-tree", "layers"]
)
def test_ties_keep_no_child_without_its_parent(growth: Growth) -> None:
    # A distribution of one token gives log-probability 0 along a path: child and parent have exactly the same value.
    sure = torch.full((5, 5), -torch.inf, dtype=torch.float64)
    sure[torch.arange(5), (torch.arange(5) + 1) % 5] = 0.0
    for logits in (sure, torch.zeros(5, 5, dtype=torch.float64)):
        for budget in (2, 3, 4, 6, 9):
            draft, _ = proposed(TableModel(logits), growth, budget, batch=2)
            draft.tree.check()
            for row in range(2):
                paths = nodes_by_path(draft.tree, row)
                assert len(set(paths)) == len(paths) == min(budget - 1, 4 if logits is sure else 99)
                assert all(path[:-1] in paths for path in paths if len(path) > 1)
                assert int(draft.tree.tokens[row, 0]) == row, "the root ties too"
                if logits is sure:
                    assert max(paths) == tuple((row + step) % 5 for step in range(1, len(paths) + 1))


def test_a_row_s_tree_does_not_depend_on_its_neighbours() -> None:
    dist = TableModel.random(6, 2, scale=2.5)
    for growth in (Eagle2(4, 3), OptTree(4, 0.3), DepthStop(Eagle2(4, 3), -0.4, None)):
        together, _ = proposed(dist, growth, 12, batch=6)
        for row in range(6):
            alone, _ = proposed(dist, growth, 12, first=row)
            assert nodes_by_path(together.tree, row) == nodes_by_path(alone.tree)


def stopped_depth(dist: TableModel, sampling: Sampling, growth: Growth, budget: int, first: int) -> tuple[int, int]:
    draft, calls = proposed(dist, growth, budget, sampling, first=first)
    return int(draft.tree.depths.max()), calls


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8)], ids=["greedy", "T0.8"])
def test_a_chain_stops_before_it_draws_from_a_distribution_that_is_unsure(sampling: Sampling) -> None:
    dist = TableModel.random(6, 4, scale=2.5)
    for rule in (Confidence(least_prob=0.6), Confidence(most_entropy=1.0)):
        for first in range(6):
            growth = Chain(5, stop=rule)
            draft, calls = proposed(dist, growth, 6, sampling, first=first)
            chain = [first, *(path[-1] for path in nodes_by_path(draft.tree))]
            probs = (dist.logits[chain] / (sampling.temperature or 1)).softmax(-1)
            is_sure = (probs.amax(-1) >= rule.least_prob) & (torch.special.entr(probs).sum(-1) <= rule.most_entropy)
            assert is_sure[:-1].all(), "every distribution that was drawn from was sharp"
            assert len(chain) == 6 or not is_sure[-1]
            assert calls == min(len(chain), 5), "no draft call is made after the one whose distribution is unsure"


def test_the_depth_stop_compares_the_beam_s_mass_at_its_layers() -> None:
    dist, threshold = TableModel.random(6, 5, scale=2.5), -0.7
    depths = set()
    for first in range(6):
        base = Eagle2(4, 2)
        depth, calls = stopped_depth(dist, GREEDY, DepthStop(base, threshold, [1, 2]), 30, first)
        frontier: list[Path] = [(first,)]
        for layer in range(1, 5):
            candidates = [(*path, token) for path in frontier for token in range(6)]
            frontier = sorted(candidates, key=lambda path: -chain_prob(dist, path))[:2]
            if layer in (1, 2) and math.log(sum(chain_prob(dist, path) for path in frontier)) < threshold:
                break
        assert (depth, calls) == (layer, layer)
        depths.add(layer)
    assert len(depths) > 1


def chain_prob(dist: TableModel, path: Path) -> float:
    probs = dist.logits.softmax(-1)
    return math.prod(float(probs[above, token]) for above, token in zip(path, path[1:], strict=False))


def affine(row: list[float], inputs: list[float]) -> float:
    return math.fsum([*map(math.prod, zip(row[:-1], inputs, strict=True)), row[-1]])


def test_stops_and_gains_begin_anew_with_every_tree() -> None:
    shape, cpu, rng = Eagle2(depth=3, beam=2), torch.device("cpu"), Random(0, torch.arange(1), torch.zeros(1).long())
    stopped, gain = DepthStop(shape, threshold=-0.5, layers=(2,)).estimate(1, cpu), OptTree().estimate(1, cpu)
    for _ in range(2):
        for estimate in (stopped, gain):
            estimate.begin(shape.plan(3), rng)
        answers = [stopped.goes_on(torch.tensor([[0.1]])) for _ in range(3)]
        assert [answer if answer is None else answer.tolist() for answer in answers] == [None, [False], None]
        for values, goes_on in (([0.6, 0.3], True), ([0.2, 0.1], False)):
            answer = gain.goes_on(torch.tensor([values]))
            assert answer is not None and answer.tolist() == [goes_on]


def test_of_two_stop_rules_either_stops() -> None:
    cpu, values, dist = torch.device("cpu"), torch.tensor([[0.3]]), torch.tensor([[[0.6, 0.4]]])
    for one, other in ((-0.5, -2.0), (-2.0, -0.5), (-2.0, -2.0)):  # of which the first of all is above the value's
        rules = DepthStop(DepthStop(Eagle2(), one, layers=None), other, layers=None)
        answer = rules.estimate(1, cpu).goes_on(values)
        assert answer is not None and answer.tolist() == [-0.5 not in (one, other)]
    for one, other in ((0.0, 1.0), (1.0, 0.0), (0.0, 0.0)):
        answer = DecisionStop(DecisionStop(Eagle2(), one), other).estimate(1, cpu).draws(values, dist)
        assert answer is not None and answer.tolist() == [1.0 not in (one, other)]


def test_the_decision_is_the_network_s() -> None:
    dist, generator = TableModel.random(12, 6, scale=2.0), torch.Generator().manual_seed(1)
    first_layer = torch.randn(4, 12, generator=generator)
    last_layer = torch.randn(1, 5, generator=generator)
    depths = set()
    for first in range(12):
        growth = DecisionStop(Chain(4), 0.5, [first_layer.tolist(), last_layer.tolist()])
        depth, calls = stopped_depth(dist, GREEDY, growth, 5, first)
        token, reach = first, 1.0
        for expected in range(5):
            probs = dist.logits[token].softmax(-1)
            inputs = [*sorted(probs.tolist(), reverse=True)[:10], reach]
            hidden = [max(0.0, affine(row, inputs)) for row in first_layer.tolist()]
            odds = affine(last_layer[0].tolist(), hidden)
            if odds <= 0 or expected == 4:
                break
            token, reach = int(probs.argmax()), reach * float(probs.max())
        assert depth == expected
        assert calls == min(expected + 1, 4)
        depths.add(expected)
    assert len(depths) > 1


@pytest.mark.parametrize(
    "growth",
    [Chain(3, stop=Confidence(0.7)), DepthStop(Static([2, 2]), -0.3, None), DepthStop(DySpec(depth=3), -0.4, None)],
    ids=["chain", "static", "layers"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_on_a_device_a_stopped_layer_is_padding(
    growth: Growth, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist = TableModel.random(6, 4, scale=2.0)
    host, host_calls = proposed(dist, growth, 8, Sampling(temperature))
    treat_as_on_device(monkeypatch)
    device, calls = proposed(dist, growth, 8, Sampling(temperature))
    device.tree.check()
    assert nodes_by_path(device.tree) == nodes_by_path(host.tree)
    assert device.tree.tokens.shape[1] >= host.tree.tokens.shape[1]
    assert calls == len(growth.bind(Sampling(temperature)).plan(8).layers) >= host_calls


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptTree(depth=0), "depth must be at least 1, got 0"),
        (lambda: OptTree(least_gain=-0.1), "least_gain must not be negative, got -0.1"),
        (lambda: OptTree(least_gain=math.nan), "least_gain must not be negative, got nan"),
        (lambda: Eagle2(depth=0), "depth must be at least 1, got 0"),
        (lambda: Eagle2(beam=0), "beam must be at least 1, got 0"),
        (lambda: Confidence(), "Confidence needs least_prob or most_entropy, got neither"),
        (lambda: Confidence(1.2), r"least_prob must be in \[0, 1\], got 1.2"),
        (lambda: Confidence(most_entropy=-1.0), "most_entropy must not be negative, got -1.0"),
        (lambda: DepthStop(Chain(2), 0.5), "threshold must be a log-probability, at most 0, got 0.5"),
        (lambda: DepthStop(Chain(2), layers=[0, 2]), r"layers must be depths of at least 1, got \[0, 2\]"),
        (lambda: DepthStop(Chain(2), layers=[]), r"layers must be depths of at least 1, got \[\]"),
        (lambda: DecisionStop(Chain(2), 1.5), r"threshold must be in \[0, 1\], got 1.5"),
        (
            lambda: DecisionStop(Chain(2), weights=[[[0.0] * 11]]),
            r"weights must have rows of 11 inputs and a bias here, got rows of \[11\]",
        ),
        (lambda: DecisionStop(Chain(2), weights=[[[0.0] * 12] * 2]), "weights must end in one output, got 2"),
        (lambda: DecisionStop(Chain(2), weights=[]), "weights must end in one output, got no layer"),
        (lambda: DepthStop(DySpec(form="heap")).plan(8), "DepthStop needs a growth of layers, got DySpec"),
        (lambda: DepthStop(Chain(8)).plan(4), r"a tree of 9 nodes \(root included\) exceeds the budget of 4"),
    ],
)
def test_parameters_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
