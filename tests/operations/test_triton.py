"""The Triton versions of all families against the references in float64, interpreted on the CPU.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_triton.py
"""

# Operands travel as dictionaries and tuples, which a type checker cannot count against a signature.
# mypy: disable-error-code="call-arg, arg-type, misc"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.operation_families import ATTENTION, CONV, DELTA, DIAGONAL, FAMILIES, KDA, SELECTIVE, SSD
from helpers.operation_problem import (
    DEVICE,
    Family,
    Problem,
    chain,
    error,
    mixed_parents,
    off_path,
    paths_to,
    random_parents,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stree.kernels import ops
from stree.kernels.precision import float32_tolerance
from stree.kernels.tiles import DiagonalTile
from stree.kernels.topology import ancestor_mask

pytestmark = pytest.mark.usefixtures("poisoned_empty")

# Largest error as a share of the largest value of the reference, which sees the same rounded inputs.
TOLERANCE = {
    torch.float32: float32_tolerance(400),  # 6e-8 rounding, sums of some hundred products
    torch.bfloat16: 2e-2,  # the output has 8 bits, and the interpreter rounds them towards zero
    torch.float16: 2e-3,  # the output has 11 bits
}
CLOSE = TOLERANCE[torch.float32]
ROOM = 20
# Few heads, each of which is a program that the interpreter runs.
FEW: dict[str, dict[str, Any]] = {
    "ssd": {"heads": 2, "groups": 1}, "gated_delta": {"key_heads": 1, "heads": 2}, "kda": {"key_heads": 1, "heads": 2},
    "attention": {"kv_heads": 1},
}  # fmt: skip
DELTAS = pytest.mark.parametrize("family", [DELTA, KDA], ids=lambda f: f.name)
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)


def assert_scanned(problem: Problem, first: int = 0, tolerance: float = CLOSE) -> None:
    """Require the reference's outputs of all nodes from some on."""
    wanted = problem.is_node[:, first:]
    y = problem.scan(first=first, backend="triton")
    assert y.dtype == problem.given[problem.dtype_of].dtype and y.is_contiguous() and bool(y.isfinite().all())
    assert error(y[wanted], problem.to(torch.float64).scan(first=first)[wanted]) < tolerance


# Steps: commit, stash, scan.


@pytest.mark.parametrize(
    ("family", "dtype", "first", "committed"),
    [
        pytest.param(family, dtype, first, committed, id=f"{family.name}-{str(dtype)[6:]}-first{first}-{committed}")
        for family in FAMILIES
        for dtype, first, committed in (
            (torch.float32, 0, "from its stash"),
            (torch.float32, 5, "from another stash"),
            (torch.bfloat16, 5, "from its stash"),
            (torch.float16, 0, "nothing"),
        )
        if family.alternates or committed != "from another stash"
    ],
)
def test_a_step_over_chains_stars_and_padded_trees_equals_the_reference(
    family: Family, dtype: torch.dtype, first: int, committed: str
) -> None:
    old = Problem.draw(family, mixed_parents(13), 1, dtype)
    new = Problem.draw(family, mixed_parents(11, 2, padding=1), 2, dtype).like(old)
    exact = new.to(torch.float64)
    ends = 9, None, 0 if dtype == torch.float32 else 12  # the root alone among them
    path: Tensor | None
    lengths: Tensor | None
    path, lengths = paths_to(old.parents, ends)
    off = off_path(old.parents, ends, ROOM)
    off[:, :first] = False  # rows below `first` belong to the new tree too
    stash = old.stash(ROOM, old.stashed())
    for name, rows in stash.items():  # rows off the path may hold anything
        stash[name] = rows.masked_fill(off.view(*off.shape, *(1,) * (rows.ndim - 2)), torch.nan)
    kept, options, others = exact.cast(stash, torch.float64), {}, {}
    if committed == "from another stash":
        options["previous"], others["previous"] = tuple(stash.values()), tuple(kept.values())
        before = [rows.clone() for rows in stash.values()]
        stash, kept = ({name: t.clone() for name, t in each.items()} for each in (stash, kept))
    elif committed == "nothing":
        path = lengths = None
    states = [state.clone() for state in new.states]
    y = new.step(stash, path, lengths, first, "triton", **options)
    expected = exact.step(kept, path, lengths, first, **others)
    wanted = new.is_node[:, first:]
    assert y.dtype == dtype and y.is_contiguous() and bool(y.isfinite().all())
    assert error(y[wanted], expected[wanted]) < TOLERANCE[dtype]
    for mine, theirs, state in zip(new.states, exact.states, states, strict=True):
        assert error(mine, theirs) < TOLERANCE[mine.dtype] if mine.is_floating_point() else torch.equal(mine, theirs)
        assert torch.equal(mine[1:2].view(torch.uint8), state[1:2].view(torch.uint8))  # whose path is empty
    for name, rows in stash.items():
        assert error(rows[:, first:11][wanted], kept[name][:, first:11][wanted]) < TOLERANCE[rows.dtype], name
        assert bool(rows[:, 13:].isnan().all())
    for mine, theirs in zip(options.get("previous", ()), before if options else (), strict=True):
        assert torch.equal(mine.nan_to_num(9), theirs.nan_to_num(9))


