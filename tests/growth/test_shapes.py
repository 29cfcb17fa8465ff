"""Plans of fixed shapes, and the parameters that growths refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.enumeration import TableModel
from helpers.growth_drafts import PLAIN, draft_of, random_rows

from stree.growth import (
    RSDC,
    RSDS,
    Calibrated,
    Chain,
    DySpec,
    Eagle2,
    Growth,
    Layer,
    OptTree,
    Sequoia,
    SpecInfer,
    Static,
    TargetInit,
)
from stree.sampling import Sampling


def test_a_chain_is_a_layer_of_one_node_for_every_drafted_token() -> None:
    plan = Chain(3).plan(4)
    assert plan.layers == (Layer(1, 1, (0,)),) * 3
    assert plan.num_nodes == 3


def test_widths_multiply_from_depth_to_depth() -> None:
    plan = Static([3, 1, 2]).plan(16)
    assert [(layer.width, layer.ranks) for layer in plan.layers] == [(3, 3), (3, 1), (6, 2)]
    assert [layer.slots for layer in plan.layers] == [(0, 1, 2), (0, 1, 2), (0, 1, 2, 3, 4, 5)]
    assert plan.num_nodes == 12


def test_parents_become_slots_of_their_layers() -> None:
    #      0         parents in no order of depth: 1 and 4 at depth 1; 2, 3 below 1; 5 below 4; 6 below 3
    plan = Static([-1, 0, 1, 1, 0, 4, 3]).plan(7)
    assert plan.layers == (Layer(2, 2, (0, 1)), Layer(3, 2, (0, 1, 2)), Layer(1, 1, (1,)))


def test_the_tree_of_the_stree_paper_has_thirteen_nodes_in_four_levels() -> None:
    plan = Static.stree().plan(13)
    assert plan.num_nodes == 12
    assert [layer.width for layer in plan.layers] == [3, 3, 3, 3]
    dist = TableModel.random(7, 0)
    for sampling in (Sampling(), PLAIN):
        tree = draft_of(dist, Static.stree(), 13, sampling, random_rows(1)).tree
        tree.check()
        # Level 2: two below the first of level 1, one below its second; level 3 alike; level 4: three below the first.
        assert tree.parents.tolist() == [[-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 7]]


@pytest.mark.parametrize(
    ("growth", "budget", "message"),
    [
        (Chain(4), 4, r"a tree of 5 nodes \(root included\) exceeds the budget of 4"),
        (Static([2, 2]), 6, r"a tree of 7 nodes \(root included\) exceeds the budget of 6"),
        (Static([-1, 0, 0, 1]), 3, r"a tree of 4 nodes \(root included\) exceeds the budget of 3"),
        (RSDC([3, 2]), 9, r"a tree of 10 nodes \(root included\) exceeds the budget of 9"),
        (RSDS(3, 2), 6, r"a tree of 7 nodes \(root included\) exceeds the budget of 6"),
        (SpecInfer([2, 2]), 6, r"a tree of 7 nodes \(root included\) exceeds the budget of 6"),
        (Static.stree(), 12, r"a tree of 13 nodes \(root included\) exceeds the budget of 12"),
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
        (lambda: Chain(0), "depth must be at least 1, got 0"),
        (lambda: Static([]), "Static needs widths or parents, got an empty list"),
        (lambda: Static([2, 0]), r"every width must be at least 1, got \[2, 0\]"),
        (lambda: Static([-1, 0, 2]), r"parents must name an earlier node each, got \[-1, 0, 2\]"),
        (lambda: Static([-1, 0, -1]), r"parents must name an earlier node each, got \[-1, 0, -1\]"),
        (lambda: DySpec(depth=0), "depth must be at least 1, got 0"),
        (lambda: DySpec(ranks=0), "ranks must be at least 1, got 0"),
        (lambda: DySpec(width=-2), "width must be at least 1, got -2"),
        (lambda: DySpec(width=0), "width must be at least 1, got 0"),
        (lambda: DySpec(threshold=1.0), r"threshold must be in \[0, 1\), got 1.0"),
        (lambda: DySpec(form="beam"), "form must be 'layers' or 'heap', got 'beam'"),
        (lambda: Calibrated(depth=0), "depth must be at least 1, got 0"),
        (lambda: Calibrated(ranks=0), "ranks must be at least 1, got 0"),
        (lambda: OptTree(depth=0), "depth must be at least 1, got 0"),
        (lambda: OptTree(least_gain=-0.1), "least_gain must not be negative, got -0.1"),
        (lambda: OptTree(least_gain=math.nan), "least_gain must not be negative, got nan"),
        (lambda: Eagle2(depth=0), "depth must be at least 1, got 0"),
        (lambda: Eagle2(beam=0), "beam must be at least 1, got 0"),
        (lambda: RSDS(0, 2), "width must be at least 1, got 0"),
        (lambda: RSDS(2, 0), "depth must be at least 1, got 0"),
        (lambda: SpecInfer([]), r"SpecInfer needs widths of at least 1, got \[\]"),
        (lambda: SpecInfer([2, 0]), r"SpecInfer needs widths of at least 1, got \[2, 0\]"),
        (lambda: RSDC([]), r"RSDC needs widths of at least 1, got \[\]"),
        (lambda: RSDC([2, 0]), r"RSDC needs widths of at least 1, got \[2, 0\]"),
        (lambda: RSDC([-1, 0]), r"RSDC needs widths of at least 1, got \[-1, 0\]"),
        (lambda: Sequoia(depth=0), "depth must be at least 1, got 0"),
        (lambda: Sequoia(rates=[]), "rates must be positive, not growing, and sum to at most 1, got"),
        (lambda: Sequoia(rates=[0.2, 0.3]), "rates must be positive, not growing, and sum to at most 1, got"),
        (lambda: Sequoia(rates=[0.8, 0.3]), "rates must be positive, not growing, and sum to at most 1, got"),
        (lambda: Sequoia(rates=[0.8, math.nan]), "rates must be positive, not growing, and sum to at most 1, got"),
        (lambda: Sequoia(rates=[0.8, 0.0]), "rates must be positive, not growing, and sum to at most 1, got"),
    ],
)
def test_a_shape_that_is_none_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


HALF: Any = 2.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: Chain(HALF), lambda: DySpec(depth=HALF), lambda: Calibrated(ranks=HALF), lambda: OptTree(HALF),
        lambda: Eagle2(beam=HALF), lambda: RSDS(HALF, 2), lambda: Sequoia(depth=HALF), lambda: TargetInit(HALF),
        lambda: Static([HALF]), lambda: RSDC([HALF]), lambda: SpecInfer([HALF]),
    ],
    ids=["chain", "dyspec", "calibrated", "opt-tree", "eagle2", "rsds", "sequoia", "target-init", "static", "rsdc",
         "specinfer"],
)  # fmt: skip
def test_a_size_that_is_no_integer_is_refused(make: Any) -> None:
    with pytest.raises(TypeError, match=r"must be an integer, got float|cannot be interpreted as an integer"):
        make()


def test_a_shape_may_be_a_tensor() -> None:
    widths: Any = torch.tensor([2, 2])
    assert Static(widths) == Static([2, 2])
    assert RSDC(widths).widths == (2, 2)


def test_widths_are_those_of_a_static_tree_drawn_alike() -> None:
    assert RSDC([3, 2]).plan(16) == Static([3, 2]).plan(16)
    probs, sampling = TableModel.random(7, 0), Sampling(0.8)
    left, right = (
        draft_of(probs, growth, 16, sampling, random_rows(2), 2) for growth in (RSDC([3, 2]), Static([3, 2]))
    )
    assert torch.equal(left.tree.tokens, right.tree.tokens)
    assert torch.equal(left.tree.parents, right.tree.parents)
