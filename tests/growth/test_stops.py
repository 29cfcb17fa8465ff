"""Stop rules: where they end a tree, how they combine, and the parameters that they refuse."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from helpers.on_device import treat_as_on_device
from helpers.table_drafts import counted_draft, nodes_by_path

from stree.growth import Chain, Confidence, DecisionStop, DepthStop, DySpec, Eagle2, Growth, Static
from stree.sampling import Sampling
from stree.testing.tables import TableModel

GREEDY = Sampling()
Path = tuple[int, ...]


def stopped_depth(dist: TableModel, sampling: Sampling, growth: Growth, budget: int, first: int) -> tuple[int, int]:
    draft, calls = counted_draft(dist, growth, budget, sampling, first=first)
    return int(draft.tree.depths.max()), calls


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8)], ids=["greedy", "T0.8"])
def test_a_chain_stops_before_it_draws_from_a_distribution_that_is_unsure(sampling: Sampling) -> None:
    dist = TableModel.random(6, 4, scale=2.5)
    for rule in (Confidence(least_prob=0.6), Confidence(most_entropy=1.0)):
        for first in range(6):
            growth = Chain(5, stop=rule)
            draft, calls = counted_draft(dist, growth, 6, sampling, first=first)
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


def test_the_depth_stop_gives_eagle_2_the_paper_s_depth() -> None:
    plans = [growth.plan(60) for growth in (Eagle2(), DepthStop(Eagle2()), DepthStop(Eagle2(7)))]
    assert [len(plan.layers) for plan in plans] == [6, 11, 7], "it looks at layers 5, 7 and 9"


def chain_prob(dist: TableModel, path: Path) -> float:
    probs = dist.logits.softmax(-1)
    return math.prod(float(probs[above, token]) for above, token in zip(path, path[1:], strict=False))


def affine(row: list[float], inputs: list[float]) -> float:
    return math.fsum([*map(math.prod, zip(row[:-1], inputs, strict=True)), row[-1]])


def test_the_decision_is_the_network_s() -> None:
    dist, generator = TableModel.random(12, 6, scale=2.0), torch.Generator().manual_seed(1)
    first_layer = torch.randn(4, 12, generator=generator)
    last_layer = torch.randn(1, 5, generator=generator)
    depths = set()
    for first in range(12):
        growth = DecisionStop(Chain(4), 0.5, [first_layer.tolist(), last_layer.tolist()])
        depth, calls = stopped_depth(dist, GREEDY, growth, 5, first)
        token, value = first, 1.0
        for expected in range(5):
            probs = dist.logits[token].softmax(-1)
            inputs = [*sorted(probs.tolist(), reverse=True)[:10], value]
            hidden = [max(0.0, affine(row, inputs)) for row in first_layer.tolist()]
            odds = affine(last_layer[0].tolist(), hidden)
            if odds <= 0 or expected == 4:
                break
            token, value = int(probs.argmax()), value * float(probs.max())
        assert depth == expected
        assert calls == min(expected + 1, 4)
        depths.add(expected)
    assert len(depths) > 1


@pytest.mark.parametrize(
    "growth",
    [Chain(3, stop=Confidence(0.7)), DepthStop(Static([2, 2]), -0.3, None), DepthStop(DySpec(depth=3), -0.4, None)],
    ids=["chain", "static", "layers"],
)
def test_on_a_device_a_stopped_layer_is_padding(growth: Growth, monkeypatch: pytest.MonkeyPatch) -> None:
    dist, sampling = TableModel.random(6, 4, scale=2.0), Sampling(1.0)
    host, host_calls = counted_draft(dist, growth, 8, sampling)
    treat_as_on_device(monkeypatch)
    device, calls = counted_draft(dist, growth, 8, sampling)
    device.tree.check()
    assert nodes_by_path(device.tree) == nodes_by_path(host.tree)
    assert calls == len(growth.bind(sampling).plan(8).layers) >= host_calls


@pytest.mark.parametrize(
    ("make", "message"),
    [
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


def test_what_is_no_growth_or_no_rule_is_refused() -> None:
    base: Any
    for stopped, base in itertools.product((DepthStop, DecisionStop), (None, "chain:4", Chain)):
        with pytest.raises(TypeError, match=r"base must be a growth such as Chain\(4\), got "):
            stopped(base)
    rule: Any = 3
    with pytest.raises(TypeError, match=r"stop must be a rule such as Confidence\(0.4\), got 3"):
        Chain(4, stop=rule)
