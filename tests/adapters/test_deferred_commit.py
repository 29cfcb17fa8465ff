"""Deferred commits: the next tree's scan applies a path, with the same results as an eager commit.

`test_model_families.py` defers commits with the Triton kernels, `test_decode_state.py` does so 2,000 times.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers import family_states
from helpers.tiny_family_models import EVERY_ADAPTER, EVERY_STATE, family_model
from helpers.tiny_models import TOLERANCE, as_commit, patched, random_texts, tree_error
from torch import Tensor

from stree import TokenTree, TreeLM
from stree.models.deferred_commit import MAX_DEFERRED
from stree.models.state import DecodeState

RECURRENT = [family for family in EVERY_ADAPTER if family != "gemma3_text"]
Decoding = functools.partial(family_states.Decoding, defers_commit=True)


def memory(state: DecodeState) -> dict[str, Tensor]:
    """List every tensor of a state that outlives a step."""
    assert state.deferred is not None
    tensors = {"lengths": state.lengths, "path": state.deferred.path, "path_lengths": state.deferred.lengths}
    for number, (spec, stack) in enumerate(state.stacks.items()):
        tensors |= {f"{number} {name}": tensor for name, tensor in stack.tensors()}
        tensors |= {f"{number} row {place}": rows for place, rows in enumerate(state.deferred.rows.get(spec, ()))}
    return tensors


@pytest.mark.parametrize("family", RECURRENT)
def test_trees_after_deferred_commits_are_exact(family: str) -> None:
    decoding = Decoding(family_model(family), [9, 2])
    decoding.step([7, 5])
    decoding.step([5, 9], empty=0)
    decoding.score([4, 4])  # applies the path, and is dropped: what follows must not apply it again
    decoding.step([6, 3], empty=1)
    decoding.step([3, 6])
    tree = decoding.tree([9, 9])
    logits = decoding.pieces(tree, (4, 9))  # the first applies the path
    assert tree_error(decoding.model, decoding.texts, tree, logits) < TOLERANCE[torch.float32]
    decoding.lm.commit(decoding.state, torch.zeros(2, 0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    decoding.step([5, 5])
    decoding.score([4, 4])


@pytest.mark.parametrize("family", EVERY_STATE)
def test_a_deferred_path_goes_into_clones_selections_and_larger_states(family: str) -> None:
    decoding = Decoding(family_model(family), [9, 2])
    decoding.step([6, 6])
    copies = []
    for rows in ([1, 1, 0], None, [0, 1]):
        state = decoding.state.resized(128, 32) if rows is None else decoding.state.select(torch.tensor(rows))
        copies.append(decoding.held_by(state, rows))
        decoding.step([5, 5])  # the first state goes on, and changes no copy
    for other in copies:
        for _ in range(2):
            other.step([5] * len(other.texts))
    decoding.score([5, 5])


@pytest.mark.parametrize("family", ["jamba", "qwen3_next"])
def test_a_row_is_written_while_both_states_have_deferred_paths(family: str) -> None:
    decoding = Decoding(family_model(family), [9, 2])
    single = Decoding(decoding.model, [5], seed=1, lm=decoding.lm)
    decoding.step([6, 6])
    single.step([6])
    decoding.state.write_row(1, single.state)
    decoding.texts[1] = single.texts[0]
    decoding.step([5, 5])
    decoding.score([4, 4])
    single.score([4])


@pytest.mark.parametrize("length", [MAX_DEFERRED, MAX_DEFERRED + 1])
def test_paths_of_any_length_are_exact(length: int) -> None:
    decoding = Decoding(family_model("zamba2"), [9, 2])
    for _ in range(2):
        tree = TokenTree.chain(torch.tensor(random_texts(decoding.rng, [length, length])))
        decoding.lm.verify(decoding.state, tree)
        decoding.commit(tree, [[*range(length)], [0, 1]], filler=99)
        decoding.step([5, 5])
    decoding.score([4, 4])


@pytest.mark.parametrize("family", EVERY_STATE)
def test_a_commit_leaves_states_to_the_next_scan_and_no_memory_moves(family: str) -> None:
    decoding = Decoding(family_model(family), [9, 2])
    decoding.step([6, 6])
    tensors = memory(decoding.state)
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    states = {name: tensor for name, tensor in tensors.items() if name.endswith((" state", " window"))}
    assert states
    decoding.score([6, 6])  # the deferred path is applied here
    before = {name: tensor.clone() for name, tensor in states.items()}
    decoding.lm.commit(decoding.state, *as_commit([[0], [0]]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in states.items())
    decoding.lm.verify(decoding.state, decoding.tree([6, 6]))
    assert not any(torch.equal(tensor, before[name]) for name, tensor in states.items())
    assert {name: tensor.data_ptr() for name, tensor in memory(decoding.state).items()} == places


def test_a_deferred_path_takes_memory_for_few_rows() -> None:
    sizes: dict[bool, int] = {}
    lm = patched(family_model("zamba2"))
    for lm.defers_commit in (False, True):
        sizes[lm.defers_commit] = lm.new_state(2, 16, 64).num_bytes
    state = lm.new_state(2, 16, 64)
    assert state.deferred is not None
    stash = sum(getattr(stack, name).nbytes for stack in state.stacks.values() for name in stack.shared or ())
    assert sizes[True] - sizes[False] == stash * MAX_DEFERRED // 64


def test_a_state_whose_layers_failed_while_a_path_was_applied_is_refused() -> None:
    decoding = Decoding(family_model("jamba"), [9, 2])
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


def test_commits_are_deferred_only_where_scans_apply_them_in_one_pass() -> None:
    assert TreeLM.defers_commit is None
    assert patched(family_model("zamba2")).new_state(1, 16, 4).deferred is None  # on the CPU
    lm = patched(family_model("llama"))
    lm.defers_commit = True
    assert lm.new_state(1, 16, 4).deferred is None  # nothing but attention
