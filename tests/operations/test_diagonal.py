"""stree.kernels.diagonal.kernel against a float64 recursion over nodes (helpers.oracles), interpreted on the CPU.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_diagonal.py
"""

# Inputs travel as tuples of any length, which a type checker cannot count against a signature.
# mypy: disable-error-code="call-arg, arg-type, misc"

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import oracles
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stree.kernels import ops
from stree.kernels.precision import float32_tolerance
from stree.kernels.tiles import DiagonalTile
from stree.kernels.topology import Topology

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("poisoned_empty")

# Largest error as a share of the largest value of the oracle, which sees the same rounded inputs.
TOLERANCE = {
    torch.float32: float32_tolerance(200),  # 6e-8 rounding, some hundred steps
    torch.bfloat16: 2e-2,  # the output has 8 bits, and the interpreter rounds them towards zero
    torch.float16: 2e-3,  # the output has 11 bits
}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
ROOM = 20


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value; NaN counts as infinite."""
    difference = (actual.double().cpu() - expected).abs().max() / expected.abs().max()
    return float(difference.nan_to_num(torch.inf))


def draw_parents(seed: int, n: int, padding: int = 0) -> Tensor:
    """Draw a chain, a star and a random tree with padding at its end."""
    chain, star = torch.arange(-1, n - 1), -(torch.arange(n) == 0).int()
    drawn = oracles.random_parents(1, n, torch.Generator().manual_seed(seed), padding)
    return torch.cat((torch.stack((chain, star)).int(), drawn)).to(DEVICE)


def on_device(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(DEVICE) for t in tensors)


@dataclass(frozen=True)
class Selective:
    """Operands of a step of Mamba-1; dt as projected."""

    state: Tensor
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    bias: Tensor
    D: Tensor
    parents: Tensor

    @classmethod
    def draw(cls, parents: Tensor, channels: int = 37, dstate: int = 6, seed: int = 0) -> Selective:
        rng = torch.Generator().manual_seed(seed)
        batch, n = parents.shape
        state, x = torch.randn(batch, channels, dstate, generator=rng), torch.randn(batch, n, channels, generator=rng)
        dt, A = torch.randn(batch, n, channels, generator=rng), -3 * torch.rand(channels, dstate, generator=rng)
        B, C = torch.randn(batch, n, dstate, generator=rng), torch.randn(batch, n, dstate, generator=rng)
        bias, D = torch.randn(channels, generator=rng) - 2, torch.randn(channels, generator=rng)
        return cls(*(t.to(DEVICE) for t in (state, x, dt, A, B, C, bias, D, parents)))

    def to(self, dtype: torch.dtype) -> Selective:
        return replace(self, x=self.x.to(dtype), dt=self.dt.to(dtype), B=self.B.to(dtype), C=self.C.to(dtype))

    def sizes(self) -> Tensor:
        """Step sizes after bias and softplus, as float32."""
        return torch.nn.functional.softplus(self.dt.double() + self.bias.double()).float()

    def oracle(self, row: int, dt: Tensor | None = None, state: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        x, dt, B, C = (t[row].cpu() for t in (self.x, self.sizes() if dt is None else dt, self.B, self.C))
        state = self.state[row] if state is None else state
        parents = self.parents[row].tolist()
        return oracles.selective(x, dt, self.A.cpu(), B, C, parents, state.cpu(), self.D.cpu())

    def outputs(self, dt: Tensor | None = None, states: Tensor | None = None) -> Tensor:
        rows = range(len(self.parents))
        return torch.stack([self.oracle(row, dt, None if states is None else states[row])[0] for row in rows])

    def scan(self, dt: Tensor, first: int = 0) -> Tensor:
        return ops.selective_tree_scan(
            self.x, dt, self.A, self.B, self.C, self.parents, self.state, D=self.D, first=first, backend="triton"
        )

    def stash(self, fill: float = torch.nan) -> tuple[Tensor, ...]:
        batch, _, channels = self.x.shape
        x = torch.full((batch, ROOM, channels), fill, dtype=self.x.dtype, device=DEVICE)
        B = torch.full((batch, ROOM, self.B.shape[2]), fill, dtype=self.x.dtype, device=DEVICE)
        return x, torch.full((batch, ROOM, channels), fill, device=DEVICE), B

    def step(self, state: Tensor, stash: Any, path: Any, lengths: Any, first: int = 0, **options: Any) -> Tensor:
        new = (self.x[:, first:], self.dt[:, first:], self.A, self.B[:, first:], self.C[:, first:], self.bias)
        return ops.selective_step(
            state, *stash, path, lengths, *new, self.parents, D=self.D, first=first, backend="triton", **options
        )


@dataclass(frozen=True)
class Diagonal:
    """Operands of a step of RG-LRU."""

    state: Tensor
    log_a: Tensor
    x: Tensor
    parents: Tensor

    @classmethod
    def draw(cls, parents: Tensor, channels: int = 37, seed: int = 0) -> Diagonal:
        rng = torch.Generator().manual_seed(seed)
        state, shape = torch.randn(len(parents), channels, generator=rng), (*parents.shape, channels)
        log_a, x = -2 * torch.rand(shape, generator=rng), torch.randn(shape, generator=rng)
        return cls(*(t.to(DEVICE) for t in (state, log_a, x, parents)))

    def oracle(self, states: Tensor | None = None) -> Tensor:
        """Return the state after every node of every tree."""
        states = self.state if states is None else states
        rows = zip(self.log_a.cpu(), self.x.cpu(), self.parents.tolist(), states.cpu(), strict=True)
        return torch.stack([torch.stack(oracles.diagonal(*row)) for row in rows])


def committed(states: list[Tensor], before: Tensor, end: int | None) -> Tensor:
    return before.double().cpu() if end is None else states[end]


# Mamba-1.


@DTYPES
def test_selective_scan_of_chains_stars_and_padded_trees_equals_the_recursion(dtype: torch.dtype) -> None:
    problem = Selective.draw(draw_parents(1, 13, padding=3)).to(dtype)
    dt = problem.sizes()
    y = problem.scan(dt)
    assert y.dtype == dtype and y.is_contiguous()
    assert error(y, problem.outputs(dt)) < TOLERANCE[dtype]


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 3))
@settings(max_examples=10, deadline=None)
def test_selective_scan_of_drawn_trees_equals_the_recursion(seed: int, n: int, padding: int) -> None:
    parents = oracles.random_parents(2, n, torch.Generator().manual_seed(seed), min(padding, n - 1))
    problem = Selective.draw(parents, channels=7, dstate=5, seed=seed)
    dt, first = problem.sizes(), seed % n
    assert error(problem.scan(dt, first), problem.outputs(dt)[:, first:]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("n", "channels", "dstate"), [(1, 3, 1), (100, 5, 64), (128, 5, 16), (9, 3, 200)], ids=str)
def test_selective_scan_of_other_sizes_equals_the_recursion(n: int, channels: int, dstate: int) -> None:
    parents = oracles.random_parents(1, n, torch.Generator().manual_seed(3))
    problem = Selective.draw(parents, channels, dstate)
    dt = problem.sizes()
    assert error(problem.scan(dt), problem.outputs(dt)) < TOLERANCE[torch.float32]


def test_tiles_for_many_sequences_score_as_those_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Selective.draw(draw_parents(8, 12, padding=1), channels=37, dstate=16)
    dt, choose = problem.sizes(), DiagonalTile.of
    few = problem.scan(dt)
    monkeypatch.setattr(DiagonalTile, "of", lambda n, dstate, channels: choose(n, dstate, 10**6))
    assert choose(12, 16, 111).channels == 8 and DiagonalTile.of(12, 16, 111).channels == 16
    assert error(problem.scan(dt), problem.outputs(dt)) < TOLERANCE[torch.float32]
    assert error(few, problem.outputs(dt)) < TOLERANCE[torch.float32]


def test_a_full_binary_tree_of_127_nodes_equals_the_recursion() -> None:
    parents = torch.tensor([[(i - 1) // 2 if i else -1 for i in range(127)]], dtype=torch.int32)
    problem = Selective.draw(parents, channels=3, dstate=4)
    dt = problem.sizes()
    assert error(problem.scan(dt), problem.outputs(dt)) < TOLERANCE[torch.float32]


def test_rows_that_are_no_ancestors_do_not_leak_whatever_they_hold() -> None:
    problem = Selective.draw(draw_parents(1, 12, padding=3)[2:])
    dt, clean = problem.sizes(), problem.outputs(problem.sizes())
    problem.x[:, 9:], dt[:, 9:] = torch.nan, 1e30
    assert error(problem.scan(dt)[:, :9], clean[:, :9]) < TOLERANCE[torch.float32]


def test_decays_of_all_or_nothing_neither_overflow_nor_lose_digits() -> None:
    problem = Selective.draw(oracles.random_parents(2, 60, torch.Generator().manual_seed(5)).to(DEVICE), channels=5)
    choice = torch.tensor([0.0, 1e-3, 0.5, 1e4])
    dt = choice[torch.randint(0, 4, (2, 60, 5), generator=torch.Generator().manual_seed(1))].to(DEVICE)
    A = problem.A.clone()
    A[:, 0], A[:, 1] = -1e-30, -1e30
    problem = replace(problem, A=A, x=problem.x / dt.clamp(min=1))
    assert error(problem.scan(dt), problem.outputs(dt)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("first", [0, 5], ids=lambda k: f"first{k}")
@DTYPES
def test_selective_step_commits_the_old_tree_then_scores_the_new_one(first: int, dtype: torch.dtype) -> None:
    old = Selective.draw(draw_parents(2, 13), seed=1).to(dtype)
    new = Selective.draw(draw_parents(3, 11, padding=1), seed=2).to(dtype)
    old = replace(old, A=new.A, bias=new.bias)
    # Rows below `first` are in the stash already; the path goes through them.
    kept, old_dt = first, torch.cat((new.sizes()[:, :first], old.sizes()[:, first:]), 1)
    old = replace(
        old,
        x=torch.cat((new.x[:, :kept], old.x[:, kept:]), 1),
        B=torch.cat((new.B[:, :kept], old.B[:, kept:]), 1),
    )
    state, stash = old.state.clone(), new.stash()
    for kept_rows, rows in zip(stash, (old.x, old_dt, old.B), strict=True):
        kept_rows[:, :13] = rows
    ends = (9, None, 12)
    path, lengths = oracles.paths_to(old.parents, ends)
    for row, end in enumerate(ends):  # rows off the path may hold anything
        off = torch.ones(ROOM, dtype=torch.bool)
        off[[] if end is None else oracles.path_to(old.parents[row].tolist(), end)] = False
        off[:first] = False
        for kept_rows in stash:
            kept_rows[row, off] = torch.nan
    y = new.step(state, stash, *on_device(path, lengths), first=first)
    states = torch.stack([committed(old.oracle(i, old_dt)[1], old.state[i], end) for i, end in enumerate(ends)])
    assert error(state, states) < TOLERANCE[torch.float32]
    assert torch.equal(state[1].view(torch.int32), old.state[1].view(torch.int32))
    assert y.dtype == dtype and error(y, new.outputs(states=states)[:, first:]) < TOLERANCE[dtype]
    assert torch.equal(stash[0][:, first:11], new.x[:, first:]) and torch.equal(stash[2][:, first:11], new.B[:, first:])
    assert float((stash[1][:, :11].double() / new.sizes().double() - 1).abs().max()) < 1e-6


def test_three_steps_in_a_row_equal_commit_then_scan() -> None:
    first, second, third = (Selective.draw(draw_parents(seed, 13), seed=seed) for seed in range(3))
    state, stash, expected = first.state.clone(), first.stash(), first.state.double().cpu()
    path = lengths = None
    for tree, ends in ((first, (12, None, 3)), (second, (0, 7, None)), (third, (0, 0, 0))):
        tree = replace(tree, A=first.A, bias=first.bias)
        y = tree.step(state, stash, path, lengths)
        assert error(state, expected) < TOLERANCE[torch.float32]
        assert error(y, tree.outputs(states=expected)) < TOLERANCE[torch.float32]
        after = [tree.oracle(row, state=expected[row])[1] for row in range(3)]
        expected = torch.stack([committed(after[row], expected[row], end) for row, end in enumerate(ends)])
        path, lengths = on_device(*oracles.paths_to(tree.parents, ends))


def test_a_tree_that_grows_twice_is_scored_as_if_it_came_at_once() -> None:
    problem = Selective.draw(draw_parents(6, 12))
    stash, expected = problem.stash(), problem.outputs()
    for first, n in ((0, 3), (3, 8), (8, 12)):
        part = replace(
            problem, **{name: getattr(problem, name)[:, :n] for name in ("x", "dt", "B", "C")},
            parents=problem.parents[:, :n].contiguous(),
        )  # fmt: skip
        y = part.step(problem.state, stash, None, None, first=first)
        assert error(y, expected[:, first:n]) < TOLERANCE[torch.float32]


def test_a_step_that_commits_from_another_stash_equals_a_step_in_place() -> None:
    problem = Selective.draw(draw_parents(4, 13), seed=1)
    path, lengths = on_device(*oracles.paths_to(problem.parents, (12, 3, None)))
    once, twice = problem.stash(0.5), problem.stash()
    other = tuple(t.clone() for t in once)
    states = problem.state.clone(), problem.state.clone()
    y = problem.step(states[0], once, path, lengths)
    assert torch.equal(problem.step(states[1], twice, path, lengths, previous=other), y)
    assert torch.equal(states[0], states[1]) and all(bool((t == 0.5).all()) for t in other)
    assert all(torch.equal(a[:, :13], b[:, :13]) for a, b in zip(once, twice, strict=True))


def test_softplus_keeps_the_digits_of_small_step_sizes() -> None:
    problem = Selective.draw(draw_parents(0, 16)[:1], channels=1)
    problem.dt[0, :, 0] = torch.linspace(-60, 60, 16)
    stash = problem.stash()
    rows = (problem.x, problem.dt, problem.A, problem.B, problem.C, None)
    ops.selective_step(problem.state.clone(), *stash, None, None, *rows, problem.parents, backend="triton")
    expected = torch.nn.functional.softplus(problem.dt.double())
    assert float((stash[1][:, :16].double() / expected - 1).abs().max()) < 1e-6


def test_selective_commit_of_a_long_path_with_decay_rates_a_row_equals_the_recursion() -> None:
    problem = Selective.draw(draw_parents(4, 40)[::2], channels=5)
    path, lengths = on_device(*oracles.paths_to(problem.parents, (39, 30)))
    state, dt = problem.state.clone(), problem.sizes()
    rates = torch.stack((problem.A, problem.A * 0.3))
    ops.selective_commit(state, problem.x, dt, rates, problem.B, path, lengths, backend="triton")
    layers = [replace(problem, A=rate) for rate in rates]
    expected = torch.stack([layers[0].oracle(0, dt)[1][39], layers[1].oracle(1, dt)[1][30]])
    assert error(state, expected) < TOLERANCE[torch.float32]


# RG-LRU.


@DTYPES
def test_diagonal_scan_and_commit_equal_the_recursion(dtype: torch.dtype) -> None:
    problem = Diagonal.draw(draw_parents(1, 13, padding=3))
    problem = replace(problem, x=problem.x.to(dtype))
    expected = problem.oracle()
    for first in (0, 6):
        y = ops.diagonal_tree_scan(
            problem.log_a, problem.x, problem.parents, problem.state, first=first, backend="triton"
        )
        assert y.dtype == dtype and error(y, expected[:, first:]) < TOLERANCE[dtype]
    path, lengths = on_device(*oracles.paths_to(problem.parents, (12, None, 9)))
    state = problem.state.clone()
    ops.diagonal_commit(state, problem.log_a, problem.x, path, lengths, backend="triton")
    ends = torch.stack((expected[0, 12], problem.state[1].double().cpu(), expected[2, 9]))
    assert error(state, ends) < TOLERANCE[torch.float32]
    assert torch.equal(state[1].view(torch.int32), problem.state[1].view(torch.int32))


@given(st.integers(0, 10**6), st.integers(2, 40))
@settings(max_examples=8, deadline=None)
def test_diagonal_steps_over_drawn_trees_equal_commit_then_scan(seed: int, n: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    old, new = (Diagonal.draw(oracles.random_parents(2, n, rng), channels=5, seed=seed + i) for i in range(2))
    state, first = old.state.clone(), seed % n
    stash_a, stash_x = (torch.full((2, n + 3, 5), torch.nan, device=DEVICE) for _ in range(2))
    ops.diagonal_step(state, stash_a, stash_x, None, None, old.log_a, old.x, old.parents, backend="triton")
    assert torch.equal(state, old.state)
    # The rows below `first` are common to both trees.
    new = replace(
        new,
        log_a=torch.cat((old.log_a[:, :first], new.log_a[:, first:]), 1),
        x=torch.cat((old.x[:, :first], new.x[:, first:]), 1),
    )
    ends = (n - 1, None)
    path, lengths = on_device(*oracles.paths_to(old.parents, ends))
    rows = (new.log_a[:, first:], new.x[:, first:])
    y = ops.diagonal_step(
        state, stash_a, stash_x, path, lengths, *rows, Topology.of(new.parents), first=first, backend="triton"
    )
    states = torch.stack((old.oracle()[0, n - 1], old.state[1].double().cpu()))
    assert error(state, states) < TOLERANCE[torch.float32]
    assert error(y, new.oracle(states)[:, first:]) < TOLERANCE[torch.float32]
    assert torch.equal(stash_a[:, :n], new.log_a) and torch.equal(stash_x[:, :n], new.x)


# Bad input.


def test_what_the_kernels_cannot_take_is_refused_with_its_limits() -> None:
    def scan(n: int = 2, dstate: int = 3) -> None:
        problem = Selective.draw(torch.arange(-1, n - 1, dtype=torch.int32, device=DEVICE)[None], 2, dstate)
        problem.scan(problem.sizes())

    with pytest.raises(NotImplementedError, match="selective_tree_scan with backend='triton' takes a dstate up to 256"):
        scan(dstate=257)
    with pytest.raises(NotImplementedError, match="takes trees of nodes up to 128, got 129"):
        scan(n=129)
    problem = Selective.draw(torch.tensor([[-1]], dtype=torch.int32, device=DEVICE))
    path, lengths = on_device(torch.zeros(1, 129, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="selective_commit with backend='triton' takes a path of nodes up to"):
        ops.selective_commit(
            problem.state, problem.x, problem.dt, problem.A, problem.B, path, lengths, backend="triton"
        )
    with pytest.raises(TypeError, match="takes float32, bfloat16 or float16, the same for all, got x bfloat16, B"):
        replace(problem, x=problem.x.bfloat16()).scan(problem.sizes())
    double = Diagonal.draw(torch.tensor([[-1]], dtype=torch.int32, device=DEVICE))
    with pytest.raises(TypeError, match="diagonal_tree_scan with backend='triton' takes float32, bfloat16 or float16"):
        ops.diagonal_tree_scan(double.log_a, double.x.double(), double.parents, double.state.double(), backend="triton")
    state = problem.state.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="state must be contiguous in its last 2 dimensions, got strides"):
        replace(problem, state=state).scan(problem.sizes())
    with pytest.raises(ValueError, match=r"dt_bias must be float\[37\], got float32\[36\]"):
        replace(problem, bias=problem.bias[1:]).step(problem.state, problem.stash(), None, None)
    with pytest.raises(ValueError, match=r"previous\[2\] must be float\[1, 20, 6\], got float32\[1, 20, 5\]"):
        x, dt, B = problem.stash()
        problem.step(problem.state, problem.stash(), None, None, previous=(x, dt, B[..., 1:]))


def test_without_a_gpu_or_the_interpreter_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    problem = Selective.draw(torch.tensor([[-1]], dtype=torch.int32))
    if DEVICE == "cpu":
        with pytest.raises(RuntimeError, match="selective_tree_scan with backend='triton' needs CUDA tensors, got a"):
            problem.scan(problem.sizes())
