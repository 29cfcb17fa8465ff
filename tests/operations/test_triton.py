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
from helpers.operation_families import ATTENTION, CONV, DELTA, DIAGONAL, FAMILIES, FEW, KDA, SELECTIVE, SSD
from helpers.operation_problem import (
    CLOSE,
    DEVICE,
    TOLERANCE,
    Family,
    Problem,
    assert_scanned,
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
from stree.kernels.tiles import DiagonalTile

ROOM = 20
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)


# Steps: commit, stash, scan.


@pytest.mark.parametrize(
    ("family", "dtype", "first", "committed"),
    [
        pytest.param(
            family,
            dtype,
            first,
            committed,
            id=f"{family.name}-{str(dtype)[6:]}-first{first}-{committed}",
            marks=[pytest.mark.slow] * (dtype == torch.float16),
        )  # fmt: skip
        for family in FAMILIES
        for dtype, first, committed in (
            (torch.float32, 5, "from another stash" if family.alternates else "from its stash"),
            (torch.bfloat16, 0, "from its stash"),
            (torch.float16, 0, "nothing"),
        )
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
