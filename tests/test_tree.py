"""Token trees: depths, masks, chains, merged paths, padding, and every error."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers.tiny_models import path_to, random_tree, real_nodes
from hypothesis import given, settings
from hypothesis import strategies as st

from stree import TokenTree

BRANCHED = [-1, 0, 0, 1, 1, 2]


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    """Draw a batch of 1-4 trees of 1-64 nodes with padding among them."""
    sizes = draw(st.lists(st.integers(1, 64), min_size=1, max_size=4))
    width = max(sizes) + draw(st.integers(0, 5))
    return random_tree(random.Random(draw(st.integers(0, 2**32))), sizes, width)


def test_the_tree_of_the_docstring_has_its_depths_and_mask() -> None:
    tree = TokenTree([7, 1, 2, 3, 4, 5], BRANCHED)  # type: ignore[arg-type]  # lists are taken like tensors
    mask = """
        1 0 0 0 0 0
        1 1 0 0 0 0
        1 0 1 0 0 0
        1 1 0 1 0 0
        1 1 0 0 1 0
        1 0 1 0 0 1"""
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2, 2]]
    assert tree.ancestor_mask[0].int().tolist() == [[int(x) for x in row.split()] for row in mask.split("\n")[1:]]
    assert tree.num_nodes.tolist() == [6]


@settings(deadline=None, max_examples=40)
@given(trees())
def test_masks_and_depths_follow_the_parents(tree: TokenTree) -> None:
    batch, n = tree.tokens.shape
    for row in range(batch):
        for node in range(n):
            path = path_to(tree, row, node)
            assert tree.ancestor_mask[row, node].nonzero().flatten().tolist() == sorted(path)
            assert tree.depths[row, node] == len(path) - 1


@settings(deadline=None, max_examples=30)
@given(trees())
def test_padding_is_not_counted_and_has_only_itself_as_ancestor(tree: TokenTree) -> None:
    for row in range(tree.tokens.shape[0]):
        real = real_nodes(tree, row)
        padding = sorted({*range(tree.tokens.shape[1])} - {*real})
        assert tree.num_nodes[row] == len(real)
        assert tree.is_padding[row].nonzero().flatten().tolist() == padding
        assert torch.equal(tree.ancestor_mask[row, padding], torch.eye(tree.tokens.shape[1], dtype=torch.bool)[padding])
        assert not tree.ancestor_mask[row][real][:, padding].any()


@settings(deadline=None, max_examples=20)
@given(trees())
def test_an_unchecked_tree_has_the_same_fields_as_a_checked_one(tree: TokenTree) -> None:
    other = TokenTree.unchecked(tree.tokens, tree.parents)
    assert torch.equal(other.ancestor_mask, tree.ancestor_mask)
    assert torch.equal(other.depths, tree.depths)
    assert tree.is_checked
    assert not other.is_checked


def test_fields_have_the_dtypes_of_the_interface_whatever_integers_come_in() -> None:
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        tree = TokenTree(torch.tensor([3, 1, 2], dtype=dtype), torch.tensor([-1, 0, 0]))
        assert (tree.tokens.dtype, tree.parents.dtype) == (torch.int64, torch.int32)
        assert (tree.depths.dtype, tree.ancestor_mask.dtype) == (torch.int32, torch.bool)
        assert tree.num_nodes.dtype == torch.int32
        assert tree.tokens.tolist() == [[3, 1, 2]]


@pytest.mark.parametrize("n", [1, 17])
def test_a_chain_goes_down_node_by_node(n: int) -> None:
    assert TokenTree.chain([4, 5, 6]).tokens.tolist() == [[4, 5, 6]]
    tree = TokenTree.chain(torch.arange(2 * n).view(2, n))
    assert tree.parents.tolist() == [[*range(-1, n - 1)]] * 2
    assert tree.depths.tolist() == [[*range(n)]] * 2
    assert torch.equal(tree.ancestor_mask, torch.ones(2, n, n, dtype=torch.bool).tril())


def test_from_paths_merges_common_prefixes_in_order_of_appearance() -> None:
    tree = TokenTree.from_paths([[9, 5, 1], [9, 4], [9, 5, 2], [9], [9, 4, 1]])
    assert tree.tokens.tolist() == [[9, 5, 1, 4, 2, 1]]
    assert tree.parents.tolist() == [[-1, 0, 1, 0, 1, 3]]


def test_from_paths_takes_tensors_and_iterators() -> None:
    for paths in (torch.tensor([[9, 5], [9, 4]]), iter([iter([9, 5]), iter([9, 4])])):
        assert TokenTree.from_paths(paths).tokens.tolist() == [[9, 5, 4]]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=8))
def test_from_paths_holds_every_prefix_once_and_no_other(tails: list[list[int]]) -> None:
    tree = TokenTree.from_paths([[7, *tail] for tail in tails])
    held = [tuple(tree.tokens[0, path_to(tree, 0, node)].tolist()) for node in real_nodes(tree, 0)]
    assert len(held) == len(set(held))
    assert set(held) == {(7, *tail[:length]) for tail in tails for length in range(len(tail) + 1)}


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "at least one path, and no empty path"),
        ([[1, 2], []], "at least one path, and no empty path"),
        ([[3, 2], [1, 2]], r"same root token, got \[1, 3\]"),
    ],
    ids=["no-path", "empty-path", "two-roots"],
)
def test_from_paths_refuses_what_is_not_a_tree(paths: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree.from_paths(paths)


@pytest.mark.parametrize("paths", [[[1, 2.5], [1, 3]], ["12", "13"], torch.ones(2, 2)], ids=["float", "text", "floats"])
def test_from_paths_refuses_tokens_that_are_not_integers(paths: Any) -> None:
    with pytest.raises(TypeError, match="integer"):
        TokenTree.from_paths(paths)


@pytest.mark.parametrize("parents", [[2**32 - 1, 0], [-1, 2**32]], ids=["root", "child"])
def test_parents_that_would_wrap_around_to_those_of_another_tree_are_refused(parents: list[int]) -> None:
    with pytest.raises(ValueError, match=f"parents must be int32, got {max(parents)}"):
        TokenTree(torch.tensor([1, 2]), torch.tensor(parents))


MALFORMED = {
    "root-has-a-parent": ([5, 1], [0, 0], r"parents\[0, 0\] must be -1 \(the root\), got 0"),
    "no-root": ([5, 1], [-2, 0], r"parents\[0, 0\] must be -1 \(the root\), got -2"),
    "parent-after-child": ([5, 1, 2], [-1, 2, 0], r"parents\[0, 1\] must be in \[-1, 0\] .*before its child\), got 2"),
    "parent-below-minus-one": ([5, 1], [-1, -2], r"parents\[0, 1\] must be in \[-1, 0\] .*, got -2"),
    "child-of-padding": ([5, 0, 2], [-1, -1, 1], r"node 2 of row 0 is a child of padding node 1"),
    "padding-with-a-token": ([5, 4], [-1, -1], r"padding node 1 of row 0 must have token 0, got 4"),
    "negative-token": ([5, -4], [-1, 0], r"tokens\[0, 1\] must not be negative, got -4"),
}


@pytest.mark.parametrize(("tokens", "parents", "message"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_tree_is_refused(tokens: list[int], parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree(torch.tensor(tokens), torch.tensor(parents, dtype=torch.int32))


@pytest.mark.parametrize(
    ("tokens", "parents", "error", "message"),
    [
        (torch.ones(2), torch.tensor([-1, 0]), TypeError, "tokens must be an integer tensor, got torch.float32"),
        (torch.tensor([1]), torch.tensor([-1.0]), TypeError, "parents must be an integer tensor, got torch.float32"),
        (None, torch.tensor([-1]), TypeError, "tokens must be an integer tensor, got NoneType"),
        (torch.tensor([True]), torch.tensor([-1]), TypeError, "tokens must be an integer tensor, got torch.bool"),
        (torch.tensor([1, 2, 3]), torch.tensor([-1, 0]), ValueError, r"one shape, got \[1, 3\] and \[1, 2\]"),
        (torch.tensor(4), torch.tensor(-1), ValueError, r"tokens must be \[n\] or \[batch, n\], got \[\]"),
        (torch.ones(1, 1, 2).long(), torch.ones(1, 1, 2).long(), ValueError, r"\[n\] or \[batch, n\], got \[1, 1, 2\]"),
        (torch.ones(2, 0).long(), torch.ones(2, 0).long(), ValueError, "at least its root, got 0 nodes"),
    ],
)
def test_a_wrong_dtype_or_shape_is_refused(
    tokens: Any, parents: torch.Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TokenTree(tokens, parents)
    with pytest.raises(ValueError, match="a tree must have at least its root, got 0 nodes"):
        TokenTree.chain([])


def test_an_unchecked_tree_is_checked_under_debug_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, parents = torch.tensor([[5, 1, 2]]), torch.tensor([[-1, 2, 0]], dtype=torch.int32)
    monkeypatch.setenv("STREE_DEBUG", "0")
    TokenTree.unchecked(tokens, parents)
    monkeypatch.setenv("STREE_DEBUG", "1")
    with pytest.raises(ValueError, match=r"parents\[0, 1\] must be in \[-1, 0\]"):
        TokenTree.unchecked(tokens, parents)


def test_a_later_change_of_the_callers_tensors_does_not_reach_the_tree() -> None:
    tokens, parents = torch.tensor([[5, 1, 2]]), torch.tensor([[-1, 0, 0]], dtype=torch.int32)
    tree = TokenTree(tokens, parents)
    tokens[0, 1], parents[0, 2] = 9, 1
    assert tree.tokens.tolist() == [[5, 1, 2]]
    assert tree.parents.tolist() == [[-1, 0, 0]]
