"""stree.kernels.attention.kernel against float64 loops over paths (tests/helpers/oracles.py), interpreted on the CPU.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_attention.py
"""

# Options travel as dictionaries, which a type checker cannot count against a signature.
# mypy: disable-error-code="arg-type, call-arg, misc"

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace

import pytest
import torch
from helpers import oracles
from helpers.host_reads import NoHostReads
from helpers.launch_keys import Key, launch_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stree.kernels import ops
from stree.kernels.attention import kernel as attention
from stree.kernels.attention.kernel import split_context
from stree.kernels.precision import float32_tolerance
from stree.kernels.tiles import interpreted
from stree.kernels.topology import AcceptedPath, Topology

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("poisoned_empty")

# Largest error as a share of the largest value of the oracle, which sees the same rounded inputs.
TOLERANCE = {
    torch.float32: float32_tolerance(800),  # 300 keys after heads of at most 256; interpreted: 6e-8 rounding
    torch.bfloat16: 2e-2,  # weights and outputs have 8 bits
    torch.float16: 2e-3,  # weights and outputs have 11 bits
}
ROOM = 45


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value; NaN counts as infinite."""
    difference = (actual.double().cpu() - expected).abs().max() / expected.abs().max()
    return float(difference.nan_to_num(torch.inf))


@dataclass(frozen=True)
class Problem:
    """A cache, whose rows beyond the lengths are NaN, and the rows of a tree; `options` are those of the operation."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor
    k: Tensor
    v: Tensor
    parents: Tensor
    options: dict[str, float | None]

    @classmethod
    def draw(
        cls, parents: Tensor, lengths: list[int], *, capacity: int = 150, kv_heads: int = 2, shared: int = 2,
        dim: int = 8, value_dim: int | None = None, dtype: torch.dtype = torch.float32, seed: int = 0,
        window: int | None = None, softcap: float | None = None,
    ) -> Problem:  # fmt: skip
        rng = torch.Generator().manual_seed(seed)
        batch, n = parents.shape
        value_dim = dim if value_dim is None else value_dim

        def rows(*shape: int) -> Tensor:
            return torch.randn(batch, *shape, generator=rng).to(DEVICE, dtype)

        problem = cls(
            rows(n, kv_heads * shared, dim), rows(kv_heads, capacity, dim), rows(kv_heads, capacity, value_dim),
            torch.tensor(lengths, dtype=torch.int32, device=DEVICE), rows(n, kv_heads, dim),
            rows(n, kv_heads, value_dim), parents.to(DEVICE),
            {"scale": 1.7 * dim**-0.5, "window": window, "softcap": softcap},
        )  # fmt: skip
        for row, length in enumerate(lengths):
            for cache in (problem.k_cache, problem.v_cache):
                cache[row, :, length:] = torch.nan
        return problem

    def oracle(self) -> Tensor:
        return torch.stack([
            oracles.attention(
                self.q[row].cpu(), self.k_cache[row, :, :length].cpu(), self.v_cache[row, :, :length].cpu(),
                self.k[row].cpu(), self.v[row].cpu(), self.parents[row].tolist(), **self.options,
            )
            for row, length in enumerate(self.lengths.tolist())
        ])  # fmt: skip

    def attend(self, first: int = 0) -> Tensor:
        return ops.tree_attention(
            self.q[:, first:], self.k_cache, self.v_cache, self.lengths, self.k, self.v, self.parents,
            first=first, backend="triton", **self.options,
        )  # fmt: skip

    def stash(self) -> tuple[Tensor, Tensor]:
        batch, _, heads, dim = self.k.shape
        shape = (batch, ROOM, heads)
        return self.k.new_full((*shape, dim), torch.nan), self.v.new_full((*shape, self.v.shape[3]), torch.nan)

    def step(self, stash: tuple[Tensor, Tensor], path: Tensor | None, counts: Tensor | None, first: int = 0) -> Tensor:
        """Take a step; `lengths` count the path already."""
        topology = Topology.of(self.parents)
        with NoHostReads():
            return ops.attention_step(
                self.k_cache, self.v_cache, self.lengths, *stash, path, counts,
                self.q[:, first:], self.k[:, first:], self.v[:, first:], topology,
                first=first, backend="triton", **self.options,
            )  # fmt: skip