@pytest.mark.parametrize("family", [SSD, DELTA, KDA, SELECTIVE], ids=lambda f: f.name)
def test_a_commit_from_another_stash_is_that_of_a_step_in_place(family: Family) -> None:
    one = Problem.draw(family, mixed_parents(13), 1, torch.float32, **FEW.get(family.name, {}))
    path, lengths = paths_to(one.parents, (12, 3, None))
    two, stash = one.to(torch.float32), one.stash(ROOM, one.stashed())
    other = one.stash(ROOM)
    y = two.step(other, path, lengths, 0, "triton", previous=tuple(rows.clone() for rows in stash.values()))
    assert error(one.step(stash, path, lengths, 0, "triton"), y) < CLOSE and error(one.states[0], two.states[0]) < CLOSE
    assert all(error(stash[name][:, :13], other[name][:, :13]) < CLOSE for name in stash)


@every_family
def test_a_tree_grown_in_pieces_equals_one_call(family: Family) -> None:
    problem = Problem.draw(family, mixed_parents(17, 8)[::2], dtype=torch.float32, **FEW.get(family.name, {}))
    expected, stash = problem.to(torch.float64).scan(), problem.stash(ROOM)
    for first, n in ((0, 1), (1, 6), (6, 17)):
        y = problem.cut(n).step(stash, first=first, backend="triton")
        assert error(y, expected[:, first:n]) < CLOSE
    if family in (DELTA, KDA):  # the scan takes u of the older nodes too
        rows = [problem.given[name] for name in family.rows]
        o, u = ops.gated_delta_tree_scan(
            *rows, problem.parents, problem.states[0], scale=0.7, first=6, u=stash["stash_u"], backend="triton"
        )  # fmt: skip
        assert error(o, expected[:, 6:]) < CLOSE and error(u, stash["stash_u"][:, :17]) < CLOSE


# Scans and commits of their own.


@every_family
@given(seed=st.integers(0, 10**6), n=st.integers(1, 40), padding=st.integers(0, 3))
@settings(max_examples=4, deadline=None)
def test_scan_of_drawn_trees_equals_the_reference(family: Family, seed: int, n: int, padding: int) -> None:
    problem = Problem.draw(family, random_parents(n, 1, seed, padding), seed, torch.float32, **FEW.get(family.name, {}))
    assert_scanned(problem, seed % max(1, n - padding))


