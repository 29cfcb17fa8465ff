"""The references of all families against float64 loops over nodes (tests/helpers/oracles.py).

Run: python -m pytest tests/operations/test_reference.py
"""

# Operands travel as dictionaries and tuples, which a type checker cannot count against a signature.
# mypy: disable-error-code="call-arg, arg-type, misc"

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import oracles
from helpers.fast_cases import slow_unless
from helpers.operation_families import ATTENTION, CONV, DELTA, FAMILIES, RECURRENCES
from helpers.operation_problem import (
    Family,
    Problem,
    all_or_nothing,
    chain,
    correlated,
    error,
    mixed_parents,
    off_path,
    paths_to,
    random_parents,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from stree.kernels import ops
from stree.kernels.topology import Topology
from stree.kernels.tree_indices import ancestor_mask

pytestmark = [pytest.mark.skipif(torch.cuda.is_available(), reason="the reference is tested on the CPU")]

# Largest error as a share of the largest value of the oracle, which sees the same rounded inputs.
TOLERANCE = {
    torch.float64: 1e-12,  # 2e-16 rounding, paths of at most 64 nodes, sums of at most some hundred products
    torch.float32: 5e-6,  # 6e-8 rounding, as above
    torch.bfloat16: 4e-3,  # accumulated in float32; the output is rounded to 8 bits, half a step is 2e-3
}
DTYPES = list(TOLERANCE)
EXACT = TOLERANCE[torch.float64]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
every_recurrence = pytest.mark.parametrize("family", RECURRENCES, ids=lambda f: f.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])


# Scans and commits.


