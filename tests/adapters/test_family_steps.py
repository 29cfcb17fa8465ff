"""A step of any family reads nothing from the device and has fixed shapes where a captured graph needs them."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.family_states import advanced
from helpers.host_reads import NoHostReads
from helpers.on_device import treat_as_on_device
from helpers.tiny_family_models import EVERY_ADAPTER, family_model, matrix
from helpers.tiny_models import (
    TOLERANCE,
    as_commit,
    extended,
    patched,
    path_to,
    random_texts,
    random_tree,
    right_padded,
    tree_error,
)
from torch.utils._python_dispatch import TorchDispatchMode

from stree import TokenTree
from stree.kernels import topology

FLOAT32 = TOLERANCE[torch.float32]


@pytest.mark.parametrize("family", matrix())
def test_what_layers_need_of_a_tree_is_derived_once_a_step(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(12)
    lm = patched(family_model(family))
    state, _ = advanced(lm, rng, [10, 2])
    counted = {name: Mock(wraps=getattr(topology, name)) for name in ("conv_rows", "jump_rows")}
    for name, mock in counted.items():
        monkeypatch.setattr(topology, name, mock)
    lm.verify(state, random_tree(rng, [12, 7]))
    assert max(mock.call_count for mock in counted.values()) <= 1


def unread(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function fail where it reads the device."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        with NoHostReads():
            return function(*args, **kwargs)

    return watched


@pytest.mark.parametrize("family", matrix())
def test_neither_a_trees_forward_nor_a_commit_reads_the_device(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(11)
    lm = patched(family_model(family))
    state, _ = advanced(lm, rng, [6, 9])
    for owner, name in ((lm, "forward"), (state, "commit")):  # around them a user's trees and paths are looked at
        monkeypatch.setattr(owner, name, unread(getattr(owner, name)))
    for _ in range(2):
        tree = random_tree(rng, [8, 5])
        lm.verify(state, tree)
        lm.commit(state, *as_commit([path_to(tree, 0, 7), [0]]))


class TreeSizes(TorchDispatchMode):
    """Note operators with the sizes of what they return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, list[list[int]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        parts = out if isinstance(out, (tuple, list)) else (out,)
        self.seen.append((str(func), [[*part.shape] for part in parts if isinstance(part, torch.Tensor)]))
        return out


@pytest.mark.parametrize(
    ("family", "fixed"), [*((family, True) for family in EVERY_ADAPTER), ("gemma3_text", False), ("lfm2", False)]
)
def test_steps_of_fixed_shapes_run_the_same_operators_on_the_same_sizes(
    family: str, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    treat_as_on_device(monkeypatch)
    rng = random.Random(13)
    model = family_model(family)
    lm, texts = patched(model), random_texts(rng, [9, 4])
    lm.defers_commit = fixed
    state = lm.new_state(2, 24, 6, fixed_shapes=fixed)
    lm.prefill(state, *right_padded(texts))
    steps = []
    for short in ([0], [], [0]):
        tree = random_tree(rng, [6, 6])
        paths = [path_to(tree, 0, 4), short]
        path, lengths = as_commit([*paths, [0] * 6])
        tree = TokenTree.unchecked(tree.tokens, tree.parents, tree.depths, tree.ancestor_mask)
        with NoHostReads() if fixed else nullcontext(), TreeSizes() as sizes:
            lm.verify(state, tree)
            lm.commit(state, path[:2], lengths[:2])
        texts = extended(texts, tree, paths)
        steps.append(sizes.seen)
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32
    assert [step == steps[0] for step in steps] == [True, fixed, fixed]


def test_a_text_beyond_a_fixed_state_loses_rows_and_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    treat_as_on_device(monkeypatch)
    rng = random.Random(15)
    model = family_model("llama")
    lm, texts = patched(model), random_texts(rng, [9, 4])
    state = lm.new_state(2, 12, 6, fixed_shapes=True)
    lm.prefill(state, *right_padded(texts))
    tree = TokenTree.chain(torch.tensor(random_texts(rng, [6, 6])))
    paths = [[*range(6)], [0]]
    lm.verify(state, tree)
    lm.commit(state, *as_commit(paths))
    texts = extended(texts, tree, paths)
    assert (
        tree_error(model, texts[1:], TokenTree(tree.tokens[1], tree.parents[1]), lm.verify(state, tree)[1:]) < FLOAT32
    )