@pytest.mark.parametrize(
    ("family", "n", "sizes"),
    [
        (SSD, 1, {}),
        (SSD, 65, {"heads": 1, "groups": 1, "headdim": 70, "dstate": 70}),
        (SSD, 128, {"heads": 1, "groups": 1, "headdim": 16, "dstate": 40}),
        *((family, 1, {}) for family in (DELTA, KDA)),
        *((family, 65, {"key_heads": 1, "heads": 1, "dk": 70, "dv": 70}) for family in (DELTA, KDA)),
        *((family, 128, {"key_heads": 1, "heads": 1, "dk": 40, "dv": 16}) for family in (DELTA, KDA)),
        (SELECTIVE, 1, {"channels": 3, "dstate": 1}),
        (SELECTIVE, 128, {"channels": 5, "dstate": 16}),
        (SELECTIVE, 9, {"channels": 3, "dstate": 200}),
        (CONV, 37, {"channels": 67}),
        *((CONV, 13, {"width": width}) for width in (1, 2, 7)),
        (ATTENTION, 128, {"kv_heads": 1, "shared": 1}),
    ],
    ids=lambda value: (
        value.name
        if isinstance(value, Family)
        else "-".join(map(str, value.values()))
        if isinstance(value, dict)
        else str(value)
    ),
)
def test_scan_over_several_tiles_equals_the_reference(family: Family, n: int, sizes: dict[str, int]) -> None:
    assert_scanned(Problem.draw(family, random_parents(n, 1, 3), dtype=torch.float32, **sizes))