def draw_parents(n: int, batch: int = 1, seed: int = 0, padding: int = 0) -> Tensor:
    return oracles.random_parents(batch, n, torch.Generator().manual_seed(seed), padding)


def paths_to(parents: Tensor, ends: tuple[int | None, ...]) -> tuple[Tensor, Tensor]:
    path, lengths = oracles.paths_to(parents.cpu(), ends)
    return path.to(DEVICE), lengths.to(DEVICE)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"window": 5}),
        (torch.float32, {"softcap": 2.0}),
        (torch.bfloat16, {"window": 70, "softcap": 30.0}),
        (torch.float16, {"window": 70, "softcap": 30.0}),
    ],
    ids=str,
)
def test_chains_stars_and_padded_trees_over_ragged_contexts_equal_the_loops(
    dtype: torch.dtype, options: dict[str, float]
) -> None:
    chain, star = torch.arange(-1, 8).int(), -(torch.arange(9) == 0).int()
    parents = torch.cat((chain[None], star[None], draw_parents(9, padding=2)))
    problem = Problem.draw(parents, [0, 150, 77], dtype=dtype, **options)
    out = problem.attend()
    assert out.dtype == dtype and out.is_contiguous() and error(out, problem.oracle()) < TOLERANCE[dtype]


@given(
    st.integers(0, 10**6), st.integers(1, 40), st.sampled_from([1, 2, 4, 7]), st.sampled_from([0, 1, 63, 129, 300]),
    st.one_of(st.none(), st.integers(1, 90)),
)  # fmt: skip
@settings(max_examples=5, deadline=None)
def test_drawn_trees_equal_the_loops(seed: int, n: int, shared: int, length: int, window: int | None) -> None:
    capacity = length + seed % 50
    problem = Problem.draw(
        draw_parents(n, seed=seed), [length], capacity=capacity, kv_heads=1, shared=shared, dim=5, seed=seed,
        window=window,
    )  # fmt: skip
    first = seed % n
    assert error(problem.attend(first), problem.oracle()[:, first:]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [
        ((64, 64), torch.bfloat16), ((80, 96), torch.float32), ((192, 128), torch.float32),
        ((192, 128), torch.bfloat16), ((256, 256), torch.float32), ((300, 260), torch.float32),
    ],
    ids=str,
)  # fmt: skip
def test_head_sizes_of_models_are_padded(dims: tuple[int, int], dtype: torch.dtype) -> None:
    problem = Problem.draw(
        draw_parents(5), [70], capacity=75, kv_heads=1, shared=3, dim=dims[0], value_dim=dims[1], dtype=dtype
    )
    assert error(problem.attend(), problem.oracle()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_latents_are_read_once_as_keys_and_values(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    problem = Problem.draw(draw_parents(7), [40], capacity=48, kv_heads=1, shared=5, dim=576, value_dim=8, dtype=dtype)
    latents = replace(problem, v_cache=problem.k_cache[..., :512], v=problem.k[..., :512].clone())
    stash = (kept := latents.stash()[0]), kept[..., :512]
    with launch_keys(monkeypatch) as keys:
        out = latents.step(stash, None, None)
    assert "'SHARES': True" in keys[0][1] and error(out, latents.oracle()) < TOLERANCE[dtype]
    assert torch.equal(stash[0][:, :7], latents.k)
    apart = replace(latents, v_cache=latents.v_cache.clone())
    with launch_keys(monkeypatch) as keys:
        assert (
            error(apart.step(latents.stash(), None, None, 3), apart.oracle()[:, 3:]) == torch.inf
        )  # 3 are not stashed
        assert error(apart.step(apart.stash(), None, None), apart.oracle()) < TOLERANCE[dtype]
    assert all("'SHARES': False" in key for _, key in keys)


def test_small_scores_keep_their_digits_under_a_large_softcap() -> None:
    problem = Problem.draw(draw_parents(9), [100], softcap=1000.0)
    problem = replace(problem, q=problem.q / 20)
    tolerance = 1e-6 if interpreted() else float32_tolerance(64)
    assert error(problem.attend(), problem.oracle()) < tolerance  # tanh by 1 - e^-2x alone is 4e-5 off


def test_what_a_node_may_not_see_does_not_leak_even_if_it_is_no_number() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 5, -1, -1]], dtype=torch.int32)
    problem = Problem.draw(parents, [66])
    clean = problem.oracle()
    for node, seen in ((2, [0, 1, 3, 4]), (7, [0, 1, 2, 3, 4, 5, 6])):
        for garbage in (torch.nan, torch.inf, 1e30):
            k, v = problem.k.clone(), problem.v.clone()
            k[:, node], v[:, node] = garbage, garbage
            out = replace(problem, k=k, v=v).attend()
            assert error(out[:, seen], clean[:, seen]) < TOLERANCE[torch.float32]
    k = problem.k.clone()
    k[:, 2] = torch.nan
    assert bool(replace(problem, k=k).attend()[:, [2, 5, 6]].isnan().all()), "a broken ancestor must be seen"


