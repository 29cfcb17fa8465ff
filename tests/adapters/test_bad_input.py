"""Bad prompts, trees, paths and states are refused with a message, and a refused call changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.tiny_models import TOLERANCE, VOCAB, as_commit, patched, relative_error, tiny_model
from torch import Tensor

from stree import TokenTree, TreeLM
from stree.models.state import DecodeState

# Of the second sequence: node 1 has the children 2 and 3, node 4 is padding.
PARENTS = torch.tensor([[-1, 0, 1, 2, 0], [-1, 0, 1, 1, -1]], dtype=torch.int32)
TOKENS = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 8, 0]])
PROMPTS = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])


@pytest.fixture(scope="module")
def lm() -> TreeLM:
    return patched(tiny_model("bamba"))  # which has both kinds of states


def prefilled(lm: TreeLM, max_length: int = 16, max_nodes: int = 5) -> DecodeState:
    """Return a state of two sequences of four tokens."""
    state = lm.new_state(2, max_length, max_nodes)
    lm.prefill(state, PROMPTS)
    return state


def tree(tokens: Tensor = TOKENS) -> TokenTree:
    return TokenTree(tokens, PARENTS)


def with_token(tokens: Tensor, token: int) -> Tensor:
    changed = tokens.clone()
    changed[1, 1] = token
    return changed


def assert_still_usable(lm: TreeLM, state: DecodeState) -> None:
    """Require a state that scores a tree as a fresh prefill does."""
    assert state.lengths.tolist() == [4, 4]
    expected = lm.verify(prefilled(lm), tree())
    assert torch.equal(lm.verify(state, tree())[0], expected[0])


BAD_PROMPTS: dict[str, tuple[Any, Any, str]] = {
    "token-too-large": (with_token(PROMPTS, VOCAB), None, f"token {VOCAB} is outside the vocabulary of {VOCAB}"),
    "token-negative": (with_token(PROMPTS, -3), None, f"token -3 is outside the vocabulary of {VOCAB}"),
    "no-column": (PROMPTS[:, :0], None, r"every prompt needs at least one token, got lengths \[0, 0\]"),
    "one-empty": (PROMPTS, torch.tensor([4, 0]), r"every prompt needs at least one token, got lengths \[4, 0\]"),
    "negative-length": (PROMPTS, torch.tensor([4, -1]), r"lengths must be in \[0, 4\], .* got \[4, -1\]"),
    "length-beyond-width": (PROMPTS, torch.tensor([4, 5]), r"lengths must be in \[0, 4\], .* got \[4, 5\]"),
    "beyond-max-length": (PROMPTS.repeat(1, 5), None, "a prompt of 20 tokens exceeds max_length 16"),
    "one-beyond-max-length": (PROMPTS.repeat(1, 5), torch.tensor([3, 17]), "prompt of 17 tokens exceeds max_length 16"),
    "batch": (PROMPTS[:1], None, r"input_ids must be int64\[2, length\], got int64\[1, 4\]"),
    "one-d": (PROMPTS[0], None, r"input_ids must be int64\[2, length\], got int64\[4\]"),
    "float": (PROMPTS.float(), None, r"input_ids must be int64\[2, length\], got float32\[2, 4\]"),
    "list": (PROMPTS.tolist(), None, r"input_ids must be int64\[2, length\], got list"),
    "lengths-list": (PROMPTS, [4, 4], r"lengths must be int\[2\], got list"),
    "lengths-batch": (PROMPTS, torch.tensor([4]), r"lengths must be int\[2\], got int64\[1\]"),
    "lengths-float": (PROMPTS, torch.tensor([4.0, 4.0]), r"lengths must be int\[2\], got float32\[2\]"),
}


@pytest.mark.parametrize(("tokens", "lengths", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_bad_prompt_is_refused_and_the_state_stays_empty(
    lm: TreeLM, tokens: Tensor, lengths: Tensor | None, message: str
) -> None:
    state = lm.new_state(2, 16, 5)
    with pytest.raises(ValueError, match=message):
        lm.prefill(state, tokens, lengths)
    lm.prefill(state, PROMPTS)
    assert_still_usable(lm, state)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
def test_prompts_and_lengths_may_be_of_any_integers(lm: TreeLM, dtype: torch.dtype) -> None:
    state = lm.new_state(2, 16, 5)
    logits = lm.prefill(state, PROMPTS.to(dtype), torch.tensor([4, 4], dtype=dtype))
    assert torch.equal(logits, lm.prefill(lm.new_state(2, 16, 5), PROMPTS))
    assert_still_usable(lm, state)


def test_a_prompt_as_long_as_the_state_is_taken(lm: TreeLM) -> None:
    state = lm.new_state(2, 16, 5)
    lm.prefill(state, PROMPTS.repeat(1, 4))
    assert state.lengths.tolist() == [16, 16]


def test_a_second_prefill_is_refused(lm: TreeLM) -> None:
    state, verified = prefilled(lm), lm.new_state(2, 16, 5)
    lm.verify(verified, tree())
    for one in (state, state.clone(), state.resized(32, 8), verified):
        with pytest.raises(RuntimeError, match="prefill needs an empty state; this one holds tokens already"):
            lm.prefill(one, PROMPTS)
        if one is not verified:
            assert_still_usable(lm, one)


def test_a_prompt_for_a_row_drops_the_pending_tree_and_needs_a_row_of_the_batch(lm: TreeLM) -> None:
    state = prefilled(lm)
    lm.verify(state, tree())
    for row in (2, -1):
        with pytest.raises(ValueError, match=rf"row must be in \[0, 2\), got {row}"):
            lm.prefill_row(state, row, PROMPTS[:1])
    lm.prefill_row(state, 1, PROMPTS[:1])
    with pytest.raises(RuntimeError, match="commit needs a tree that was verified"):
        lm.commit(state, *as_commit([[0, 1], [0, 1]]))
    assert_still_usable(lm, state)


@pytest.mark.parametrize("name", ["batch_size", "max_length", "max_nodes"])
@pytest.mark.parametrize(
    ("size", "error", "message"),
    [(0, ValueError, "must be at least 1, got 0"), (8.0, TypeError, "must be an integer, got float")],
    ids=str,
)
def test_a_bad_size_of_a_state_is_refused(lm: TreeLM, name: str, size: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=f"{name} {message}"):
        lm.new_state(**{name: size})


BAD_TREES: dict[str, tuple[TokenTree, int, str]] = {
    "token-too-large": (tree(with_token(TOKENS, VOCAB)), 0, f"token {VOCAB} is outside the vocabulary of {VOCAB}"),
    "too-many-nodes": (TokenTree.chain(TOKENS[:, [0, 1, 2, 3, 0, 1]]), 0, "a tree of 6 nodes exceeds max_nodes 5"),
    "batch": (TokenTree(TOKENS[:1], PARENTS[:1]), 0, "the tree must have batch 2 as the state has, got 1"),
    "first-negative": (tree(), -1, r"first must be in \[0, 5\), got -1"),
    "first-beyond": (tree(), 5, r"first must be in \[0, 5\), got 5"),
}


@pytest.mark.parametrize(("bad", "first", "message"), BAD_TREES.values(), ids=BAD_TREES)
def test_a_bad_tree_is_refused_and_the_last_one_stays_pending(
    lm: TreeLM, bad: TokenTree, first: int, message: str
) -> None:
    state = prefilled(lm)
    expected = lm.verify(state, tree())
    with pytest.raises(ValueError, match=message):
        lm.verify(state, bad, first=first)
    rest = lm.verify(state, tree(), first=3)
    assert relative_error(rest[0], expected[0, 3:]) < TOLERANCE[torch.float32]
    lm.commit(state, *as_commit([[0, 1], [0]]))
    assert state.lengths.tolist() == [6, 5]


def test_a_tree_that_reaches_beyond_max_length_is_refused(lm: TreeLM) -> None:
    state = lm.new_state(2, 7, 5)
    lm.prefill(state, PROMPTS)
    with pytest.raises(ValueError, match="the tree reaches 8 tokens, which exceeds max_length 7"):
        lm.verify(state, tree())
    assert state.pending_tree is None
    assert_still_usable(lm, state.resized(16, 5))
    lm.verify(state, TokenTree(TOKENS[:, :3], PARENTS[:, :3]))
    lm.commit(state, *as_commit([[0, 1, 2], [0, 1, 2]]))
    assert state.lengths.tolist() == [7, 7]


TWO_NODES = TokenTree(TOKENS[:, :2], PARENTS[:, :2])
OTHER_PARENT = TokenTree(TOKENS, torch.tensor([[-1, 0, 0, 2, 0], [-1, 0, 1, 1, -1]]))
CHANGED: dict[str, tuple[TokenTree | None, TokenTree, int, str]] = {
    "nothing-pending": (None, tree(), 2, "first=2 needs 2 verified nodes in the pending tree, got 0"),
    "too-few-pending": (TWO_NODES, tree(), 3, "first=3 needs 3 verified nodes in the pending tree, got 2"),
    "other-token": (tree(), tree(with_token(TOKENS, 9)), 2, "nodes below first=2 must be those of the last"),
    "other-parent": (tree(), OTHER_PARENT, 3, "nodes below first=3 must be those of the last verified tree"),
}


@pytest.mark.parametrize(("last", "new", "first", "message"), CHANGED.values(), ids=CHANGED)
def test_a_tree_that_does_not_extend_the_last_one_is_refused(
    lm: TreeLM, last: TokenTree | None, new: TokenTree, first: int, message: str
) -> None:
    state = prefilled(lm)
    if last is not None:
        lm.verify(state, last)
    with pytest.raises(ValueError, match=message):
        lm.verify(state, new, first=first)
    assert_still_usable(lm, state)


BAD_PATHS: dict[str, tuple[Any, str]] = {
    "not-from-root": ([[0], [1, 2]], "path of row 1 must start at the root, node 0, got 1"),
    "from-padding": ([[0], [4]], "path of row 1 must start at the root, node 0, got 4"),
    "skips-a-node": ([[0, 2], [0]], "path of row 0 goes from node 0 to 2, whose parent is 1"),
    "goes-to-a-sibling": ([[0], [0, 1, 2, 3]], "path of row 1 goes from node 2 to 3, whose parent is 1"),
    "root-twice": ([[0, 0], [0]], "path of row 0 goes from node 0 to 0, whose parent is -1"),
    "through-padding": ([[0], [0, 4]], "path of row 1 goes from node 0 to 4, whose parent is -1"),
    "node-beyond": ([[0, 5], [0]], r"path of row 0 must hold nodes in \[0, 5\), got 5"),
    "node-negative": ([[0, -1], [0, 1]], r"path of row 0 must hold nodes in \[0, 5\), got -1"),
}


@pytest.mark.parametrize(("paths", "message"), BAD_PATHS.values(), ids=BAD_PATHS)
def test_a_bad_path_is_refused_and_changes_nothing(lm: TreeLM, paths: list[list[int]], message: str) -> None:
    state = prefilled(lm)
    lm.verify(state, tree())
    with pytest.raises(ValueError, match=message):
        lm.commit(state, *as_commit(paths))
    assert state.pending_tree is not None
    assert_still_usable(lm, state)


@pytest.mark.parametrize(
    ("path", "lengths", "message"),
    [
        (torch.tensor([0, 1]), torch.tensor([1, 1]), r"path must be int32\[2, m\] .* got int64\[2\] and int64\[2\]"),
        (torch.tensor([[0]]), torch.tensor([1]), r"path must be int32\[2, m\] .* got int64\[1, 1\] and int64\[1\]"),
        (torch.tensor([[0], [0]]), torch.tensor([1]), r"path_lengths int32\[2\], got int64\[2, 1\] and int64\[1\]"),
        (torch.tensor([[0.0], [0.0]]), torch.tensor([1, 1]), r"got float32\[2, 1\] and int64\[2\]"),
        (torch.tensor([[0], [0]]), torch.tensor([1.0, 1.0]), r"got int64\[2, 1\] and float32\[2\]"),
        (torch.tensor([[0], [0]]), torch.tensor([1, 2]), r"path_lengths\[1\] must be in \[0, 1\], got 2"),
        (torch.tensor([[0], [0]]), torch.tensor([-1, 1]), r"path_lengths\[0\] must be in \[0, 1\], got -1"),
    ],
    ids=["one-d", "batch", "lengths-batch", "float", "float-lengths", "too-long", "negative-length"],
)
def test_a_path_of_wrong_shape_or_dtype_is_refused(lm: TreeLM, path: Tensor, lengths: Tensor, message: str) -> None:
    state = prefilled(lm)
    lm.verify(state, tree())
    with pytest.raises(ValueError, match=message):
        lm.commit(state, path, lengths)
    assert_still_usable(lm, state)


def test_a_commit_needs_a_verified_tree_and_consumes_it(lm: TreeLM) -> None:
    state, paths = prefilled(lm), as_commit([[0, 1], [0]])
    message = "commit needs a tree that was verified and not yet committed; call verify first"
    with pytest.raises(RuntimeError, match=message):
        lm.commit(state, *paths)
    assert_still_usable(lm, state)
    lm.commit(state, *paths)
    with pytest.raises(RuntimeError, match=message):
        lm.commit(state, *paths)
    assert state.lengths.tolist() == [6, 5]
    with pytest.raises(ValueError, match="first=2 needs 2 verified nodes in the pending tree, got 0"):
        lm.verify(state, tree(), first=2)


def test_a_commit_beyond_max_length_of_an_unchecked_tree_is_refused(lm: TreeLM) -> None:
    state = lm.new_state(2, 6, 5)
    lm.prefill(state, PROMPTS)
    lm.verify(state, TokenTree.unchecked(TOKENS, PARENTS))
    with pytest.raises(ValueError, match="committing makes 8 tokens, which exceeds max_length 6"):
        lm.commit(state, *as_commit([[0, 1, 2, 3], [0]]))
    assert state.lengths.tolist() == [4, 4]
    lm.commit(state, *as_commit([[0, 1], [0]]))
    assert state.lengths.tolist() == [6, 5]


def test_a_short_text_may_have_a_deep_tree_beside_a_long_one_with_a_shallow_tree(lm: TreeLM) -> None:
    state = lm.new_state(2, 6, 5)
    lm.prefill(state, PROMPTS, torch.tensor([4, 2]))
    parents = torch.tensor([[-1, 0, -1, -1], [-1, 0, 1, 2]])
    tokens = torch.tensor([[1, 2, 0, 0], [1, 2, 3, 4]])
    assert not lm.verify(state, TokenTree(tokens, parents))[:, :2].isnan().any()


def test_a_path_of_an_unchecked_tree_is_looked_at_under_debug(lm: TreeLM, monkeypatch: pytest.MonkeyPatch) -> None:
    state = prefilled(lm)
    lm.verify(state, TokenTree.unchecked(TOKENS, PARENTS))
    monkeypatch.setenv("STREE_DEBUG", "1")
    with pytest.raises(ValueError, match="path of row 0 goes from node 0 to 2, whose parent is 1"):
        lm.commit(state, *as_commit([[0, 2], [0]]))
    with pytest.raises(ValueError, match=f"token {VOCAB} is outside the vocabulary"):
        lm.verify(state, TokenTree.unchecked(with_token(TOKENS, VOCAB), PARENTS))


def test_the_state_of_another_model_is_refused(lm: TreeLM) -> None:
    state, other = prefilled(lm), copy.deepcopy(lm)
    calls: list[Callable[[], object]] = [
        lambda: other.verify(state, tree()),
        lambda: other.prefill(state, PROMPTS),
        lambda: other.prefill_row(state, 0, PROMPTS[1:]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="the state belongs to another TreeLM"):
            call()
    for own in (state, state.clone(), state.resized(32, 8)):
        assert_still_usable(lm, own)


def test_a_resized_state_must_have_room_for_its_tokens(lm: TreeLM) -> None:
    state = prefilled(lm)
    longest = int(state.lengths.max())
    with pytest.raises(ValueError, match=f"room for its {longest} tokens, got max_length {longest - 1}"):
        state.resized(longest - 1, 5)
    assert_still_usable(lm, state.resized(longest, 1).resized(16, 5))
