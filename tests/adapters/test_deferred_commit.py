"""Deferred commits: the next tree's scan applies a path, and no caller can tell that from an eager commit.

The oracle is an unpatched copy's own forward of the whole text.  tests/adapters/test_decode_state.py commits in this
way some thousand times.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers.tiny_family_models import EVERY_ADAPTER, family_model
from helpers.tiny_models import (
    TOLERANCE,
    as_commit,
    extended,
    patched,
    path_to,
    random_path,
    random_texts,
    random_tree,
    real_nodes,
    right_padded,
    tree_error,
)
from torch import Tensor
from transformers import PreTrainedModel

from stree import TokenTree, TreeLM
from stree.models.deferred_commit import MAX_DEFERRED
from stree.models.state import DecodeState

FLOAT32 = TOLERANCE[torch.float32]
RECURRENT = [family for family in EVERY_ADAPTER if family != "gemma3_text"]


class Decoding:
    """A state with deferred commits, its texts, and the model that is the oracle."""

    def __init__(self, family: str, lengths: list[int], seed: int = 0) -> None:
        self.rng, self.model = random.Random(seed), family_model(family)
        self.lm = patched(self.model)
        self.lm.defers_commit = True
        self.texts = random_texts(self.rng, lengths)
        self.state = self.lm.new_state(len(lengths), 96, 24)
        self.lm.prefill(self.state, *right_padded(self.texts))

    def step(self, sizes: list[int], empty: int | None = None) -> None:
        """Verify a tree, require it to be exact, and commit a path of it; none in row ``empty``."""
        tree = self.score(sizes)
        paths = [[] if row == empty else path_to(tree, row, real_nodes(tree, row)[-1]) for row in range(len(sizes))]
        self.lm.commit(self.state, *as_commit(paths))
        self.texts = extended(self.texts, tree, paths)

    def score(self, sizes: list[int]) -> TokenTree:
        """Verify a tree, leave it pending, and require it to be exact."""
        tree = random_tree(self.rng, sizes)
        assert_exact(self.model, self.texts, tree, self.lm.verify(self.state, tree))
        return tree


def assert_exact(model: PreTrainedModel, texts: list[list[int]], tree: TokenTree, logits: Tensor) -> None:
    """Require a tree's logits to be those of fresh forwards."""
    assert tree_error(model, texts, tree, logits) < FLOAT32


def memory(state: DecodeState) -> dict[str, Tensor]:
    """List every tensor of a state that outlives a step."""
    assert state.deferred is not None
    found = {"lengths": state.lengths, "path": state.deferred.path, "path_lengths": state.deferred.lengths}
    for number, (spec, stack) in enumerate(state.stacks.items()):
        found |= {f"{number} {name}": tensor for name, tensor in stack.tensors()}
        found |= {f"{number} kept {place}": rows for place, rows in enumerate(state.deferred.rows.get(spec, ()))}
    return found


