"""What layers share of a tree and of a path is the same from one launch as from torch's operators.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_topology.py
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers.oracles import path_to, random_parents
from hypothesis import given, settings
from hypothesis import strategies as st

from stree.kernels.topology import AcceptedPath, Topology
from stree.kernels.tree_indices import ancestor_bits, ancestor_mask

INDICES = ("hidden", "path_sum", "bits", "conv_index")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def assert_same(made: Any, expected: Any, *names: str) -> None:
    """Require equal values, shapes and dtypes."""
    for name in names:
        value, found = getattr(expected, name), getattr(made, name)
        assert (found is None) == (value is None), name
        if value is not None:
            found = found.cpu()
            assert found.dtype == value.dtype and found.shape == value.shape and torch.equal(found, value), name


@pytest.mark.parametrize(("n", "width"), [(1, 4), (5, None), (16, 1), (33, 2), (33, 4), (128, 4), (130, 2)])
def test_a_topology_of_one_launch_is_that_of_the_operators(n: int, width: int | None) -> None:
    parents = random_parents(3, n, torch.Generator().manual_seed(n), padding=min(3, n - 1))
    expected = Topology.of(parents, width)
    made = Topology.of(parents.to(DEVICE), width, backend="triton")
    assert_same(made, expected, *INDICES)


def test_a_mask_of_a_larger_tree_is_read_in_place() -> None:
    parents = random_parents(2, 40, torch.Generator().manual_seed(0)).to(DEVICE)
    whole = ancestor_mask(parents)
    made = Topology.of(parents[:, :9], 4, mask=whole[:, :9, :9], backend="triton")
    torn_mask = whole.transpose(1, 2).contiguous().transpose(1, 2)[:, :9, :9]
    torn = Topology.of(parents[:, :9], 4, mask=torn_mask, backend="triton")
    expected = Topology.of(parents[:, :9].cpu(), 4, backend="reference")
    assert_same(made, expected, "bits")
    assert_same(torn, expected, *INDICES)
    assert made.bits is not None and torch.equal(made.bits.cpu(), ancestor_bits(expected.mask))


@pytest.mark.parametrize(
    ("m", "width", "dtype"),
    [
        (0, 4, torch.int32), (1, None, torch.int64), (1, 2, torch.int32), (3, 1, torch.int64), (3, 8, torch.int32),
        (16, 4, torch.int64), (40, 4, torch.int32),
    ],
)  # fmt: skip
def test_an_accepted_path_of_one_launch_is_that_of_the_operators(m: int, width: int | None, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(m)
    path = torch.randint(0, 64, (5, m + 2), generator=draw).to(dtype)[:, 1 : m + 1]
    lengths = torch.tensor([0, m, m // 2, min(m, 1), max(m - 1, 0)], dtype=torch.int32)
    expected = AcceptedPath.cast(path, lengths, width)
    made = AcceptedPath.of(path.to(DEVICE), lengths.to(DEVICE), width, backend="triton")
    assert_same(made, expected, *(field.name for field in dataclasses.fields(AcceptedPath)))
    nodes = torch.randn(5, 64, 3, generator=draw)
    assert torch.equal(made.take(nodes.to(DEVICE)).cpu(), expected.take(nodes))


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_mask_depths_and_conv_rows_follow_the_parents(seed: int, n: int, padding: int) -> None:
    parents = random_parents(2, n, torch.Generator().manual_seed(seed), min(padding, n - 1))
    topology = Topology.of(parents, 4)
    assert torch.equal(topology.hidden, ~topology.mask)
    assert topology.conv_index is not None
    for row, tree in enumerate(parents.tolist()):
        for i in range(n):
            path = path_to(tree, i)
            assert topology.mask[row, i].nonzero().flatten().tolist() == path
            assert int(topology.depths[row, i]) == len(path) - 1
            assert topology.conv_index[row, i].tolist() == [0, 1, 2, *(3 + j for j in path)][-4:]


def test_a_topology_takes_over_a_mask_and_depths_and_computes_what_is_read() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2]], dtype=torch.int32)
    mask = ancestor_mask(parents)
    depths = torch.tensor([[0, 1, 1, 2, 2, 2]], dtype=torch.int32)
    full, bare = Topology.of(parents, 4, mask=mask, depths=depths), Topology.of(parents)
    assert full.mask is mask and full.depths is depths
    assert torch.equal(full.conv_rows(3), bare.conv_rows(3)) and full.conv_rows(4) is full.conv_index
    assert bare.conv_index is None and bare.jumps[1].tolist() == [[6, 6, 6, 0, 0, 0, 6]]


def test_words_hold_the_ancestor_mask() -> None:
    mask = ancestor_mask(random_parents(2, 70, torch.Generator().manual_seed(0)))
    words, column = ancestor_bits(mask), torch.arange(70)
    assert words.shape == (2, 70, 3) and words.dtype == torch.int32
    assert torch.equal((words[:, :, column // 32] >> (column % 32)) & 1 != 0, mask)


def test_a_path_that_lacks_a_window_gets_one() -> None:
    path, lengths = torch.tensor([[3, 1, 2]], device=DEVICE), torch.tensor([2], device=DEVICE)
    bare = AcceptedPath.of(path, lengths)
    assert bare.conv_from is None
    assert_same(AcceptedPath.cast(bare, None, 4), AcceptedPath.of(path, lengths, 4))
