"""What traversal launches, reads and refuses, and that waves without a launch of their own are run all the same.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_traversal_launches.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.launch_keys import Key, launch_keys
from helpers.on_device import NoHostReads
from helpers.traversal_problems import DEVICE, STAR, Problem

from stree import TokenTree
from stree.growth import Calibrated
from stree.kernels.traversal import kernel as kernels
from stree.kernels.traversal.operands import TraversedPath
from stree.sampling import Random, Sampling
from stree.verify.traversal import traverse_by_kernels
from stree.verify.values import DELTA


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launched", "shape", "vocab"),
    [(0, STAR, 40), (3, [-1, 0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9], kernels.BLOCK + 90)],
    ids=["none", "three"],
)
def test_waves_that_have_no_launch_of_their_own_are_run_by_the_last_one(
    launched: int, shape: list[int], vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem.draw(len(shape), vocab, seed=5, shape=shape)
    monkeypatch.setattr(kernels, "MAX_WAVES", 99)
    expected = problem.found()
    monkeypatch.setattr(kernels, "MAX_WAVES", launched)
    found = problem.found()
    problem.check(found)
    for name in TraversedPath.__slots__:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.slow
def test_more_waves_than_launches_are_needed_and_bounded_by_what_the_host_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem.draw(16, 40, seed=6, shape=[-1, *[0] * 15])
    names = {}
    for bound in (None, 15, 4):
        with launch_keys(monkeypatch) as keys:
            found = problem.found(bound)
        names[bound] = [name for name, _ in keys]
        if bound != 4:
            problem.check(found)
    assert names[None] == names[15] and len(names[None]) == 2 * kernels.MAX_WAVES + 6
    assert names[None].count("settle_kernel") == kernels.MAX_WAVES
    assert names[None].count("rest_kernel") == 1 and names[4].count("rest_kernel") == 0
    assert names[4].count("settle_kernel") == names[4].count("reject_kernel") == 4
    assert kernels.num_waves(12, 1, 11) == 11 and kernels.num_waves(12, 5, None) == 11
    assert kernels.num_waves(7, 3, 2) == 4 and kernels.num_waves(1, 0, None) == 0
    assert kernels.num_waves(5, 9, 3) == 4, "no more than there are drafted nodes"


def test_children_that_calibrated_draws_at_the_root_have_launches_of_their_own() -> None:
    first = Calibrated().bind(Sampling(0.8)).plan(64).layers[0]
    assert kernels.num_waves(1 + first.ranks, 1, first.ranks) <= kernels.MAX_WAVES


def keys_of(monkeypatch: pytest.MonkeyPatch, problem: Problem) -> list[Key]:
    with launch_keys(monkeypatch) as keys:
        problem.found()
    return keys


@pytest.mark.slow
def test_launches_depend_on_sizes_and_not_on_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = keys_of(monkeypatch, Problem.draw(16, 101, shape=list(range(-1, 15))))
    for seed in range(2):
        assert keys_of(monkeypatch, Problem.draw(16, 101, seed=seed)) == expected
    chosen = set(expected)
    for n in (14, 15, 16):  # trees of another number of nodes take no builds of their own
        assert set(keys_of(monkeypatch, Problem.draw(n, 101, batch=1 + n % 3))) == chosen
    assert set(keys_of(monkeypatch, Problem.draw(16, 101, kinds=(DELTA,)))) != chosen


def test_a_traversal_reads_nothing_of_the_device() -> None:
    problem = Problem.draw(9, 40).moved()
    depth = problem.depth
    with NoHostReads():
        traverse_by_kernels(problem.tree, problem.dist, problem.rng, problem.draft, depth)


def test_what_cannot_be_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.draw(3, 5)
    assert problem.draft is not None
    with pytest.raises(ValueError, match=r"draft.probs must be contiguous in its last dimension, got strides"):
        replace(problem, draft=replace(problem.draft, probs=torch.ones(3, 5, 3).mT)).found()
    long = TokenTree(torch.zeros(1, 129, dtype=torch.long), torch.arange(-1, 128)[None])
    rng = Random(0, torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    with pytest.raises(NotImplementedError, match="traverse with backend='triton' takes trees of nodes up to 128"):
        Problem(long, torch.ones(1, 129, 2), None, rng).found()
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "MAX_VOCAB", 4)
        with pytest.raises(
            NotImplementedError, match="traverse with backend='triton' takes a vocabulary up to 4, got 5"
        ):
            problem.found()
    if DEVICE == "cpu":
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        with pytest.raises(RuntimeError, match="traverse needs CUDA tensors, got a tensor on cpu"):
            problem.found()