@pytest.mark.parametrize("family", RECURRENT)
def test_trees_after_deferred_commits_are_exact(family: str) -> None:
    decoding = Decoding(family, [9, 2])
    decoding.step([7, 5])
    decoding.step([5, 9], empty=0)
    decoding.score([4, 4])  # applies the path, and is dropped: what follows must not apply it again
    decoding.step([6, 3], empty=1)
    decoding.step([3, 6])
    lm, state = decoding.lm, decoding.state
    tree = random_tree(decoding.rng, [9, 9])
    first = lm.verify(state, TokenTree(tree.tokens[:, :4], tree.parents[:, :4]))  # applies the path once
    logits = torch.cat((first, lm.verify(state, tree, first=4)), 1)
    assert_exact(decoding.model, decoding.texts, tree, logits)
    lm.commit(state, torch.zeros(2, 0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    decoding.step([5, 5])
    decoding.score([4, 4])


@pytest.mark.parametrize("family", RECURRENT)
def test_a_deferred_path_goes_into_clones_selections_and_larger_states(family: str) -> None:
    decoding = Decoding(family, [9, 2])
    decoding.step([6, 6])
    made: list[tuple[DecodeState, list[list[int]]]] = []
    for rows in ([1, 1, 0], None, [0, 1]):
        state = decoding.state
        other = state.resized(128, 32) if rows is None else state.select(torch.tensor(rows))
        made.append((other, [decoding.texts[row] for row in rows or (0, 1)]))
        decoding.step([5, 5])  # the state it came from goes its own way, and changes no other
    for state, texts in made:
        grown = texts
        for _ in range(2):
            tree = random_tree(decoding.rng, [5] * len(texts))
            assert_exact(decoding.model, grown, tree, decoding.lm.verify(state, tree))
            paths = [random_path(decoding.rng, tree, row) for row in range(len(texts))]
            decoding.lm.commit(state, *as_commit(paths))
            grown = extended(grown, tree, paths)
    decoding.score([5, 5])


@pytest.mark.parametrize("family", ["jamba", "qwen3_next"])
def test_a_row_is_taken_over_while_paths_wait_on_both_sides(family: str) -> None:
    decoding, single = Decoding(family, [9, 2]), Decoding(family, [5], seed=1)
    single.lm, single.state = decoding.lm, decoding.lm.new_state(1, 96, 24)
    single.lm.prefill(single.state, torch.tensor(single.texts))
    decoding.step([6, 6])
    single.step([6])
    decoding.state.write_row(1, single.state)
    decoding.texts[1] = single.texts[0]
    decoding.step([5, 5])
    decoding.score([4, 4])
    single.score([4])


@pytest.mark.parametrize("length", [MAX_DEFERRED, MAX_DEFERRED + 1])
def test_paths_of_any_length_are_exact(length: int) -> None:
    decoding = Decoding("zamba2", [9, 2])
    for _ in range(2):
        tree = TokenTree.chain(torch.tensor(random_texts(decoding.rng, [length, length])))
        decoding.lm.verify(decoding.state, tree)
        paths = [[*range(length)], [0, 1]]
        decoding.lm.commit(decoding.state, *as_commit(paths, filler=99))
        decoding.texts = extended(decoding.texts, tree, paths)
        decoding.step([5, 5])
    decoding.score([4, 4])


@pytest.mark.parametrize("family", RECURRENT)
def test_a_commit_leaves_states_to_the_next_scan_and_no_memory_moves(family: str) -> None:
    decoding = Decoding(family, [9, 2])
    decoding.step([6, 6])
    held = memory(decoding.state)
    places = {name: tensor.data_ptr() for name, tensor in held.items()}
    states = {name: tensor for name, tensor in held.items() if name.endswith((" state", " window"))}
    assert states
    decoding.score([6, 6])  # the deferred path is applied here
    before = {name: tensor.clone() for name, tensor in states.items()}
    decoding.lm.commit(decoding.state, *as_commit([[0], [0]]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in states.items())
    decoding.lm.verify(decoding.state, random_tree(decoding.rng, [6, 6]))
    assert not any(torch.equal(tensor, before[name]) for name, tensor in states.items())
    assert {name: tensor.data_ptr() for name, tensor in memory(decoding.state).items()} == places


def test_what_waits_takes_memory_for_few_rows_and_counts() -> None:
    sizes: dict[bool, int] = {}
    lm = patched(family_model("zamba2"))
    for lm.defers_commit in (False, True):
        sizes[lm.defers_commit] = lm.new_state(2, 16, 64).num_bytes
    state = lm.new_state(2, 16, 64)
    assert state.deferred is not None
    stash = sum(getattr(stack, name).nbytes for stack in state.stacks.values() for name in stack.shared or ())
    assert sizes[True] - sizes[False] == stash * MAX_DEFERRED // 64


def test_a_state_whose_layers_failed_in_mid_fold_is_refused() -> None:
    decoding = Decoding("jamba", [9, 2])
    decoding.step([6, 6])
    other, layer = decoding.state.clone(), decoding.lm.model.model.layers[2]

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    handle = layer.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        decoding.score([5, 5])
    handle.remove()
    for use in (decoding.score, decoding.step):
        with pytest.raises(RuntimeError, match="the state is lost: a call failed when some of its layers were changed"):
            use([5, 5])
    decoding.state = other
    decoding.step([5, 5])


def test_an_eager_state_survives_a_forward_that_fails() -> None:
    decoding = Decoding("jamba", [9, 2])
    decoding.lm.defers_commit = False
    decoding.state = decoding.lm.new_state(2, 96, 24)
    decoding.lm.prefill(decoding.state, *right_padded(decoding.texts))
    decoding.step([6, 6])
    handle = decoding.lm.model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decoding.score([5, 5])
    handle.remove()
    decoding.step([5, 5])


def test_models_wait_only_where_scans_fold_in_one_pass() -> None:
    assert TreeLM.defers_commit is None
    assert patched(family_model("zamba2")).new_state(1, 16, 4).deferred is None  # on the CPU
    lm = patched(family_model("llama"))
    lm.defers_commit = True
    assert lm.new_state(1, 16, 4).deferred is None  # nothing but attention
