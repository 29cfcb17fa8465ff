"""The Triton version of attention: parts of a context, head sizes, strides, what must not leak, and its builds.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_attention.py
"""

# Options travel as dictionaries, which a type checker cannot count against a signature.
# mypy: disable-error-code="arg-type, call-arg, misc"

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.launch_keys import launch_keys
from helpers.on_device import NoHostReads, untouched_memory
from helpers.operation_families import ATTENTION
from helpers.operation_problem import DEVICE, Problem, Tensors, error, mixed_parents, off_path, paths_to, random_parents
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stree.kernels import ops
from stree.kernels.attention.kernel import split_context
from stree.kernels.precision import float32_tolerance
from stree.kernels.tiles import interpreted
from stree.kernels.topology import AcceptedPath, Topology

# Largest error as a share of the largest value of the oracle, which sees the same rounded inputs.
TOLERANCE = {
    torch.float32: float32_tolerance(800),  # 300 keys after heads of at most 256; interpreted: 6e-8 rounding
    torch.bfloat16: 2e-2,  # weights and outputs have 8 bits
    torch.float16: 2e-3,  # weights and outputs have 11 bits
}
ROOM = 45
CACHES = ("k_cache", "v_cache")


def draw(
    parents: Tensor, lengths: tuple[int, ...], *, capacity: int = 150, shared: int = 2, dim: int = 8,
    value_dim: int | None = None, dtype: torch.dtype = torch.float32, seed: int = 0, kv_heads: int = 2, **options: Any,
) -> Problem:  # fmt: skip
    """Draw a problem whose caches are NaN beyond the lengths."""
    problem = Problem.draw(
        ATTENTION, parents, seed, dtype, {"scale": 1.7 * dim**-0.5, "window": None, "softcap": None, **options},
        kv_heads=kv_heads, shared=shared, dim=dim, value_dim=dim if value_dim is None else value_dim,
        capacity=capacity, lengths=lengths,
    )  # fmt: skip
    for row, length in enumerate(lengths):
        for name in CACHES:
            problem.given[name][row, :, length:] = torch.nan
    return problem


def attend(problem: Problem, first: int = 0) -> Tensor:
    return problem.scan(first=first, backend="triton")


