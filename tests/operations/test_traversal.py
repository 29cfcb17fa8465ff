"""Traversal compiled for the CPU, and in Triton, equals torch: acceptance, ratios, what is left, and paths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from helpers import oracles
from helpers.fast_cases import slow_unless
from helpers.traversal_problems import CLOSE, CONTROLS, STAR, Compiled, OneDraft, Problem
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stree.kernels.traversal import cpu
from stree.kernels.traversal.paths import Siblings, deepest
from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify import DraftProbs
from stree.verify.traversal import traverse
from stree.verify.values import DELTA, INDEPENDENT, SAMPLED

EXACT = 1e-10  # sums in float64 in another order, of which a test divides by what is left
ALL = (SAMPLED, DELTA, INDEPENDENT)
CHAIN = list(range(-1, 8))
WIDTHS = (torch.float32, torch.float64)


def in_widths(problem: Problem, dist: torch.dtype, probs: torch.dtype) -> Problem:
    """Give the same with distributions of other dtypes; in float64 torch sums one again that nothing was taken from."""
    draft = None if problem.draft is None else replace(problem.draft, probs=problem.draft.probs.to(probs))
    whole = problem.dist.double()
    return replace(problem, dist=(whole / whole.sum(-1, keepdim=True)).to(dist), draft=draft)


def check_exactly(problem: Problem) -> None:
    """Compare in both widths, each as closely as it allows."""
    for dist in WIDTHS:
        for probs in WIDTHS:
            given = in_widths(problem, dist, probs)
            given.check(Compiled.of(given), CLOSE if dist == torch.float32 else EXACT)


Run = Callable[[Problem], Any]
BACKENDS: dict[str, Run] = {"compiled": Compiled.of, "triton": Problem.found}
every_backend = pytest.mark.parametrize("run", BACKENDS.values(), ids=BACKENDS)


@pytest.mark.slow
@every_backend
@given(
    st.integers(0, 10**6),
    st.integers(1, 33),
    st.sampled_from([9, 40, 200]),
    st.integers(0, 3),
    st.sampled_from([ALL, (SAMPLED,), (INDEPENDENT,), (DELTA,), (SAMPLED, DELTA)]),
    st.sampled_from([0.0, 0.5]),
)
@settings(max_examples=2, deadline=None)
def test_acceptance_ratios_and_outcomes_are_those_of_torch(
    run: Run, seed: int, n: int, vocab: int, padding: int, kinds: tuple[int, ...], zeros: float
) -> None:
    problem = Problem.draw(n, vocab, seed=seed, padding=min(padding, n - 1), kinds=kinds, zeros=zeros)
    # Where more siblings are drawn than a distribution has tokens, what is left of it is rounding alone.
    assume(n < vocab * (1 - zeros))
    assume(float((problem.narrow() - problem.wide()[0]).abs().max()) < 1e-5)
    problem.check(run(problem), 1e-3)
    if run == Compiled.of:
        wide = in_widths(problem, torch.float64, torch.float64)
        wide.check(run(wide), 1e-7)


@pytest.mark.parametrize("kinds", [ALL, (SAMPLED,), (INDEPENDENT,), (DELTA,)], ids=str)
@pytest.mark.parametrize("shape", [CHAIN, STAR[:7], [-1, 0, 0, -1, 1, 2, 2, -1, 4]], ids=["chain", "star", "padded"])
def test_shapes_are_tested_as_in_torch(shape: list[int], kinds: tuple[int, ...]) -> None:
    for seed in range(2):
        check_exactly(Problem.draw(len(shape), 40, seed=seed, kinds=kinds, shape=shape))


@pytest.mark.parametrize("kinds", [(INDEPENDENT,), (SAMPLED,), (DELTA,), ALL], ids=str)
def test_siblings_of_one_token_are_tested_as_in_torch(kinds: tuple[int, ...]) -> None:
    for seed in range(4):
        problem = Problem.draw(9, 40, seed=seed, kinds=kinds, shape=[-1, 0, 0, 0, 0, 1, 1, 0, 1])
        tokens = problem.tree.tokens.clone()
        tokens[:, 3], tokens[:, 6], tokens[:, 7] = tokens[:, 1], tokens[:, 5], tokens[:, 1]
        check_exactly(replace(problem, tree=TokenTree(tokens, problem.tree.parents)))


def test_rows_stand_in_any_order_one_beyond_them_is_the_nearest_and_one_that_no_node_names_may_hold_anything() -> None:
    problem = Problem.draw(9, 40, seed=3, shape=[-1, 0, 0, 1, 1, 2, 3, 3, 0])
    assert problem.draft is not None
    given = torch.where(problem.draft.kind == DELTA, -5, problem.draft.row)
    is_named = (given[:, :, None] == torch.arange(9)).any(1)  # DELTA nodes name none
    probs = torch.where(is_named[..., None], problem.draft.probs, torch.nan)
    expected = Compiled.of(problem)
    found = Compiled.of(replace(problem, draft=replace(problem.draft, probs=probs, row=given)))
    assert torch.equal(found.accept_probs, expected.accept_probs) and torch.equal(found.left, expected.left)
    low = replace(problem.draft, row=torch.where(problem.draft.row == 0, -2, problem.draft.row))
    assert torch.equal(Compiled.of(replace(problem, draft=low)).accept_probs, expected.accept_probs)
    order = torch.tensor([4, 0, 8, 2, 6, 1, 3, 7, 5])
    moved = replace(problem.draft, probs=problem.draft.probs[:, order], row=order.argsort()[problem.draft.row.long()])
    assert torch.equal(Compiled.of(replace(problem, draft=moved)).accept_probs, expected.accept_probs)
    few = replace(problem, draft=replace(problem.draft, probs=problem.draft.probs[:, :2]))
    few.check(Compiled.of(few))


@every_backend
def test_a_distribution_that_nothing_is_left_of_stays_as_it_is(run: Run) -> None:
    tree = TokenTree(torch.tensor([[0, 2, 1, 3]]), torch.tensor([[-1, 0, 0, 0]], dtype=torch.int32))
    dist = torch.zeros(1, 4, 5)
    dist[..., 2] = 1.0
    drafts = (
        DraftProbs(dist.clone(), tree.parents.clamp(min=0), torch.full((1, 4), kind)) for kind in (DELTA, SAMPLED)
    )
    for draft in (None, *drafts):
        problem = Problem(tree, dist, draft, Random(3, torch.tensor([5]), torch.tensor([7])))
        tested = run(problem)
        problem.check(tested)
        assert tested.path.tolist() == [[0, 1]] and tested.next_token.tolist() == [2]
        assert tested.accept_probs[0, 1] == 1 and tested.ratios.tolist() == [[0.0, 1.0, 0.0, 0.0]]
        assert not isinstance(tested, Compiled) or torch.equal(tested.left, dist)


@pytest.mark.parametrize("scale", [1.0, 10.0, 40.0, 100.0])
def test_float32_errs_in_what_it_emits_after_a_rejection_by_no_more_than_rounding(scale: float) -> None:
    one, zero = OneDraft.draw(scale), torch.zeros(1).long()
    tested = Compiled.of(Problem(one.tree, one.dist, one.draft, Random(0, zero, zero)))
    one.check(tested.left[:, 0], tested.accept_probs[:, 1])


def test_strides_and_integers_of_other_widths_change_nothing() -> None:
    problem = Problem.draw(9, 40, seed=9)
    assert problem.draft is not None
    expected = Compiled.of(problem)
    dist, probs = (
        torch.nn.functional.pad(part, (2, 5), value=torch.nan)[..., 2:42]
        for part in (problem.dist, problem.draft.probs)
    )
    tokens, parents = (
        torch.stack([part, part + 1], -1)[..., 0] for part in (problem.tree.tokens, problem.tree.parents)
    )
    tree = TokenTree.unchecked(tokens, parents, problem.tree.depths, problem.tree.ancestor_mask)
    draft = DraftProbs(probs, problem.draft.row.long(), problem.draft.kind.long())
    found = Compiled.of(replace(problem, tree=tree, draft=draft), dist)
    for name in ("accept_probs", "ratios", "left"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.equal(found.path, expected.path)
    assert torch.equal(found.next_token, expected.next_token)


def test_a_token_beyond_the_vocabulary_and_a_path_beyond_the_bound_are_refused() -> None:
    problem = Problem.draw(4, 9, shape=[-1, 0, 1, 2], kinds=(DELTA,), batch=1)
    for token in (9, -1):
        tokens = problem.tree.tokens.clone()
        tokens[0, 2] = token
        tree = TokenTree.unchecked(tokens, problem.tree.parents, problem.tree.depths, problem.tree.ancestor_mask)
        with pytest.raises(ValueError, match="a drafted token is not in the vocabulary"):
            traverse(tree, problem.dist.clone(), problem.rng, None, 3)
    sure = torch.nn.functional.one_hot(problem.tree.tokens.roll(-1, 1), 9).float()
    assert traverse(problem.tree, sure.clone(), problem.rng, None, 3).path_lengths.tolist() == [4]
    with pytest.raises(ValueError, match="a path is deeper than max_depth"):
        traverse(problem.tree, sure.clone(), problem.rng, None, 2)


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 3), st.sampled_from([0.1, 0.5, 0.9, 1.0]))
@settings(max_examples=60, deadline=None)
def test_the_path_walked_is_that_to_the_first_node_in_post_order(
    seed: int, n: int, padding: int, chance: float
) -> None:
    rng = torch.Generator().manual_seed(seed)
    parents = oracles.random_parents(4, n, rng, min(padding, n - 1))
    tree = TokenTree(torch.zeros(4, n, dtype=torch.long), parents)
    shown = (torch.rand(4, n, generator=rng) < chance) & (parents >= 0)
    is_alive = (tree.ancestor_mask & shown[:, :, None]).any(1)
    depth = int(tree.depths.max())
    for most in (depth, depth + 3):
        expected = deepest(tree, Siblings.of(tree).first_of(is_alive), most)
        found = cpu.walk(tree, shown.clone(), most)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    for row in range(4):
        assert int(found.leaf[row]) == first_in_post_order(parents[row].tolist(), shown[row].tolist())


def first_in_post_order(parents: list[int], shown: list[bool], node: int = 0) -> int:
    """Look below a node first; -1 where no node passes, but the root always does."""
    for child in (place for place, parent in enumerate(parents) if parent == node):
        found = first_in_post_order(parents, shown, child)
        if found >= 0:
            return found
    return node if shown[node] or not node else -1


@pytest.mark.parametrize(
    ("backend", "control"),
    slow_unless(
        lambda backend, control: backend == "compiled" or control in [*CONTROLS][:2], product(BACKENDS, CONTROLS)
    ),
)
def test_acceptance_that_is_wrong_in_one_thing_is_rejected(
    backend: str, control: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem.draw(12, 7, seed=4, kinds=(SAMPLED,), shape=[-1, 0, 0, 0, 1, 1, 2, 2, 4, 4, 6, 6])
    found = BACKENDS[backend](problem)
    problem.check(found)
    assert problem.error(*CONTROLS[control](problem, monkeypatch), found) > 100 * CLOSE
