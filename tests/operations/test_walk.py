"""stree.kernels.step.walk: a stack machine of a few slots must meet every node with its parent at hand.

Run: python -m pytest tests/operations/test_walk.py
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers import oracles
from hypothesis import given, settings
from hypothesis import strategies as st

from stree.kernels.step.walk import depth_first_walk, walk_slots
from stree.kernels.topology import Topology
from stree.kernels.tree_indices import ancestor_mask


def run(entries: list[int], num_slots: int) -> Iterator[tuple[int, int]]:
    """Give every node with the node whose state the walk has at hand; -1 is the state above the root."""
    slots, last = [-1] * num_slots, -1
    for entry in entries:
        node, take, keep = entry & 0xFFFF, entry >> 16 & 0xFF, entry >> 24
        yield node, slots[take - 1] if take else last
        last = node
        if keep:
            slots[keep - 1] = node


@given(st.integers(0, 10**6), st.integers(1, 128), st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_every_node_meets_its_parent(seed: int, n: int, padding: int) -> None:
    parents = oracles.random_parents(2, n, torch.Generator().manual_seed(seed), min(padding, n - 1))
    walk = depth_first_walk(parents, ancestor_mask(parents))
    assert walk.dtype == torch.int32
    for row, entries in zip(parents.tolist(), walk.tolist(), strict=True):
        assert dict(run(entries, walk_slots(n))) == dict(enumerate(row))


def branching_tree(depth: int) -> list[int]:
    """Make a tree that needs the most slots: every node on the way has two children with equal subtrees."""
    return [-1] + [(i - 1) // 2 for i in range(1, 2 ** (depth + 1) - 1)]


@pytest.mark.parametrize("depth", range(1, 7), ids=lambda d: f"depth{d}")
def test_a_full_binary_tree_needs_every_slot(depth: int) -> None:
    parents = torch.tensor([branching_tree(depth)], dtype=torch.int32)
    entries = depth_first_walk(parents, ancestor_mask(parents))[0].tolist()
    assert max(entry >> 24 for entry in entries) == walk_slots(len(entries)) == depth


def test_a_chain_keeps_nothing() -> None:
    parents = torch.arange(-1, 99, dtype=torch.int32)[None]
    assert depth_first_walk(parents, ancestor_mask(parents))[0].tolist() == list(range(100))


def test_a_topology_keeps_the_walk_that_was_read_once() -> None:
    parents = oracles.random_parents(2, 9, torch.Generator().manual_seed(0))
    topology = Topology.of(parents)
    assert topology.walk is topology.walk and torch.equal(topology.walk, depth_first_walk(parents, topology.mask))
