"""Hard numbers for the Triton versions: extreme decays, correlated keys, small step sizes, rows that must not leak.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_triton_numbers.py
"""

# Operands travel as dictionaries and tuples, which a type checker cannot count against a signature.
# mypy: disable-error-code="call-arg, arg-type, misc"

from __future__ import annotations

import pytest
import torch
from helpers.operation_families import CONV, DELTA, FEW, KDA, SELECTIVE, SSD
from helpers.operation_problem import (
    CLOSE,
    TOLERANCE,
    Family,
    Problem,
    all_or_nothing,
    assert_scanned,
    chain,
    correlated,
    error,
    mixed_parents,
    paths_to,
    random_parents,
)

from stree.kernels.tiles import interpreted
from stree.kernels.tree_indices import ancestor_mask

DELTAS = pytest.mark.parametrize("family", [DELTA, KDA], ids=lambda f: f.name)


@pytest.mark.parametrize(
    ("family", "values"),
    [
        (SSD, {"xbc": 1e9, "dt": 1e9}),
        (SELECTIVE, {"x": torch.nan, "dt": 1e30}),
        *((family, {"q": 1e25, "k": 1e25, "v": 1e25, "beta": 1e25, "g": -1e30}) for family in (DELTA, KDA)),
        (CONV, {"x": torch.nan}),
    ],
    ids=lambda value: value.name if isinstance(value, Family) else "",
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # overflows are meant
def test_rows_that_are_no_ancestors_do_not_leak_whatever_they_hold(family: Family, values: dict[str, float]) -> None:
    problem = Problem.draw(family, random_parents(12, 1, 1, padding=3), dtype=torch.float32)
    clean, rows = problem.to(torch.float64).scan()[:, :9], problem.stashed()
    for name, value in values.items():
        problem.given[name][:, 9:] = value
        if f"stash_{name}" in rows:
            rows[f"stash_{name}"][:, 9:] = value
    y = family.scan(problem.given, rows, problem.parents, 0, backend="triton")
    assert error(y[:, :9], clean) < CLOSE


@pytest.mark.parametrize("family", [SSD, DELTA, KDA, SELECTIVE], ids=lambda f: f.name)
def test_decays_of_all_or_nothing_lose_no_digits_of_the_decays_behind_them(family: Family) -> None:
    problem, rows = all_or_nothing(family, 60, torch.float32, **FEW.get(family.name, {}))
    exact = problem.to(torch.float64)
    wide = exact.cast(rows, torch.float64)
    y = family.scan(problem.given, rows, problem.parents, 0, backend="triton")
    assert error(y, family.scan(exact.given, wide, problem.parents, 0, backend="reference")) < CLOSE
    path = paths_to(problem.parents, (59, 41))
    problem.commit(*path, rows, "triton")
    exact.commit(*path, wide)
    assert error(problem.states[0], exact.states[0]) < CLOSE


def test_plain_sums_of_decays_lose_the_digits_that_the_kernels_keep() -> None:
    problem, rows = all_or_nothing(SSD, 60, torch.float32, **FEW["ssd"])
    mask, decays = ancestor_mask(problem.parents).cpu(), -rows["stash_dt"].cpu()
    sums, exact = (mask.float() @ decays).double(), mask.double() @ decays.double()
    lost = (sums[:, :, None] - sums[:, None]).exp() - (exact[:, :, None] - exact[:, None]).exp()
    assert float(lost[mask].abs().max()) > 1e-4


@DELTAS
def test_decays_that_pass_many_windows_keep_their_digits(family: Family) -> None:
    problem = Problem.draw(family, chain(100), dtype=torch.float32, key_heads=1, heads=1)
    g = -torch.linspace(60, 104, problem.given["g"].numel()).view(problem.given["g"].shape).to(problem.given["g"])
    g[:, ::3] *= 1e-4  # each sees its parent undimmed, behind sums whose float32 is spaced 5e-4
    assert float(g.sum(1).max()) < -4096
    assert_scanned(problem.changed(g=g))


@DELTAS
@pytest.mark.parametrize("cosine", [0.9, 1.0], ids=lambda c: f"cosine{c}")
def test_correlated_keys_of_a_chain_of_depth_63(cosine: float, family: Family) -> None:
    problem = correlated(Problem.draw(family, chain(64), 2, torch.float32, key_heads=1, heads=1), cosine)
    # Keys that repeat with beta 2 never shrink an error, so it grows with depth.
    assert_scanned(problem, tolerance=2 * CLOSE)


@pytest.mark.parametrize("family", [SSD, SELECTIVE], ids=lambda f: f.name)
def test_softplus_keeps_the_digits_of_small_step_sizes(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helpers.operation_families.LIMIT", (0.0, float("inf")))
    problem = Problem.draw(family, chain(16), dtype=torch.float32)
    problem.given["dt"][:] = torch.linspace(-60, 60, 16)[:, None]
    problem.given["bias"][:] = 0
    stash = problem.stash(20)
    problem.step(stash, backend="triton")
    expected = torch.nn.functional.softplus(problem.given["dt"].double())
    assert float((stash["stash_dt"][:, :16].double() / expected - 1).abs().max()) < 1e-6


def test_a_stash_may_be_narrower_than_the_rows_and_the_scan_reads_the_rounded_keys() -> None:
    problem = Problem.draw(DELTA, mixed_parents(9, 4), dtype=torch.float32)
    exact = problem.given["k"].bfloat16().float()  # the interpreter rounds otherwise than torch; these need no rounding
    problem = problem.changed(k=exact, **{name: problem.given[name].bfloat16() for name in ("v", "beta")})
    stash = problem.stash(20)
    stash["stash_k"] = stash["stash_k"].bfloat16()
    o = problem.step(stash, backend="triton")
    assert torch.equal(stash["stash_k"][:, :9].float(), exact) and o.dtype == torch.bfloat16
    assert error(o, problem.to(torch.float64).scan()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("known", [0, 5], ids=["all", "some"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_of_16_bit_rows_do_not_pull_outputs_to_zero(dtype: torch.dtype, known: int) -> None:
    # Tensor cores cut the last bits of a float32 operand off, which makes every weight smaller by 2^-11.5 on average.
    problem = Problem.draw(SSD, mixed_parents(60, 4), 3, dtype, heads=4, headdim=32)
    problem.given["state"].zero_()
    stash = problem.stash(64, {name: rows[:, :known] for name, rows in problem.stashed().items()})
    y = problem.step(stash, first=known, backend="triton").double()
    exact = problem.to(torch.float64).scan(first=known)
    stored = exact.to(dtype)
    if dtype == torch.bfloat16 and interpreted():  # which cuts the last bits off, too
        stored = (exact.float().view(torch.int32) & -0x10000).view(torch.float32)
    bias = float(((y - stored) * exact).sum() / exact.square().sum())
    assert abs(bias) < 2.0**-14, bias
