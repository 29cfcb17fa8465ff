"""A call that fails half way leaves a state as it was, empty, or refused: never one that is silently wrong."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.tiny_family_models import EVERY_STATE, family_model
from helpers.tiny_models import (
    TOLERANCE,
    as_commit,
    fresh_logits,
    patched,
    random_texts,
    random_tree,
    relative_error,
    right_padded,
    tiny_model,
    tree_error,
)

from stree import TokenTree, TreeLM
from stree.models.layers.base import LayerStack
from stree.models.state import DecodeState

FLOAT32 = TOLERANCE[torch.float32]
LOST = "the state is lost: a call failed when some of its layers were changed, others not; make a new one"


@contextmanager
def failing(module: Any, calls: int = 0) -> Iterator[None]:
    """Let a module fail, as where memory runs out, after so many calls."""
    left = [calls]

    def fail(*_: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("no room")

    handle = module.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        yield
    handle.remove()


def prefilled(family: str) -> tuple[Any, TreeLM, DecodeState, list[list[int]], TokenTree]:
    """Give a model, its graft, and a state that stands for two texts and holds a tree."""
    rng, model = random.Random(0), family_model(family)
    lm, texts = patched(model), random_texts(rng, [6, 9])
    state, tree = lm.new_state(2, 64, 16), random_tree(rng, [8, 8])
    lm.prefill(state, *right_padded(texts))
    lm.verify(state, tree)
    return model, lm, state, texts, tree


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("family", EVERY_STATE)
def test_a_tree_whose_verification_fails_takes_the_last_one_with_it(family: str, first: int) -> None:
    model, lm, state, texts, tree = prefilled(family)
    with failing(lm.model.lm_head):
        lm.verify(state, TokenTree((tree.tokens + 1) % 97 if first == 0 else tree.tokens, tree.parents), first=first)
    with pytest.raises(RuntimeError, match="commit needs a tree that was verified and not yet committed"):
        lm.commit(state, *as_commit([[0], [0]]))
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32


@pytest.mark.parametrize("family", ["jamba", "zamba2"])
def test_an_extension_that_fails_leaves_a_state_whose_path_is_committed(family: str) -> None:
    model, lm = family_model(family), patched(family_model(family))
    lm.defers_commit = True
    state, tree = lm.new_state(1, 64, 16), random_tree(random.Random(0), [8])
    for _ in range(2):  # the first path waits for the second tree
        lm.verify(state, tree)
        lm.commit(state, *as_commit([[0]]))
    lm.verify(state, tree)
    with failing(lm.model.lm_head):
        lm.verify(state, tree, first=3)
    text = [int(tree.tokens[0, 0])] * 2
    assert tree_error(model, [text], tree, lm.verify(state, tree)) < FLOAT32


@pytest.mark.parametrize("family", EVERY_STATE)
def test_a_commit_that_fails_between_layers_loses_the_state(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, lm, state, _, tree = prefilled(family)
    kept = state.clone()
    monkeypatch.setattr(type([*state.stacks.values()][-1]), "commit", fail)
    with pytest.raises(torch.OutOfMemoryError):
        lm.commit(state, *as_commit([[0], [0]]))
    monkeypatch.undo()
    uses: list[Callable[[DecodeState], Any]] = [
        lambda state: lm.commit(state, *as_commit([[0], [0]])),
        lambda state: lm.verify(state, tree),
        lambda state: lm.prefill(state, torch.ones(2, 3).long()),
    ]
    for use in uses:
        for lost in (state, state.clone(), state.resized(128, 16)):
            with pytest.raises(RuntimeError, match=LOST):
                use(lost)
    lm.verify(kept, tree)
    lm.commit(kept, *as_commit([[0], [0]]))


def fail(*_: Any) -> None:
    """Stand for a commit where memory runs out."""
    raise torch.OutOfMemoryError("no room")


def test_a_fold_that_fails_between_layers_loses_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, tree = patched(family_model("zamba2")), random_tree(random.Random(0), [6])
    lm.defers_commit = True
    state = lm.new_state(1, 64, 16)
    lm.verify(state, tree)
    lm.commit(state, *as_commit([[0]]))
    monkeypatch.setattr(type(next(iter(state.stacks.values()))), "commit", fail)
    with pytest.raises(torch.OutOfMemoryError):
        state.clone()
    monkeypatch.undo()
    for lost in (state, state.clone(), state.resized(128, 16)):  # to fold once more mends nothing
        with pytest.raises(RuntimeError, match=LOST):
            lm.verify(lost, tree)


@pytest.mark.parametrize("taken", ["overwrite", "write_row"])
def test_taking_over_another_state_half_way_loses_the_state(taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, lm, state, _, tree = prefilled("zamba2")
    other = lm.new_state(2 if taken == "overwrite" else 1, 64, 16)
    take = state.overwrite if taken == "overwrite" else functools.partial(state.write_row, 1)
    monkeypatch.setattr(type([*state.stacks.values()][-1]), taken, fail)
    with pytest.raises(torch.OutOfMemoryError):
        take(other)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=LOST):
        lm.verify(state, tree)
    state.is_inconsistent, other.is_inconsistent = False, True
    take(other)  # of a state that is lost itself
    with pytest.raises(RuntimeError, match=LOST):
        lm.verify(state, tree)


def assert_prefills(model: Any, lm: TreeLM, state: DecodeState, texts: list[list[int]]) -> None:
    """Require that a state is empty: it scores a text from its first token, and takes prompts."""
    assert state.lengths.tolist() == [0] * len(texts)
    tree = random_tree(random.Random(1), [4] * len(texts))
    assert tree_error(model, [[] for _ in texts], tree, lm.verify(state.clone(), tree)) < FLOAT32
    logits = lm.prefill(state, *right_padded(texts))
    assert all(
        relative_error(row, fresh_logits(model, text)[-1]) < FLOAT32 for row, text in zip(logits, texts, strict=True)
    )
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32


@pytest.mark.parametrize("family", ["mamba2", "recurrent_gemma"])
def test_prompts_of_which_the_second_fails_leave_an_empty_state(family: str) -> None:
    model = tiny_model(family, use_bias=True) if family == "mamba2" else family_model(family)  # padding is not exact
    lm, texts = patched(model), random_texts(random.Random(0), [3, 9, 5])
    state = lm.new_state(3, 64, 16)
    with failing(lm.model.lm_head, calls=1):
        lm.prefill(state, *right_padded(texts))
    assert_prefills(model, lm, state, texts)


@pytest.mark.parametrize("defers_commit", [False, True])
@pytest.mark.parametrize("family", ["bamba", "recurrent_gemma"])
def test_a_prompt_of_which_a_chunk_fails_leaves_an_empty_state(family: str, defers_commit: bool) -> None:
    model = family_model(family)
    lm, texts = patched(model), random_texts(random.Random(0), [19, 19])
    lm.defers_commit, lm.chunk_size = defers_commit, 4
    state = lm.new_state(2, 64, 4)
    with failing(lm.model.lm_head, calls=2):
        lm.prefill(state, torch.tensor(texts))
    assert_prefills(model, lm, state, texts)


def test_a_prompt_that_some_layers_have_not_taken_over_leaves_an_empty_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model("bamba")
    lm, texts = patched(model), random_texts(random.Random(0), [6, 9])
    state = lm.new_state(2, 64, 16)
    last: LayerStack = [*state.stacks.values()][-1]
    monkeypatch.setattr(type(last), "load", fail)
    with pytest.raises(torch.OutOfMemoryError):
        lm.prefill(state, *right_padded(texts))
    monkeypatch.undo()
    assert_prefills(model, lm, state, texts)