@every_family
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 24))
@settings(max_examples=8, deadline=None)
def test_scan_and_commit_equal_the_recursion_on_random_trees(family: Family, seed: int, batch: int, n: int) -> None:
    problem = Problem.draw(family, random_parents(n, batch, seed), seed)
    assert error(problem.scan(), problem.outputs()) < EXACT
    first = seed % n
    assert error(problem.scan(first=first), problem.outputs()[:, first:]) < EXACT
    ends = (n - 1, None, n // 2)[:batch]
    expected = problem.states_at(ends)
    problem.commit(*paths_to(problem.parents, ends))
    assert all(error(mine, other) < EXACT for mine, other in zip(problem.states, expected, strict=True))


@every_family
@pytest.mark.parametrize(("dtype", "n"), [*zip(DTYPES, (64, 13, 13), strict=True), (torch.float64, 1)], ids=str)
def test_scan_of_chains_stars_and_padded_trees_equals_the_recursion_in_every_dtype(
    family: Family, dtype: torch.dtype, n: int
) -> None:
    problem = Problem.draw(family, mixed_parents(n, padding=2), dtype=dtype)
    before = [state.clone() for state in problem.states]
    y = problem.scan()
    assert y.dtype == dtype and y.is_contiguous() and bool(y.isfinite().all())
    assert error(y[problem.is_node], problem.outputs()[problem.is_node]) < TOLERANCE[dtype]
    assert all(torch.equal(mine, other) for mine, other in zip(problem.states, before, strict=True))


@every_family
@every_dtype
def test_three_steps_in_a_row_follow_the_recursion(family: Family, dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    first = Problem.draw(family, mixed_parents(10), dtype=dtype)
    stash, path, lengths, expected = first.stash(14), None, None, [t.clone() for t in first.states]
    for seed, ends in enumerate([(9, None, 4), (0, 7, 8), (None, 9, 9)]):
        tree = Problem.draw(family, mixed_parents(10, seed), seed, dtype).like(first)
        y = tree.step(stash, path, lengths)
        assert all(
            error(mine, t) < TOLERANCE[wide]
            for mine, t in zip(first.states, expected, strict=True)
            if mine.dtype == wide
        )
        at = tree.changed(
            **dict(zip(family.states, [t.to(s) for t, s in zip(expected, first.states, strict=True)], strict=True))
        )
        assert error(y, at.outputs()) < TOLERANCE[dtype]
        expected, (path, lengths) = at.states_at(ends), paths_to(tree.parents, ends)


@every_family
def test_an_empty_path_leaves_every_bit_of_a_state(family: Family) -> None:
    problem = Problem.draw(family, random_parents(8), dtype=torch.float32)
    for state in problem.states[: 1 if family is not ATTENTION else 2]:
        state[:, ::2] = -0.0
        state[0] = torch.where(state[0] > 1, torch.inf, state[0])
    before = [state.clone() for state in problem.states]
    for path, lengths in (
        paths_to(problem.parents, (None, None)),
        *((torch.full((2, width), -1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)) for width in (0, 1)),
    ):
        problem.commit(path, lengths)
        assert all(
            torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(problem.states, before, strict=True)
        )
    problem.commit(*paths_to(problem.parents, (None, 7)))
    for mine, other in zip(problem.states, before, strict=True):
        assert torch.equal(mine[0].view(torch.int32), other[0].view(torch.int32)) and not torch.equal(mine[1], other[1])


@every_family
def test_commit_ignores_rows_off_the_path_whatever_they_hold(family: Family) -> None:
    problem, ends = Problem.draw(family, random_parents(6)), (5, 0)
    rows, off = problem.stashed(), off_path(problem.parents, ends, 6)
    dirty = {name: t.masked_fill(off.view(2, 6, *(1,) * (t.ndim - 2)), torch.nan) for name, t in rows.items()}
    other = problem.to(torch.float64)
    path, lengths = oracles.paths_to(problem.parents, ends, extra=3)
    problem.commit(path, lengths, rows)
    other.commit(path, lengths, dirty)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(problem.states, other.states, strict=True))


@pytest.mark.parametrize(
    "family",
    slow_unless(lambda _: False, RECURRENCES, in_ci=lambda family: family.name in ("ssd", "kda")),
    ids=lambda family: family.name,
)
def test_two_thousand_commits_do_not_drift(family: Family) -> None:
    problem = Problem.draw(family, chain(4), dtype=torch.float32)
    exact = problem.to(torch.float64)
    for step in range(2000):
        tree = Problem.draw(family, random_parents(4, 1, step), step, torch.float32).like(problem)
        path = paths_to(tree.parents, (step % 4,))
        rows = tree.stashed()
        problem.commit(*path, rows)
        exact.commit(*path, problem.cast(rows, torch.float64))
        if step % 500 == 499:
            assert error(problem.states[0], exact.states[0]) < TOLERANCE[torch.float32]


@every_recurrence
def test_layers_may_be_stacked_into_the_batch_of_a_commit(family: Family) -> None:
    layers = [Problem.draw(family, random_parents(7), seed) for seed in range(2)]
    layers[1] = replace(layers[1], parents=layers[0].parents)
    rows = [layer.stashed() for layer in layers]
    together = {name: torch.cat([one[name] for one in rows]) for name in rows[0]}
    state = torch.cat([layer.states[0] for layer in layers])
    rates = (
        {"A": torch.stack([layer.given["A"] for layer in layers]).repeat_interleave(2, 0)}
        if "A" in layers[0].given
        else {}
    )
    path, lengths = paths_to(layers[0].parents, (6, 3))
    for layer, own in zip(layers, rows, strict=True):
        layer.commit(path, lengths, own)
    layers[0].commit(path.repeat(2, 1), lengths.repeat(2), together, state=state, **rates)
    assert error(state, torch.cat([layer.states[0] for layer in layers])) < EXACT


@every_family
def test_a_tree_grown_in_pieces_equals_one_call(family: Family) -> None:
    problem = Problem.draw(family, random_parents(13))
    whole, rows, stash = problem.scan(), problem.stashed(), problem.stash(16)
    for first, n in ((0, 1), (1, 6), (6, 13)):
        assert error(problem.cut(n).step(stash, first=first), whole[:, first:n]) < EXACT
    assert all(error(stash[name][:, :13], rows[name]) < EXACT for name in rows)


# Extremes.


@every_dtype
@every_recurrence
def test_extreme_decays_forget_all_or_nothing(family: Family, dtype: torch.dtype) -> None:
    problem, rows = all_or_nothing(family, 21, dtype)
    y = family.scan(problem.given, rows, problem.parents, 0, backend="reference")
    assert error(y, problem.outputs(rows)) < TOLERANCE[dtype]
    expected = problem.states_at((20, 17), rows)[0]
    problem.commit(*paths_to(problem.parents, (20, 17)), rows)
    assert error(problem.states[0], expected) < TOLERANCE[torch.float64 if dtype == torch.float64 else torch.float32]


@every_dtype
@pytest.mark.parametrize("cosine", [0.9, 0.99, 1.0], ids=lambda c: f"cosine{c}")
def test_correlated_keys_of_a_chain_of_depth_63(cosine: float, dtype: torch.dtype) -> None:
    problem = correlated(Problem.draw(DELTA, chain(64), 2, key_heads=1, heads=2), cosine).to(dtype)
    # Keys that repeat with beta 2 never shrink an error, so it grows with depth; the doubling product is off by 1e14.
    assert error(problem.scan(), problem.outputs()) < 4 * TOLERANCE[dtype]


# Negative controls: what the tests above must be able to see.


@every_family
@pytest.mark.parametrize("fault", ["chain", "zeroed state", "sibling leak"])
def test_a_wrong_tree_or_state_is_far_outside_the_tolerance(family: Family, fault: str) -> None:
    tree = torch.tensor([[-1, 0, 0, 1, 1, 2, 2, 5]] * 2, dtype=torch.int32)
    problem = Problem.draw(family, tree, dtype=torch.float32)
    expected = problem.outputs()
    assert error(problem.scan(), expected) < TOLERANCE[torch.float32]
    if fault == "chain":
        wrong = problem.scan(chain(8, 2))
    elif fault == "zeroed state":
        wrong = problem.changed(**{name: torch.zeros_like(problem.given[name]) for name in family.states}).scan()
    else:
        mask = ancestor_mask(tree)
        mask[:, 2, 1] = True  # node 2 sees its sibling
        leaking = tree.clone()
        leaking[:, 2] = 1  # what a diagonal recurrence and a convolution go by
        wrong = problem.scan(Topology.of(leaking, mask=mask))
    assert error(wrong, expected) > 100 * TOLERANCE[torch.float32]


# What only some families have.


@pytest.mark.parametrize("width", [1, 2, 7], ids=lambda w: f"width{w}")
def test_filters_of_other_widths_follow_the_path_into_the_window(width: int) -> None:
    problem = Problem.draw(CONV, random_parents(13), width=width)
    assert error(problem.scan(), problem.outputs()) < EXACT
    expected = problem.states_at((11, 5))[0]
    problem.commit(*paths_to(problem.parents, (11, 5)))
    assert torch.equal(problem.states[0], expected)
    x, weight, window = (problem.given[name] for name in ("x", "weight", "window"))
    y = ops.tree_conv1d(x, weight, None, problem.parents, window, activation=None)
    trees = problem.parents.tolist()
    plain = [oracles.conv(x[b], weight, None, trees[b], window[b], False)[0] for b in range(2)]
    assert error(y, torch.stack(plain)) < EXACT


@pytest.mark.parametrize(
    ("kv_heads", "shared", "options"),
    [(4, 1, {}), (1, 3, {"window": 4}), (2, 3, {"window": 1}), (2, 3, {"softcap": 0.7})],
    ids=str,
)
def test_attention_sees_the_context_and_its_own_path(kv_heads: int, shared: int, options: dict[str, float]) -> None:
    every: dict[str, Any] = {"window": None, "softcap": None, **options}
    problem = Problem.draw(ATTENTION, random_parents(13), options=every, kv_heads=kv_heads, shared=shared)
    assert error(problem.scan(), problem.outputs()) < EXACT
    for cache in problem.states[:2]:  # rows beyond the length do not leak
        cache[0], cache[1, :, 7:] = 1e30, -1e30
    assert error(problem.scan(), problem.outputs()) < EXACT


def test_a_path_that_does_not_fit_is_cut_at_the_end_of_the_cache() -> None:
    problem = Problem.draw(ATTENTION, chain(13, 2), dtype=torch.float32, lengths=(0, 37))
    expected = problem.states_at((12, 12))
    problem.commit(*paths_to(problem.parents, (12, 12)))
    assert all(torch.equal(mine.double(), other) for mine, other in zip(problem.states, expected, strict=True))