@pytest.mark.parametrize("family", [SELECTIVE, DIAGONAL], ids=lambda f: f.name)
def test_a_full_binary_tree_of_127_nodes_equals_the_reference(family: Family) -> None:
    parents = torch.tensor([[(i - 1) // 2 if i else -1 for i in range(127)]], dtype=torch.int32)
    assert_scanned(Problem.draw(family, parents, dtype=torch.float32))


@pytest.mark.parametrize("family", [SSD, SELECTIVE, DIAGONAL, DELTA, KDA, CONV], ids=lambda f: f.name)
def test_commit_of_a_long_path_equals_the_reference(family: Family) -> None:
    problem = Problem.draw(family, mixed_parents(40, 4)[::2], dtype=torch.float32, **FEW.get(family.name, {}))
    exact, rows = problem.to(torch.float64), problem.stashed()
    rates = {"A": torch.stack((problem.given["A"], problem.given["A"] * 0.3))} if "A" in problem.given else {}
    path, lengths = paths_to(problem.parents, (39, 30))
    problem.commit(path, lengths, rows, "triton", **rates)  # one layer a row
    exact.commit(path, lengths, exact.cast(rows, torch.float64), **{name: t.double() for name, t in rates.items()})
    assert error(problem.states[0], exact.states[0]) < CLOSE


def test_tiles_for_many_sequences_score_as_those_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, choose = Problem.draw(SELECTIVE, mixed_parents(12, 8), dtype=torch.float32, channels=37), DiagonalTile.of
    monkeypatch.setattr(DiagonalTile, "of", lambda n, dstate, channels: choose(n, dstate, 10**6))
    assert choose(12, 16, 111).channels == 8 and DiagonalTile.of(12, 16, 111).channels == 16
    assert_scanned(problem)


# Hard numbers.


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


def extreme(family: Family) -> tuple[Problem, dict[str, Tensor]]:
    """Draw decays of all or nothing at every node, and rows as stashed with them."""
    problem = Problem.draw(family, random_parents(60, 2, 5), dtype=torch.float32, **FEW.get(family.name, {}))
    rng = torch.Generator().manual_seed(1)

    def one_of(like: Tensor, *values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), like.shape, generator=rng)].to(like)

    if family in (DELTA, KDA):
        problem = problem.changed(g=one_of(problem.given["g"], 0.0, -1e-3, -0.5, -1e4))
        return problem, problem.stashed()
    rows = problem.stashed()
    rows["stash_dt"] = one_of(rows["stash_dt"], 0.0, 1e-3, 0.5, 1e4)
    name, A = next(iter(rows)), -torch.ones_like(problem.given["A"])
    if family is SELECTIVE:
        A[:, 0], A[:, 1] = -1e-30, -1e30
        rows[name] /= rows["stash_dt"].clamp(min=1)
    else:
        heads, headdim = problem.states[0].shape[1:3]
        x = rows[name][..., : heads * headdim].unflatten(-1, (heads, headdim))
        x /= rows["stash_dt"].clamp(min=1)[..., None]
    return problem.changed(A=A), rows


@pytest.mark.parametrize("family", [SSD, DELTA, KDA, SELECTIVE], ids=lambda f: f.name)
def test_decays_of_all_or_nothing_lose_no_digits_of_the_decays_behind_them(family: Family) -> None:
    problem, rows = extreme(family)
    exact = problem.to(torch.float64)
    wide = exact.cast(rows, torch.float64)
    y = family.scan(problem.given, rows, problem.parents, 0, backend="triton")
    assert error(y, family.scan(exact.given, wide, problem.parents, 0, backend="reference")) < CLOSE
    path = paths_to(problem.parents, (59, 41))
    problem.commit(*path, rows, "triton")
    exact.commit(*path, wide)
    assert error(problem.states[0], exact.states[0]) < CLOSE


def test_plain_sums_of_decays_lose_the_digits_that_the_kernels_keep() -> None:
    problem, rows = extreme(SSD)
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
    problem = Problem.draw(family, chain(64), 2, torch.float32, key_heads=1, heads=1)
    common = torch.zeros_like(problem.given["k"])
    common[..., 0] = 1
    noise = torch.nn.functional.normalize(problem.given["k"] * (1 - common), dim=-1)
    keys = cosine * common + (1 - cosine**2) ** 0.5 * noise
    beta = torch.where(problem.given["beta"] > 1, 2.0, problem.given["beta"])
    # Keys that repeat with beta 2 never shrink an error, so it grows with depth.
    assert_scanned(problem.changed(q=keys, k=keys, g=problem.given["g"] * 1e-3, beta=beta), tolerance=2 * CLOSE)


@pytest.mark.parametrize("family", [SSD, SELECTIVE], ids=lambda f: f.name)
def test_softplus_keeps_the_digits_of_small_step_sizes(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helpers.operation_families.LIMIT", (0.0, float("inf")))
    problem = Problem.draw(family, chain(16), dtype=torch.float32)
    problem.given["dt"][:] = torch.linspace(-60, 60, 16)[:, None]
    problem.given["bias"][:] = 0
    stash = problem.stash(ROOM)
    problem.step(stash, backend="triton")
    expected = torch.nn.functional.softplus(problem.given["dt"].double())
    assert float((stash["stash_dt"][:, :16].double() / expected - 1).abs().max()) < 1e-6


def test_a_stash_may_be_narrower_than_the_rows_and_the_scan_reads_the_rounded_keys() -> None:
    problem = Problem.draw(DELTA, mixed_parents(9, 4), dtype=torch.float32)
    exact = problem.given["k"].bfloat16().float()  # the interpreter rounds otherwise than torch; these need no rounding
    problem = problem.changed(k=exact, **{name: problem.given[name].bfloat16() for name in ("v", "beta")})
    stash = problem.stash(ROOM)
    stash["stash_k"] = stash["stash_k"].bfloat16()
    o = problem.step(stash, backend="triton")
    assert torch.equal(stash["stash_k"][:, :9].float(), exact) and o.dtype == torch.bfloat16
    assert error(o, problem.to(torch.float64).scan()) < TOLERANCE[torch.bfloat16]


# What is refused.


def small(family: Family, n: int = 2, dtype: torch.dtype = torch.float32, **sizes: int) -> Problem:
    return Problem.draw(family, chain(n), dtype=dtype, **sizes)


def strided(family: Family, name: str, *dims: int) -> Problem:
    """Lay out one operand in another order."""
    problem = small(family, 3)
    tensor = problem.given[name].transpose(*dims).contiguous().transpose(*dims)
    return problem.changed(**{name: tensor})


def commit_129(problem: Problem) -> None:
    path = torch.zeros(1, 129, dtype=torch.int32, device=DEVICE)
    problem.commit(path, path[:, 0] + 1, backend="triton")


def scan(problem: Problem) -> None:
    problem.scan(backend="triton")


Refusal = tuple[Callable[[], Problem], Callable[[Problem], Any], type[Exception], str]
SAME = "takes float32, bfloat16 or float16, the same for all, got"
REFUSED: list[Refusal] = [
    (lambda: small(SSD, headdim=129), scan, NotImplementedError,
     "ssd_tree_scan with backend='triton' takes a headdim up to 128, got 129"),
    (lambda: small(SSD, dstate=257), scan, NotImplementedError, "takes a dstate up to 256, got 257"),
    (lambda: small(SSD, 129), scan, NotImplementedError, "takes trees of nodes up to 128, got 129"),
    (lambda: small(SSD, dtype=torch.float64), scan, TypeError, f"{SAME} x float64"),
    (lambda: strided(SSD, "state", 2, 3), scan, ValueError, "state must be contiguous in its last 3 dimensions, got"),
    (lambda: small(DELTA, dk=257), scan, NotImplementedError,
     "gated_delta_tree_scan with backend='triton' takes a dk up to 256, got 257"),
    (lambda: small(DELTA, dv=257), scan, NotImplementedError, "takes a dv up to 256, got 257"),
    (lambda: small(DELTA, 129), scan, NotImplementedError, "takes trees of nodes up to 128, got 129"),
    (lambda: small(DELTA, dtype=torch.float64), scan, TypeError, f"{SAME} q float64"),
    (lambda: strided(DELTA, "k", 2, 3), scan, ValueError, "k must be contiguous in its last 2 dimensions, got"),
    (lambda: small(SELECTIVE, dstate=257), scan, NotImplementedError, "selective_tree_scan .* a dstate up to 256"),
    (lambda: small(SELECTIVE, 129), scan, NotImplementedError, "takes trees of nodes up to 128, got 129"),
    (lambda: small(SELECTIVE), commit_129, NotImplementedError, "selective_commit .* takes a path of nodes up to 128"),
    (lambda: small(DIAGONAL, dtype=torch.float64), scan, TypeError, f"diagonal_tree_scan .* {SAME} x float64"),
    (lambda: strided(SELECTIVE, "state", 1, 2), scan, ValueError, "state must be contiguous in its last 2 dimensions"),
    (lambda: small(CONV, dtype=torch.float64), scan, TypeError, f"tree_conv1d .* {SAME} x float64"),
    (lambda: strided(CONV, "x", 1, 2), scan, ValueError, "x must be contiguous in its last dimension, got strides"),
    (lambda: small(ATTENTION, 129), scan, NotImplementedError, "tree_attention .* trees of nodes up to 128, got 129"),
    (lambda: small(ATTENTION, dim=577), scan, NotImplementedError, "takes a head size of k up to 576, got 577"),
    (lambda: small(ATTENTION, value_dim=513), scan, NotImplementedError, "takes a head size of v up to 512, got 513"),
    (lambda: small(ATTENTION).changed(q=small(ATTENTION).given["q"].bfloat16()), scan, TypeError,
     f"{SAME} q bfloat16, k_cache float32"),
    (lambda: strided(ATTENTION, "v_cache", 2, 3), scan, ValueError, "v_cache must be contiguous in its last dimension"),
    (lambda: strided(ATTENTION, "q", 2, 3), scan, ValueError, "q must be contiguous in its last dimension"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "call", "kind", "message"), REFUSED, ids=[row[3][:50] for row in REFUSED])
def test_what_the_kernels_cannot_take_is_refused_with_its_limits(
    make: Callable[[], Problem], call: Callable[[Problem], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call(make())


@every_family
def test_without_a_gpu_or_the_interpreter_triton_is_refused(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    problem = small(family)
    if DEVICE == "cpu":
        with pytest.raises(RuntimeError, match="with backend='triton' needs CUDA tensors, got a tensor on cpu"):
            scan(problem)