def step(problem: Problem, stash: Tensors, first: int = 0, path: Any = None, counts: Any = None) -> Tensor:
    topology = Topology.of(problem.parents)
    with NoHostReads():
        return problem.step(stash, path, counts, first, "triton", topology=topology)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"window": 70, "softcap": 30.0}),
        pytest.param(torch.float32, {"window": 5, "softcap": 2.0}, marks=pytest.mark.slow),
        pytest.param(torch.float16, {"window": 70, "softcap": 30.0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_chains_stars_and_padded_trees_over_ragged_contexts_equal_the_loops(
    dtype: torch.dtype, options: dict[str, float]
) -> None:
    problem = draw(mixed_parents(9, padding=2), (0, 150, 77), dtype=dtype, **options)
    out = attend(problem)
    assert out.dtype == dtype and out.is_contiguous() and error(out, problem.outputs()) < TOLERANCE[dtype]


@pytest.mark.slow
@given(
    st.integers(0, 10**6), st.integers(1, 40), st.sampled_from([1, 2, 4, 7]), st.sampled_from([0, 1, 63, 129, 300]),
    st.one_of(st.none(), st.integers(1, 90)),
)  # fmt: skip
@settings(max_examples=5, deadline=None)
def test_drawn_trees_equal_the_loops(seed: int, n: int, shared: int, length: int, window: int | None) -> None:
    parents, capacity, first = random_parents(n, 1, seed), length + seed % 50, seed % n
    problem = draw(parents, (length,), capacity=capacity, kv_heads=1, shared=shared, dim=5, seed=seed, window=window)
    assert error(attend(problem, first), problem.outputs()[:, first:]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [
        ((64, 64), torch.bfloat16), ((80, 96), torch.float32), ((192, 128), torch.float32),
        ((192, 128), torch.bfloat16), ((256, 256), torch.float32), ((300, 260), torch.float32),
    ],
    ids=str,
)  # fmt: skip
def test_head_sizes_of_models_are_padded(dims: tuple[int, int], dtype: torch.dtype) -> None:
    sizes: Any = {"kv_heads": 1, "shared": 3, "dim": dims[0], "value_dim": dims[1]}
    problem = draw(random_parents(5, 1), (70,), capacity=75, dtype=dtype, **sizes)
    assert error(attend(problem), problem.outputs()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_latents_are_read_once_as_keys_and_values(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    problem = draw(random_parents(7, 1), (40,), capacity=48, kv_heads=1, shared=5, dim=576, value_dim=8, dtype=dtype)
    latents = problem.changed(v_cache=problem.given["k_cache"][..., :512], v=problem.given["k"][..., :512].clone())
    kept = latents.stash(ROOM)["stash_k"]
    with launch_keys(monkeypatch) as keys:
        out = step(latents, {"stash_k": kept, "stash_v": kept[..., :512]})
    assert "'SHARES': True" in keys[0][1] and error(out, latents.outputs()) < TOLERANCE[dtype]
    assert torch.equal(kept[:, :7], latents.given["k"])
    apart = latents.changed(v_cache=latents.given["v_cache"].clone())
    with launch_keys(monkeypatch) as keys:
        missing = step(apart, latents.stash(ROOM), 3)  # the first three rows are not stashed
        assert error(missing, apart.outputs()[:, 3:]) == torch.inf
        assert error(step(apart, apart.stash(ROOM)), apart.outputs()) < TOLERANCE[dtype]
    assert all("'SHARES': False" in key for _, key in keys)


def test_small_scores_keep_their_digits_under_a_large_softcap() -> None:
    problem = draw(random_parents(9, 1), (100,), softcap=1000.0)
    problem = problem.changed(q=problem.given["q"] / 20)
    tolerance = 1e-6 if interpreted() else float32_tolerance(64)
    assert error(attend(problem), problem.outputs()) < tolerance  # tanh by 1 - e^-2x alone is 4e-5 off


@pytest.mark.slow
def test_what_a_node_may_not_see_does_not_leak_even_if_it_is_no_number() -> None:
    problem = draw(torch.tensor([[-1, 0, 0, 1, 1, 2, 5, -1, -1]], dtype=torch.int32), (66,))
    clean = problem.outputs()
    for node, seen in ((2, [0, 1, 3, 4]), (7, [0, 1, 2, 3, 4, 5, 6])):
        for garbage in (torch.nan, torch.inf, 1e30):
            k, v = problem.given["k"].clone(), problem.given["v"].clone()
            k[:, node], v[:, node] = garbage, garbage
            out = attend(problem.changed(k=k, v=v))
            assert error(out[:, seen], clean[:, seen]) < TOLERANCE[torch.float32]
    k = problem.given["k"].clone()
    k[:, 2] = torch.nan
    assert bool(attend(problem.changed(k=k))[:, [2, 5, 6]].isnan().all()), "a broken ancestor must be seen"


@pytest.mark.slow
def test_rows_may_have_any_strides_over_batch_heads_and_nodes() -> None:
    problem = draw(random_parents(7), (64, 9), capacity=70)
    out, wide = attend(problem), torch.cat((problem.given["k"], problem.given["v"]), 3)  # one projection
    q, k_cache, v_cache = (
        problem.given[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("q", *CACHES)
    )  # fmt: skip
    strided = problem.changed(q=q, k_cache=k_cache, v_cache=v_cache, k=wide[..., :8], v=wide[..., 8:])
    longer = [torch.nn.functional.pad(cache, (0, 0, 0, 40), value=torch.nan) for cache in (k_cache, v_cache)]
    narrowed = problem.changed(k_cache=longer[0][:, :, :70], v_cache=longer[1][:, :, :70])
    assert torch.equal(attend(strided), out) and torch.equal(attend(narrowed), out)


def test_rows_may_stand_farther_apart_than_32_bits_count() -> None:
    stride, rows = 2**30 + 64, 3  # the third row begins past 2^31
    memory = untouched_memory(2 * stride + 64, torch.float16, DEVICE)
    problem = draw(
        torch.tensor([[-1, 0, 0]], dtype=torch.int32), (3,), capacity=3, kv_heads=1, shared=1, dtype=torch.float16
    )
    near_stash, far = problem.stash(rows), dict[str, Tensor]()
    near = {name: problem.given[name] for name in (*CACHES, "q", "k", "v")} | near_stash
    for place, (name, tensor) in enumerate(near.items()):
        apart = [8, 8, stride, 1] if name in CACHES else [8, stride, 8, 1]
        far[name] = memory.as_strided(tensor.shape, apart, 8 * place).copy_(tensor)
    far_stash = {name: far.pop(name) for name in near_stash}
    distant = problem.changed(**far)
    for first in (0, 2):  # the third node with the first two from the stash
        assert torch.equal(step(distant, far_stash, first), step(problem, near_stash, first))
    cache = (distant.given[name] for name in CACHES)
    lengths, path = torch.ones_like(problem.given["lengths"]), paths_to(problem.parents, (2,))
    ops.kv_commit(*cache, lengths, far["k"], far["v"], *path, backend="triton")
    assert torch.equal(far["k_cache"][0, 0, 2], problem.given["k"][0, 2, 0])
    assert torch.equal(far["v_cache"][0, 0, 1], problem.given["v"][0, 0, 0])


def test_a_growing_tree_reads_its_older_rows_from_the_stash() -> None:
    problem = draw(random_parents(21), (5, 70), capacity=75, window=60)
    expected, stash = problem.outputs(), problem.stash(ROOM)
    for first, n in ((0, 1), (1, 8), (8, 21)):
        assert error(step(problem.cut(n), stash, first), expected[:, first:n]) < TOLERANCE[torch.float32]
    assert torch.equal(stash["stash_v"][:, :21], problem.given["v"]) and bool(stash["stash_v"][:, 21:].isnan().all())


def test_a_step_attends_to_the_path_that_it_appends() -> None:
    old = draw(random_parents(9, 3), (0, 60, 90), capacity=100, value_dim=12, dtype=torch.bfloat16)
    stash, (path, counts) = old.stash(ROOM, old.stashed()), paths_to(old.parents, (8, 0, None))
    new = draw(random_parents(13, 3, 1), (0, 60, 90), capacity=100, value_dim=12, dtype=torch.bfloat16, seed=1).like(
        old
    )
    caches = old.states_at((8, 0, None))[:2]
    out = step(new, stash, 0, path, counts)
    assert all(
        torch.equal(new.given[n].double().nan_to_num(9), c.nan_to_num(9)) for n, c in zip(CACHES, caches, strict=True)
    )
    assert error(out, new.outputs()) < TOLERANCE[torch.bfloat16]


def test_commit_appends_the_rows_of_the_path_and_nothing_else_also_at_the_end_of_a_cache() -> None:
    problem, ends = draw(random_parents(20, 4, 3), (0, 30, 38, 17), capacity=40, value_dim=6), (19, 18, 15, None)
    expected = problem.states_at(ends)
    off = off_path(problem.parents, ends, 20)[..., None, None]
    rows = {name: rows.masked_fill(off, torch.nan) for name, rows in problem.stashed().items()}
    problem.commit(*paths_to(problem.parents, ends), rows, "triton")
    for mine, other in zip(problem.states, expected, strict=True):
        assert torch.equal(mine.double().nan_to_num(9), other.nan_to_num(9))


def test_one_commit_serves_all_layers() -> None:
    layers = [draw(random_parents(9), (4, 11), capacity=20, seed=seed) for seed in range(3)]
    path, counts = paths_to(layers[0].parents, (8, 5))
    stacked = {name: torch.cat([layer.given[name] for layer in layers]) for name in (*CACHES, "k", "v")}
    for layer in layers:
        ops.kv_commit(
            *(layer.given[name] for name in (*CACHES, "lengths", "k", "v")), path, counts, backend="triton"
        )  # fmt: skip
    lengths, expected = layers[0].given["lengths"], [torch.cat([x.given[n] for x in layers]) for n in CACHES]
    for backend in ("reference", "triton"):
        for of, *committed in (
            (lengths, path, counts),
            (lengths, AcceptedPath.of(path, counts), None),
            (lengths.repeat(3), path.repeat(3, 1), counts.repeat(3)),
        ):
            caches = [stacked[name].clone() for name in CACHES]
            ops.kv_commit(*caches, of, stacked["k"], stacked["v"], *committed, backend=backend)
            for one, other in zip(caches, expected, strict=True):
                assert torch.equal(one.nan_to_num(9), other.nan_to_num(9))
    with pytest.raises(ValueError, match="needs that b divides r, got b = 4 of lengths .* and r = 6 of k_cache"):
        ops.kv_commit(*(stacked[n] for n in CACHES), lengths.repeat(2), stacked["k"], stacked["v"], path, counts)


@given(st.integers(0, 300_000), st.integers(1, 600), st.sampled_from([16, 32, 64]))
def test_the_parts_of_a_cache_cover_it_and_none_is_without_rows(capacity: int, programs: int, keys: int) -> None:
    parts, chunk = split_context(capacity, programs, keys)
    assert chunk % keys == 0 and parts * chunk >= capacity and (parts - 1) * chunk < max(capacity, 1)
    assert parts == 1 or parts * programs <= 132


@pytest.mark.parametrize(("room", "rows"), [pytest.param(232448, 128, marks=pytest.mark.slow), (101376, 32)])
def test_tiles_fit_the_shared_memory_of_the_gpu(room: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stree.kernels.attention.kernel.shared_memory", lambda _: room)
    problem = draw(random_parents(33, 1), (300,), kv_heads=1, shared=4, dim=256, dtype=torch.bfloat16)
    with launch_keys(monkeypatch) as keys:
        assert error(attend(problem), problem.outputs()) < TOLERANCE[torch.bfloat16]
    assert f"'BLOCK_M': {rows}," in keys[0][1]


def test_a_gpu_with_too_little_shared_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stree.kernels.dispatch.shared_memory", lambda _: 65536)
    with pytest.raises(RuntimeError, match=r"compute capability 8\.0 or later, with 101376 bytes .* has 65536"):
        attend(draw(random_parents(5, 1), (70,)))
