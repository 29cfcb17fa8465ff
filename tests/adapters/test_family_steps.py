"""A step of any family reads nothing from the device and has fixed shapes where a captured graph needs them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.family_states import Decoding
from helpers.on_device import NoHostReads, ResultSizes, treat_as_on_device
from helpers.tiny_family_models import EVERY_ADAPTER, family_model, matrix
from helpers.tiny_models import as_commit, extended, path_to, random_texts, tree_error

from stree import TokenTree


@pytest.mark.parametrize("family", matrix())
def test_neither_a_trees_forward_nor_a_commit_reads_the_device(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding(family_model(family), [6, 9])
    decoding.step([8, 8])

    def unread(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            with NoHostReads():
                return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    unread(decoding.lm, "forward")  # verify and commit themselves check trees and paths of the CPU
    unread(decoding.state, "commit")
    for _ in range(2):
        tree = decoding.tree([8, 5])
        decoding.lm.verify(decoding.state, tree)
        decoding.commit(tree, [path_to(tree, 0, 7), [0]])


@pytest.mark.parametrize(
    ("family", "fixed"), [*((family, True) for family in EVERY_ADAPTER), ("gemma3_text", False), ("lfm2", False)]
)
def test_steps_of_fixed_shapes_run_the_same_operators_on_the_same_sizes(
    family: str, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    treat_as_on_device(monkeypatch)
    decoding = Decoding(
        family_model(family), [9, 4], max_length=24, max_nodes=6, fixed_shapes=fixed, defers_commit=fixed
    )
    steps = []
    for short in ([0], [], [0]):
        tree = decoding.tree([6, 6])
        paths = [path_to(tree, 0, 4), short]
        path, lengths = as_commit([*paths, [0] * 6])
        tree = TokenTree.unchecked(tree.tokens, tree.parents, tree.depths, tree.ancestor_mask)
        with NoHostReads() if fixed else nullcontext(), ResultSizes() as sizes:
            decoding.lm.verify(decoding.state, tree)
            decoding.lm.commit(decoding.state, path[:2], lengths[:2])
        decoding.texts = extended(decoding.texts, tree, paths)
        steps.append(sizes.seen)
    decoding.score([6, 6])
    assert [step == steps[0] for step in steps] == [True, fixed, fixed]


def test_a_text_beyond_a_fixed_state_loses_rows_and_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    treat_as_on_device(monkeypatch)
    decoding = Decoding(family_model("llama"), [9, 4], max_length=12, max_nodes=6, fixed_shapes=True)
    tree = TokenTree.chain(torch.tensor(random_texts(decoding.rng, [6, 6])))
    paths = [[*range(6)], [0]]
    decoding.lm.verify(decoding.state, tree)
    decoding.lm.commit(decoding.state, *as_commit(paths))
    text = extended(decoding.texts, tree, paths)[1]
    logits = decoding.lm.verify(decoding.state, tree)[1:]
    assert tree_error(decoding.model, [text], TokenTree(tree.tokens[1], tree.parents[1]), logits) < decoding.tolerance
