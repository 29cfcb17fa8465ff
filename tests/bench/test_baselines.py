"""Other ways to verify a tree emit the tokens that the library's own verification emits."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from helpers.family_states import Decoding, rebind_float32
from helpers.fast_cases import slow_unless
from helpers.tiny_family_models import family_model
from helpers.tiny_models import patched, random_path, random_tree
from helpers.tiny_pairs import tiny_pair
from torch import Tensor

from stree import TreeLM
from stree.bench.execute import Case, execute
from stree.bench.methods import BASELINES, parse_methods
from stree.bench.pair import Pair
from stree.bench.sequential import ReplayLM, SnapshotLM
from stree.bench.unrolled import UnrolledLM, UnrolledState
from stree.models.state import DecodeState
from stree.models.state_size import measure_state

PROMPT = tuple(range(5, 18))
MATRIX_FAMILIES = ["bamba", "mamba2", "minimax", "qwen3_next", "kimi_linear", "zamba2"]


@cache
def pair_of(family: str) -> Pair:
    return tiny_pair(family)


@pytest.mark.parametrize("baseline", slow_unless("replay".__eq__, BASELINES))
@pytest.mark.parametrize(
    ("family", "tree", "temperature"),
    slow_unless(
        lambda _, tree, *__: tree == "static:3,2",
        [("mamba2", "dyspec:7", 0.8), ("bamba", "static:3,2", 0.0), ("bamba", "stree", 0.8)],
    ),
)
def test_a_baseline_emits_the_tokens_of_the_tree(family: str, tree: str, temperature: float, baseline: str) -> None:
    case = Case((PROMPT,), 12, temperature, seed=3)
    ours, other = parse_methods(f"{tree},{baseline}:{tree}")
    wanted = execute(pair_of(family), ours, case)
    assert wanted.stats["tau"] > 1.2  # paths of several nodes are committed
    run = execute(pair_of(family), other, case)
    assert run.tokens == wanted.tokens and run.stats["steps"] == wanted.stats["steps"]


@pytest.mark.parametrize("baseline", [SnapshotLM, ReplayLM])
@pytest.mark.parametrize("family", slow_unless(lambda family: family in ("mamba2", "qwen3_next"), MATRIX_FAMILIES))
def test_logits_and_states_of_several_trees_are_those_of_the_text(
    family: str, baseline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rebind_float32(monkeypatch)
    model = family_model(family, torch.float64)
    decoding = Decoding(model, [9, 5], lm=baseline(patched(model)))
    for sizes in ([7, 9], [1, 5], [12, 1], [6, 6]):
        tree = decoding.score(sizes)
        rest = random_path(decoding.rng, tree, 1) if sizes[1] > 5 else []  # nothing is committed
        decoding.commit(tree, [random_path(decoding.rng, tree, 0), rest])


class _WrongRow(UnrolledLM):
    """A control: keeps the first row whatever was accepted."""

    def commit(self, state: UnrolledState, path: Tensor, path_lengths: Tensor) -> None:  # type: ignore[override]
        super().commit(state, torch.zeros_like(path), path_lengths)


class _RootSnapshot(SnapshotLM):
    """A control: keeps the state of the root whatever was accepted."""

    def commit(self, state: DecodeState, path: Tensor, path_lengths: Tensor) -> None:
        super().commit(state, path[:, :1], path_lengths.clamp(max=1))


class _HalfReplay(ReplayLM):
    """A control: runs the first node of the path alone."""

    def commit(self, state: DecodeState, path: Tensor, path_lengths: Tensor) -> None:
        super().commit(state, path[:, :1], path_lengths.clamp(max=1))


@pytest.mark.parametrize(
    "control", slow_unless(lambda control: control is _HalfReplay, [_WrongRow, _RootSnapshot, _HalfReplay])
)
def test_a_baseline_that_commits_another_state_is_seen(control: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((PROMPT,), 12, 0.0)
    baseline = control.__mro__[1]
    name = BASELINES[[UnrolledLM, SnapshotLM, ReplayLM].index(baseline)]
    ours, other = parse_methods(f"static:3,2,{name}:static:3,2")
    monkeypatch.setattr(f"stree.bench.execute.{baseline.__name__}", control)
    assert execute(pair_of("mamba2"), other, case).tokens != execute(pair_of("mamba2"), ours, case).tokens


def test_bytes_of_a_node_are_those_of_a_state_and_of_its_factors() -> None:
    pair = pair_of("mamba2")
    size = measure_state(pair.target)
    bytes_of = {
        method.name: execute(pair, method, Case((PROMPT,), 3, 0.0)).stats["node_bytes"]
        for method in parse_methods("stree,snapshot:stree,replay:stree,unrolled:stree")
    }
    assert bytes_of["stree"] == bytes_of["replay:stree"] == size.stash_per_node
    assert size.state < bytes_of["snapshot:stree"] <= size.state + size.window
    assert bytes_of["unrolled:stree"] is None


def test_a_layer_with_a_diagonal_state_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="has no sequential scan of Mamba-1 layers"):
        SnapshotLM(TreeLM(family_model("jamba")))


def test_a_part_of_a_tree_is_refused() -> None:
    lm = ReplayLM(pair_of("mamba2").target)
    with pytest.raises(NotImplementedError, match="scores whole trees, got first 1"):
        lm.verify(lm.new_state(1, 8, 4), random_tree(random.Random(0), [3]), 1)
