"""Sequoia's best tree against its dynamic programme."""

from __future__ import annotations

from functools import cache

import pytest

from stree.growth import Sequoia
from stree.growth.sequoia import best_parents


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
