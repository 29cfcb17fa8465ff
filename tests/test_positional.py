"""Fixed shapes drawn without replacement: widths, and Sequoia's best tree against its dynamic programme."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from helpers.enumeration import TableModel
from test_growth import draft_of, random_rows

from stree.growth import (
    RSDC,
    RSDS,
    Calibrated,
    Chain,
    Confidence,
    DecisionStop,
    DepthStop,
    Eagle2,
    Growth,
    OptTree,
    Sequoia,
    SpecInfer,
    Static,
    parse_growth,
)
from stree.growth.positional import best_parents
from stree.sampling import Sampling


def best_value(num_nodes: int, depth: int, rates: tuple[float, ...]) -> float:
    """Expected accepted nodes, root included, of the best tree: Sequoia's recursion over subtree sizes and ranks."""

    @cache
    def tree(size: int, levels: int) -> float:
        return 1 + children(size - 1, levels - 1, 0)

    @cache
    def children(size: int, levels: int, rank: int) -> float:
        if size < 1 or levels < 1 or rank == len(rates):
            return 0.0
        return max(
            rates[rank] * tree(first, levels) + children(size - first, levels, rank + 1) for first in range(1, size + 1)
        )

    return tree(num_nodes, depth + 1)


@pytest.mark.parametrize("rates", [(0.58, 0.105, 0.07, 0.03), (0.4, 0.3, 0.2), (0.9, 0.05)], ids=str)
@pytest.mark.parametrize("depth", [1, 3, 6])
def test_the_tree_is_as_good_as_that_of_the_dynamic_programme(depth: int, rates: tuple[float, ...]) -> None:
    for num_nodes in (1, 2, 5, 12, 23):
        parents = best_parents(num_nodes, depth, rates)
        values, ranks = [1.0], [0] * len(parents)
        for node, parent in enumerate(parents[1:], 1):
            assert parent < node
            values.append(values[parent] * rates[ranks[parent]])
            ranks[parent] += 1
        assert sum(values) == pytest.approx(best_value(num_nodes, depth, rates))


def test_a_plan_fills_the_budget_within_the_depth() -> None:
    for budget in (2, 7, 16, 64):
        plan = Sequoia(depth=4).plan(budget)
        assert plan.num_nodes == budget - 1
        assert len(plan.layers) <= 4
    assert Sequoia(depth=1).plan(64).num_nodes == 12  # no more ranks are known
    assert Sequoia().plan(1).num_nodes == 0


def test_widths_are_those_of_a_static_tree_drawn_alike() -> None:
    assert RSDC([3, 2]).plan(16) == Static([3, 2]).plan(16)
    probs, sampling = TableModel.random(7, 0), Sampling(0.8)
    left, right = (
        draft_of(probs, growth, 16, sampling, random_rows(2), 2) for growth in (RSDC([3, 2]), Static([3, 2]))
    )
    assert torch.equal(left.tree.tokens, right.tree.tokens)
    assert torch.equal(left.tree.parents, right.tree.parents)
    with pytest.raises(ValueError, match=r"a tree of 10 nodes \(root included\) exceeds the budget of 9"):
        RSDC([3, 2]).plan(9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RSDC([]), r"RSDC needs widths of at least 1, got \[\]"),
        (lambda: RSDC([2, 0]), r"RSDC needs widths of at least 1, got \[2, 0\]"),
        (lambda: RSDC([-1, 0]), r"RSDC needs widths of at least 1, got \[-1, 0\]"),
        (lambda: Sequoia(depth=0), "depth must be at least 1, got 0"),
        (lambda: Sequoia(rates=[]), "rates must be positive, not growing, and sum to at most 1, got"),
        (lambda: Sequoia(rates=[0.2, 0.3]), "rates must be positive, not growing, and sum to at most 1, got"),
        (lambda: Sequoia(rates=[0.8, 0.3]), "rates must be positive, not growing, and sum to at most 1, got"),
        (lambda: Sequoia(rates=[0.8, float("nan")]), "rates must be positive, not growing, and sum to at most 1, got"),
        (lambda: Sequoia(rates=[0.8, 0.0]), "rates must be positive, not growing, and sum to at most 1, got"),
    ],
    ids=["empty", "zero", "parents", "depth", "none", "growing", "sum", "nan", "nothing"],
)
def test_a_shape_that_is_none_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_both_have_names() -> None:
    assert parse_growth("rsdc:3,2") == RSDC([3, 2])
    assert parse_growth("sequoia") == Sequoia()
    assert parse_growth("sequoia:3") == Sequoia(depth=3)


@pytest.mark.parametrize(
    ("text", "growth"),
    [
        ("specinfer:3,2", SpecInfer([3, 2])),
        ("rsds:4,3", RSDS(4, 3)),
        ("opt-tree", OptTree()),
        ("opt-tree:7", OptTree(7)),
        ("eagle2", Eagle2()),
        ("eagle2:5", Eagle2(5)),
        ("eagle2:11+depth-stop", DepthStop(Eagle2(11))),
        ("eagle2+depth-stop:-0.7", DepthStop(Eagle2(), -0.7)),
        ("calibrated+decision", DecisionStop(Calibrated())),
        ("static:2,2+decision:0.3", DecisionStop(Static([2, 2]), 0.3)),
        ("chain:8+sure:0.4", Chain(8, stop=Confidence(0.4))),
    ],
)
def test_every_growth_has_a_name(text: str, growth: Growth) -> None:
    assert parse_growth(text) == growth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rsds:4", "growth must be calibrated, .*, got 'rsds:4'"),
        ("chain", "growth must be calibrated, .*, got 'chain'"),
        ("eagle2:1,2", "growth must be calibrated, .*, got 'eagle2:1,2'"),
        ("eagle2+never", r"growth must be .*, \+depth-stop\[:LOG\], .*, got 'eagle2\+never'"),
        ("eagle2+sure:0.4", r"growth 'eagle2\+sure:0.4' cannot be read: sure stops chains, got Eagle2"),
        ("chain:4+sure:2", r"cannot be read: least_prob must be in \[0, 1\], got 2.0"),
        ("chain:4+depth-stop:deep", r"growth 'chain:4\+depth-stop:deep' cannot be read"),
    ],
)
def test_a_name_of_no_growth_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_growth(text)
