"""The steps that numba runs on a CPU against float64 loops over nodes (tests/helpers/oracles.py).

Run: python -m pytest tests/operations/test_cpu_steps.py
"""

# Operands travel as dictionaries, which a type checker cannot count against a signature.
# mypy: disable-error-code="arg-type"

from __future__ import annotations

import pytest
import torch
from helpers.operation_families import ATTENTION, CONV, DELTA, KDA, SELECTIVE, SSD
from helpers.operation_problem import Family, Problem, error, mixed_parents, paths_to, random_parents
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stree.kernels import dispatch

pytestmark = [pytest.mark.skipif(torch.cuda.is_available(), reason="these steps run on the CPU")]

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}  # of the oracle's largest value: rounding, and sums of products
families = pytest.mark.parametrize("family", [SSD, DELTA, KDA, SELECTIVE, CONV, ATTENTION], ids=lambda f: f.name)


def draw(family: Family, parents: Tensor, seed: int = 0, dtype: torch.dtype = torch.float64) -> Problem:
    """Draw a problem; attention without a softcap and with heads of one size, as the reference serves the others."""
    if family is not ATTENTION:
        return Problem.draw(family, parents, seed, dtype)
    options = {"softcap": None, "window": (None, 3, 30)[seed % 3]}
    return Problem.draw(family, parents, seed, dtype, options, value_dim=5, capacity=40 + seed % 2)


def test_auto_means_these_steps_on_a_cpu() -> None:
    assert {
        "attention_step",
        "kv_commit",
        "ssd_commit",
        "ssd_step",
        "gated_delta_step",
        "selective_step",
        "conv_commit",
        "conv_step",
        "mamba2_step",
    } <= dispatch.CPU.keys()


@families
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 24))
@settings(max_examples=25, deadline=None)
def test_a_step_commits_and_scans_as_the_recursion_does(family: Family, seed: int, batch: int, n: int) -> None:
    dtype = [*TOLERANCE][seed % 2]
    old = draw(family, random_parents(n, batch, seed), seed, dtype)
    ends = (n - 1, None, n // 2)[:batch]
    stash = old.stash(n, old.stashed())
    new = draw(family, random_parents(n, batch, seed + 1), seed + 1, dtype).like(old)
    expected = new.changed(**dict(zip(family.states, old.states_at(ends), strict=True)))
    outputs, first = expected.outputs(), seed % n
    y = new.step(stash, *paths_to(old.parents, ends), backend="auto")
    if first:  # rows below it are in the stash from that call
        y = new.step(stash, first=first, backend="auto")
    assert y.dtype == dtype and y.is_contiguous()
    assert error(y, outputs[:, first:]) < TOLERANCE[dtype]
    for mine, other in zip(new.states, expected.states, strict=True):
        assert error(mine, other) < TOLERANCE[dtype]
    assert all(error(stash[name], rows) < TOLERANCE[dtype] for name, rows in new.stashed().items())


@families
@given(st.integers(0, 10**6), st.integers(1, 24))
@settings(max_examples=25, deadline=None)
def test_a_commit_leaves_the_states_of_the_recursion_and_those_of_empty_paths(
    family: Family, seed: int, n: int
) -> None:
    dtype = [*TOLERANCE][seed % 2]
    problem = draw(family, random_parents(n, 3, seed), seed, dtype)
    ends = (n - 1, None, n // 2)
    expected, before = problem.states_at(ends), [state[1].clone() for state in problem.states]
    wrong = problem.states_at((n // 2, None, n - 1))
    problem.commit(*paths_to(problem.parents, ends), backend="auto")
    for mine, other, own, control in zip(problem.states, expected, before, wrong, strict=True):
        assert error(mine, other) < TOLERANCE[dtype] and torch.equal(mine[1], own)
        assert n < 4 or not mine.is_floating_point() or error(mine, control) > 1e-3


@families
def test_outputs_of_padding_are_finite_and_a_sibling_of_the_parent_gives_others(family: Family) -> None:
    problem = draw(family, mixed_parents(13, padding=2))
    y = problem.step(problem.stash(16), backend="auto")
    wanted = problem.outputs()
    assert bool(y.isfinite().all()) and error(y[problem.is_node], wanted[problem.is_node]) < TOLERANCE[torch.float64]
    moved = problem.parents.clone()
    moved[0, 5] = 3  # of the chain: its parent is 4
    y = problem.step(problem.stash(16), backend="auto", topology=moved)
    assert error(y[0], wanted[0]) > 1e-3


@pytest.mark.parametrize(
    ("family", "name"),
    [(SSD, "D"), (SSD, "bias"), (SELECTIVE, "D"), (SELECTIVE, "bias"), (CONV, "bias")],
    ids=lambda part: part if isinstance(part, str) else part.name,
)
def test_an_operand_that_is_left_out_is_zero(family: Family, name: str) -> None:
    problem = Problem.draw(family, random_parents(9))
    zero = problem.changed(**{name: torch.zeros_like(problem.given[name])})
    without = problem.changed(**{name: None})
    steps = [one.step(problem.stash(9), backend="auto") for one in (zero, without)]
    assert error(steps[1], steps[0]) < TOLERANCE[torch.float64]


@pytest.mark.parametrize(
    ("family", "names"),
    [
        (SSD, ("D", "bias")),
        (DELTA, ("beta", "g")),
        (SELECTIVE, ("D", "C")),
        (CONV, ("weight", "bias")),
        (ATTENTION, ("k", "v")),
        (ATTENTION, ("v_cache",)),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, tuple) else part.name,
)
def test_operands_of_another_dtype_are_taken_as_by_the_reference(family: Family, names: tuple[str, ...]) -> None:
    problem = draw(family, random_parents(9), dtype=torch.float32)
    narrow = problem.changed(**{name: problem.given[name].bfloat16() for name in names})
    stash = problem.stash(9)
    mine, expected = (
        narrow.step({name: rows.clone() for name, rows in stash.items()}, backend=backend)
        for backend in ("auto", "reference")
    )
    assert error(mine, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("length", [0, 1, 9])
def test_attention_reads_a_context_that_fills_its_cache(length: int, window: int | None) -> None:
    options, sizes = {"softcap": None, "window": window}, {"value_dim": 5, "capacity": length, "lengths": (length,)}
    problem = Problem.draw(ATTENTION, random_parents(9, 1), 0, torch.float64, options, **sizes)
    y = problem.step(problem.stash(9), backend="auto")
    assert error(y, problem.outputs()) < TOLERANCE[torch.float64]
    broken = problem.changed(q=problem.given["q"].index_fill(1, torch.tensor(8), torch.nan))
    y = broken.step(broken.stash(9), backend="auto")
    assert bool(y[:, 8].isnan().all()) and error(y[:, :8], problem.outputs()[:, :8]) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_attention_takes_rows_that_are_not_contiguous(name: str) -> None:
    problem = draw(ATTENTION, random_parents(1))
    strided = problem.changed(**{name: problem.given[name].transpose(2, 3).contiguous().transpose(2, 3)})
    assert error(strided.step(strided.stash(1), backend="auto"), problem.outputs()) < TOLERANCE[torch.float64]
