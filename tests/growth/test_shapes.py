"""Trees of fixed shapes, and the parameters that growths refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.random_rows import random_rows
from helpers.table_drafts import draft_of

from stree import growth as growths
from stree.growth import Growth
from stree.sampling import Sampling
from stree.testing.enumeration import PLAIN
from stree.testing.tables import TableModel


@pytest.mark.parametrize("sampling", [Sampling(), PLAIN], ids=["greedy", "T1"])
@pytest.mark.parametrize(
    ("growth", "parents"),
    [
        (growths.Chain(3), [-1, 0, 1, 2]),
        (growths.Static([3, 1, 2]), [-1, 0, 0, 0, 1, 2, 3, 4, 4, 5, 5, 6, 6]),
        # Parents in no order of depth: 1 and 4 at depth 1; 2, 3 below 1; 5 below 4; 6 below 3.  Drafted layer by layer.
        (growths.Static([-1, 0, 1, 1, 0, 4, 3]), [-1, 0, 0, 1, 1, 2, 4]),
        # The STree paper's: below level 1 two children of its first node and one of its second; level 3 alike; level 4
        # three below the first.
        (growths.Static.stree(), [-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 7]),
    ],
    ids=["chain", "widths", "parents", "stree"],
)
def test_a_fixed_shape_is_drafted_as_it_is(growth: Growth, parents: list[int], sampling: Sampling) -> None:
    tree = draft_of(TableModel.random(7, 0), growth, len(parents), sampling, random_rows(1)).tree
    tree.check()
    assert tree.parents.tolist() == [parents]


@pytest.mark.parametrize(
    ("growth", "budget", "message"),
    [
        (growths.Chain(4), 4, r"a tree of 5 nodes \(root included\) exceeds the budget of 4"),
        (growths.Static([2, 2]), 6, r"a tree of 7 nodes \(root included\) exceeds the budget of 6"),
        (growths.Static([-1, 0, 0, 1]), 3, r"a tree of 4 nodes \(root included\) exceeds the budget of 3"),
        (growths.RSDC([3, 2]), 9, r"a tree of 10 nodes \(root included\) exceeds the budget of 9"),
        (growths.RSDS(3, 2), 6, r"a tree of 7 nodes \(root included\) exceeds the budget of 6"),
        (growths.SpecInfer([2, 2]), 6, r"a tree of 7 nodes \(root included\) exceeds the budget of 6"),
        (growths.Static.stree(), 12, r"a tree of 13 nodes \(root included\) exceeds the budget of 12"),
    ],
    ids=["chain", "widths", "parents", "rsdc", "rsds", "specinfer", "stree"],
)
def test_a_fixed_shape_above_the_budget_is_refused(growth: Growth, budget: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        growth.plan(budget)
    assert growth.plan(budget + 1).num_nodes == budget


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: growths.Chain(0), "depth must be at least 1, got 0"),
        (lambda: growths.Static([]), "Static needs widths or parents, got an empty list"),
        (lambda: growths.Static([2, 0]), r"every width must be at least 1, got \[2, 0\]"),
        (lambda: growths.Static([-1, 0, 2]), r"parents must name an earlier node each, got \[-1, 0, 2\]"),
        (lambda: growths.DySpec(depth=0), "depth must be at least 1, got 0"),
        (lambda: growths.DySpec(ranks=0), "ranks must be at least 1, got 0"),
        (lambda: growths.DySpec(width=0), "width must be at least 1, got 0"),
        (lambda: growths.DySpec(threshold=1.0), r"threshold must be in \[0, 1\), got 1.0"),
        (lambda: growths.DySpec(form="beam"), "form must be one of layers, threshold, heap, got 'beam'"),
        (lambda: growths.Calibrated(depth=0), "depth must be at least 1, got 0"),
        (lambda: growths.Calibrated(ranks=0), "ranks must be at least 1, got 0"),
        (lambda: growths.OptTree(depth=0), "depth must be at least 1, got 0"),
        (lambda: growths.OptTree(least_gain=math.nan), "least_gain must not be negative, got nan"),
        (lambda: growths.Eagle2(depth=0), "depth must be at least 1, got 0"),
        (lambda: growths.Eagle2(beam=0), "beam must be at least 1, got 0"),
        (lambda: growths.RSDS(0, 2), "width must be at least 1, got 0"),
        (lambda: growths.RSDS(2, 0), "depth must be at least 1, got 0"),
        (lambda: growths.SpecInfer([2, 0]), r"SpecInfer needs widths of at least 1, got \[2, 0\]"),
        (lambda: growths.TargetInit(0, 5), "must be at least 1, got 0"),
        (lambda: growths.RSDC([2, 0]), r"RSDC needs widths of at least 1, got \[2, 0\]"),
        (lambda: growths.Sequoia(depth=0), "depth must be at least 1, got 0"),
        (lambda: growths.Sequoia(rates=[0.2, 0.3]), "rates must be positive, not growing, and sum to at most 1, got"),
        (lambda: growths.Sequoia(rates=[0.8, 0.3]), "rates must be positive, not growing, and sum to at most 1, got"),
        (lambda: growths.Sequoia(rates=[0.8, 0.0]), "rates must be positive, not growing, and sum to at most 1, got"),
    ],
)
def test_a_shape_that_is_none_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        growths.Chain,
        growths.OptTree,
        growths.TargetInit,
        lambda size: growths.DySpec(depth=size),
        lambda size: growths.Calibrated(ranks=size),
        lambda size: growths.Eagle2(beam=size),
        lambda size: growths.RSDS(size, 2),
        lambda size: growths.Sequoia(depth=size),
        lambda size: growths.Static([size]),
        lambda size: growths.RSDC([size]),
        lambda size: growths.SpecInfer([size]),
    ],
)
def test_a_size_that_is_no_integer_is_refused(make: Any) -> None:
    with pytest.raises(TypeError, match=r"must be an integer, got float|must be a list of integers, got"):
        make(2.5)


def test_a_shape_may_be_a_tensor() -> None:
    widths: Any = torch.tensor([2, 2])
    assert growths.Static(widths) == growths.Static([2, 2])
    assert growths.RSDC(widths).widths == (2, 2)


def test_rsdc_is_a_static_tree_drawn_alike() -> None:
    dist, rng = TableModel.random(7, 0), random_rows(2)
    left, right = (draft_of(dist, growth([3, 2]), 16, PLAIN, rng, 2).tree for growth in (growths.RSDC, growths.Static))
    assert torch.equal(left.tokens, right.tokens) and torch.equal(left.parents, right.parents)