def test_rows_may_have_any_strides_over_batch_heads_and_nodes() -> None:
    problem = Problem.draw(draw_parents(7, batch=2), [64, 9], capacity=70)
    out, wide = problem.attend(), torch.cat((problem.k, problem.v), 3)  # one projection
    k_cache, v_cache = (
        cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (problem.k_cache, problem.v_cache)
    )
    q = problem.q.transpose(1, 2).contiguous().transpose(1, 2)
    strided = replace(problem, q=q, k_cache=k_cache, v_cache=v_cache, k=wide[..., :8], v=wide[..., 8:])
    assert torch.equal(strided.attend(), out)
    longer = [torch.nn.functional.pad(cache, (0, 0, 0, 40), value=torch.nan) for cache in (k_cache, v_cache)]
    narrowed = replace(problem, k_cache=longer[0][:, :, :70], v_cache=longer[1][:, :, :70])
    assert torch.equal(narrowed.attend(), out)


def test_rows_may_stand_farther_apart_than_32_bits_count() -> None:
    stride, rows = 2**30 + 64, 3  # the third row begins past 2^31
    size = 2 * stride + 64
    if DEVICE == "cpu":  # memory that is promised, and given where it is touched
        no_reserve = 0x4000  # Linux's MAP_NORESERVE, which Python names from 3.13 on
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
        memory = torch.frombuffer(mmap.mmap(-1, 2 * size, flags=flags), dtype=torch.float16)
    else:
        memory = torch.zeros(size, dtype=torch.float16, device=DEVICE)
    problem = Problem.draw(
        torch.tensor([[-1, 0, 0]], dtype=torch.int32), [3], capacity=3, kv_heads=1, shared=1, dtype=torch.float16
    )
    near, far = [], []
    for place, tensor in enumerate(
        (problem.q, problem.k_cache, problem.v_cache, problem.k, problem.v, *problem.stash())
    ):
        tensor = tensor[:, :rows].clone()
        apart = [8, 8, stride, 1] if tensor.shape[2] == rows else [8, stride, 8, 1]
        near.append(tensor)
        far.append(memory.as_strided(tensor.shape, apart, 8 * place).copy_(tensor))
    q, k_cache, v_cache, k, v, *stash = far
    distant = replace(problem, q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    assert torch.equal(distant.attend(), problem.attend())
    for first in (0, 2):  # the third node with the first two from the stash
        out = distant.step((stash[0], stash[1]), None, None, first)
        assert torch.equal(out, problem.step((near[5], near[6]), None, None, first))
    path, path_lengths = paths_to(problem.parents, (2,))
    for one in (problem, distant):
        rows_of = (one.k_cache, one.v_cache, torch.ones_like(one.lengths), one.k * 2, one.v * 2)
        ops.kv_commit(*rows_of, path, path_lengths, backend="triton")
    assert torch.equal(k_cache, problem.k_cache) and torch.equal(v_cache, problem.v_cache)
    assert torch.equal(k_cache[0, 0, 2], problem.k[0, 2, 0] * 2)


def keys_of(monkeypatch: pytest.MonkeyPatch, n: int, first: int, context: int, entries: int) -> list[Key]:
    problem = Problem.draw(draw_parents(n), [context - 5], capacity=context, shared=1, dim=16)
    path = torch.zeros(1, entries, dtype=torch.int32, device=DEVICE)
    with launch_keys(monkeypatch) as keys:
        problem.step(problem.stash(), path, torch.ones(1, dtype=torch.int32, device=DEVICE), first)
    return keys


def test_no_tree_path_or_context_of_a_generation_asks_for_a_build_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = keys_of(monkeypatch, 7, 0, 40, 3), keys_of(monkeypatch, 7, 2, 150, 3)
    assert [name for name, _ in short] == ["kv_commit_kernel", "attention_kernel"]
    assert [name for name, _ in long] == ["kv_commit_kernel", "attention_kernel", "merge_kernel"]
    for n, context, entries in ((1, 16, 1), (16, 64, 16), (2, 33, 2)):
        assert keys_of(monkeypatch, n, 0, context, entries) == short
    for n, first, context, entries in ((2, 1, 128, 1), (16, 15, 160, 16), (16, 1, 450, 5)):
        assert keys_of(monkeypatch, n, first, context, entries) == long
    kernel = attention.attention_kernel
    monkeypatch.setitem(getattr(kernel, "kwargs" if hasattr(kernel, "kwargs") else "__dict__"), "do_not_specialize", [])
    assert keys_of(monkeypatch, 16, 0, 64, 16) != short, "without the list the key must change"


def test_steps_append_each_path_and_attend_from_the_next_tree() -> None:
    dtype = torch.bfloat16
    problem = Problem.draw(draw_parents(9, batch=3), [0, 60, 90], capacity=100, dtype=dtype, value_dim=12)
    stash = problem.stash()
    assert error(problem.step(stash, None, None), problem.oracle()) < TOLERANCE[dtype]
    assert torch.equal(stash[0][:, :9], problem.k) and bool(stash[0][:, 9:].isnan().all())
    for seed, n, ends in ((1, 4, (8, 0, None)), (2, 13, (3, None, 2))):
        path, path_lengths = paths_to(problem.parents, ends)
        expected = [problem.k_cache.clone(), problem.v_cache.clone()]
        for row, (length, end) in enumerate(zip(problem.lengths.tolist(), ends, strict=True)):
            taken = [] if end is None else oracles.path_to(problem.parents[row].tolist(), end)
            for cache, nodes in zip(expected, (problem.k, problem.v), strict=True):
                cache[row, :, length : length + len(taken)] = nodes[row, taken].transpose(0, 1)
        fresh = Problem.draw(draw_parents(n, 3, seed), [0] * 3, capacity=100, dtype=dtype, value_dim=12, seed=seed)
        problem = replace(
            fresh, k_cache=problem.k_cache, v_cache=problem.v_cache, lengths=problem.lengths + path_lengths
        )
        out = problem.step(stash, path, path_lengths)
        assert torch.equal(problem.k_cache.nan_to_num(9), expected[0].nan_to_num(9))
        assert torch.equal(problem.v_cache.nan_to_num(9), expected[1].nan_to_num(9))
        assert error(out, problem.oracle()) < TOLERANCE[dtype]
        assert torch.equal(stash[0][:, :n], problem.k) and torch.equal(stash[1][:, :n], problem.v)


def test_a_growing_tree_reads_its_older_rows_from_the_stash() -> None:
    problem = Problem.draw(draw_parents(21, batch=2), [5, 70], capacity=75, window=60)
    expected, stash = problem.oracle(), problem.stash()
    for first, n in ((0, 1), (1, 8), (8, 21)):
        part = replace(
            problem, q=problem.q[:, :n], k=problem.k[:, :n], v=problem.v[:, :n], parents=problem.parents[:, :n]
        )
        assert error(part.step(stash, None, None, first), expected[:, first:n]) < TOLERANCE[torch.float32]
    assert torch.equal(stash[1][:, :21], problem.v) and bool(stash[1][:, 21:].isnan().all())


def test_commit_appends_the_rows_of_the_path_and_nothing_else() -> None:
    problem = Problem.draw(draw_parents(20, batch=4, seed=3), [0, 30, 38, 17], capacity=40, value_dim=6)
    ends = (19, 18, 15, None)
    path, path_lengths = paths_to(problem.parents, ends)
    nodes = [tensor.clone() for tensor in (problem.k, problem.v)]
    caches = [problem.k_cache.clone(), problem.v_cache.clone()]
    for row, (length, end) in enumerate(zip(problem.lengths.tolist(), ends, strict=True)):
        taken = [] if end is None else oracles.path_to(problem.parents[row].tolist(), end)
        for rows, cache in zip(nodes, caches, strict=True):
            for entry, node in enumerate(taken[: 40 - length]):  # nothing is written past the end of a cache
                cache[row, :, length + entry] = rows[row, node]
            rows[row, [node for node in range(20) if node not in taken]] = torch.nan
    own = [problem.k_cache, problem.v_cache]
    ops.kv_commit(*own, problem.lengths, *nodes, path, path_lengths, backend="triton")
    for mine, expected in zip(own, caches, strict=True):
        assert torch.equal(mine.nan_to_num(9), expected.nan_to_num(9))


def test_one_commit_serves_all_layers() -> None:
    layers = [Problem.draw(draw_parents(9, batch=2), [4, 11], capacity=20, seed=seed) for seed in range(3)]
    path, path_lengths = paths_to(layers[0].parents, (8, 5))
    keys, values, k, v = (
        torch.cat([getattr(layer, name) for layer in layers]) for name in ("k_cache", "v_cache", "k", "v")
    )
    caches = [keys, values]
    before = [tensor.clone() for tensor in caches]
    ops.kv_commit(*caches, layers[0].lengths, k, v, path, path_lengths, backend="triton")
    repeated = layers[0].lengths.repeat(3), k, v, path.repeat(3, 1), path_lengths.repeat(3)
    accepted = layers[0].lengths, k, v, AcceptedPath.of(path, path_lengths), None
    for backend in ("reference", "triton"):
        for operands in (repeated, accepted):
            others = [tensor.clone() for tensor in before]
            ops.kv_commit(*others, *operands, backend=backend)
            for one, other in zip(others, caches, strict=True):
                assert torch.equal(one.nan_to_num(9), other.nan_to_num(9))
    with pytest.raises(ValueError, match="needs that b divides r, got b = 4 of lengths .* and r = 6 of k_cache"):
        ops.kv_commit(*caches, layers[0].lengths.repeat(2), k, v, path, path_lengths)
    for i, layer in enumerate(layers):
        ops.kv_commit(
            layer.k_cache, layer.v_cache, layer.lengths, layer.k, layer.v, path, path_lengths, backend="triton"
        )
        assert torch.equal(keys[2 * i : 2 * i + 2].nan_to_num(9), layer.k_cache.nan_to_num(9))
        assert torch.equal(values[2 * i : 2 * i + 2].nan_to_num(9), layer.v_cache.nan_to_num(9))


@given(st.integers(0, 300_000), st.integers(1, 600), st.sampled_from([16, 32, 64]))
def test_the_parts_of_a_cache_cover_it_and_none_is_without_rows(capacity: int, decode_steps: int, keys: int) -> None:
    parts, chunk = split_context(capacity, decode_steps, keys)
    assert chunk % keys == 0 and parts * chunk >= capacity and (parts - 1) * chunk < max(capacity, 1)
    assert parts == 1 or parts * decode_steps <= 132
