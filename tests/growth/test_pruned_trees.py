"""EAGLE-2 and OPT-Tree against the papers' procedures in plain Python, ties, and their draft calls."""

from __future__ import annotations

import pytest
import torch
from helpers.on_device import treat_as_on_device
from helpers.table_drafts import counted_draft, nodes_by_path, path_prob

from stree.growth import DepthStop, DySpec, Eagle2, Growth, OptTree
from stree.testing.tables import TableModel

Path = tuple[int, ...]


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


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(("depth", "beam", "nodes"), [(3, 2, 5), (4, 3, 14), (2, 3, 2)])
def test_eagle2_keeps_the_best_of_all_candidates(
    depth: int, beam: int, nodes: int, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    treat_as_on_device(monkeypatch, host_can_read=not on_device)
    for seed in range(3):
        dist = TableModel.random(6, seed, scale=1.0)
        draft, calls = counted_draft(dist, Eagle2(depth, beam), nodes + 1)
        draft.tree.check()
        assert set(nodes_by_path(draft.tree)) == eagle2(dist, depth, beam, nodes)
        assert calls <= depth


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_opt_tree_stops_where_a_layer_adds_too_little(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    treat_as_on_device(monkeypatch, host_can_read=not on_device)
    layers = set()
    for seed in range(3):
        dist = TableModel.random(5, seed, scale=2.0)
        for least_gain in (0.0, 0.2, 0.5):
            draft, calls = counted_draft(dist, OptTree(5, least_gain), 13)
            expected, layer = opt_tree(dist, 5, 12, least_gain)
            assert set(nodes_by_path(draft.tree)) == expected
            assert calls <= 5 if on_device else calls == layer
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
            draft, _ = counted_draft(TableModel(logits), growth, budget, batch=2)
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
        together, _ = counted_draft(dist, growth, 12, batch=6)
        for row in range(6):
            alone, _ = counted_draft(dist, growth, 12, first=row)
            assert nodes_by_path(together.tree, row) == nodes_by_path(alone.tree)
