"""stree.kernels.mamba2.kernel against a float64 recursion over nodes (helpers.oracles), interpreted on the CPU.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_mamba2.py
"""

# Inputs travel as tuples of any length, which a type checker cannot count against a signature.
# mypy: disable-error-code="call-arg, arg-type, misc"

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers import oracles
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stree.kernels import ops
from stree.kernels.precision import float32_tolerance
from stree.kernels.topology import ancestor_bits, ancestor_mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("poisoned_empty")

# Largest error as a share of the largest value of the oracle, which sees the same rounded inputs.
TOLERANCE = {
    torch.float32: float32_tolerance(400),  # 6e-8 rounding, sums of some hundred products
    torch.bfloat16: 2e-2,  # the output has 8 bits, and the interpreter rounds them towards zero
    torch.float16: 2e-3,  # the output has 11 bits
}
ROOM = 20
LIMIT = (0.05, 1.5)


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value; NaN counts as infinite."""
    difference = (actual.double().cpu() - expected).abs().max() / expected.abs().max()
    return float(difference.nan_to_num(torch.inf))


def draw_parents(rng: torch.Generator, n: int, padding: int = 0) -> Tensor:
    """Draw a chain, a star and a random tree with padding at its end."""
    chain, star = torch.arange(-1, n - 1), -(torch.arange(n) == 0).int()
    return torch.cat((torch.stack((chain, star)).int(), oracles.random_parents(1, n, rng, padding)))


@dataclass(frozen=True)
class Problem:
    """Operands of a step: raw projections and a stash that holds an older tree."""

    state: Tensor
    xbc: Tensor
    dt: Tensor
    A: Tensor
    bias: Tensor
    D: Tensor
    parents: Tensor
    headdim: int
    groups: int

    @classmethod
    def draw(
        cls, parents: Tensor, heads: int = 4, headdim: int = 5, groups: int = 2, dstate: int = 7, seed: int = 0
    ) -> Problem:
        rng = torch.Generator().manual_seed(seed)
        batch, n = parents.shape
        width = heads * headdim + 2 * groups * dstate
        state, xbc = (
            torch.randn(batch, heads, headdim, dstate, generator=rng),
            torch.randn(batch, n, width, generator=rng),
        )
        A, dt = -3 * torch.rand(heads, generator=rng), torch.randn(batch, n, heads, generator=rng)
        bias, D = torch.randn(heads, generator=rng) - 2, torch.randn(heads, generator=rng)
        return cls(*(t.to(DEVICE) for t in (state, xbc, dt, A, bias, D, parents)), headdim, groups)

    def to(self, dtype: torch.dtype) -> Problem:
        return Problem(**{**self.__dict__, "xbc": self.xbc.to(dtype), "dt": self.dt.to(dtype)})

    def split(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inner = self.A.shape[0] * self.headdim
        span = (xbc.shape[2] - inner) // 2
        x, B, C = xbc.split((inner, span, span), 2)
        groups = (self.groups, -1)
        return x.unflatten(2, (-1, self.headdim)), B.unflatten(2, groups), C.unflatten(2, groups)

    def sizes(self) -> Tensor:
        """Step sizes after bias, softplus and limit, as float32."""
        raw = self.dt.double() + self.bias.double()
        return torch.nn.functional.softplus(raw).clamp(*LIMIT).float()

    def oracle(self, row: int, dt: Tensor | None = None, state: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        x, B, C = self.split(self.xbc)
        tensors = (x[row], (self.sizes() if dt is None else dt)[row], self.A, B[row], C[row])
        state = self.state[row] if state is None else state
        cpu = [t.cpu() for t in (*tensors, state, self.D)]
        return oracles.ssd(*cpu[:5], self.parents[row].tolist(), cpu[5], cpu[6])

    def outputs(self, dt: Tensor | None = None, states: list[Tensor] | None = None) -> Tensor:
        rows = range(len(self.parents))
        return torch.stack([self.oracle(row, dt, None if states is None else states[row])[0] for row in rows])

    def scan(self, dt: Tensor, first: int = 0) -> Tensor:
        x, B, C = self.split(self.xbc)
        return ops.ssd_tree_scan(x, dt, self.A, B, C, self.parents, self.state, D=self.D, first=first, backend="triton")

    def stash(self, fill: float = torch.nan) -> tuple[Tensor, Tensor]:
        batch, _, width = self.xbc.shape
        xbc = torch.full((batch, ROOM, width), fill, dtype=self.xbc.dtype, device=DEVICE)
        return xbc, torch.full((batch, ROOM, self.A.shape[0]), fill, device=DEVICE)

    def step(
        self, state: Tensor, stash: tuple[Tensor, Tensor], path: object, lengths: object, **kwargs: object
    ) -> Tensor:
        first = int(kwargs.get("first", 0))  # type: ignore[call-overload]
        return ops.ssd_step(
            state, *stash, path, lengths, self.xbc[:, first:], self.dt[:, first:], self.A, self.bias, self.parents,
            headdim=self.headdim, ngroups=self.groups, D=self.D, dt_limit=LIMIT, backend="triton", **kwargs,
        )  # fmt: skip


def on_device(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(DEVICE) for t in tensors)


def test_words_hold_the_ancestor_mask() -> None:
    mask = ancestor_mask(oracles.random_parents(2, 70, torch.Generator().manual_seed(0)))
    words = ancestor_bits(mask)
    assert words.shape == (2, 70, 3) and words.dtype == torch.int32
    column = torch.arange(70)
    assert torch.equal((words[:, :, column // 32] >> (column % 32)) & 1 != 0, mask)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
def test_scan_of_chains_stars_and_padded_trees_equals_the_recursion(dtype: torch.dtype) -> None:
    problem = Problem.draw(draw_parents(torch.Generator().manual_seed(1), 13, padding=3)).to(dtype)
    dt = problem.sizes()
    y = problem.scan(dt)
    assert y.dtype == dtype and y.is_contiguous()
    assert error(y, problem.outputs(dt)) < TOLERANCE[dtype]


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 3))
@settings(max_examples=4, deadline=None)
def test_scan_of_drawn_trees_equals_the_recursion(seed: int, n: int, padding: int) -> None:
    parents = oracles.random_parents(1, n, torch.Generator().manual_seed(seed), min(padding, n - 1))
    problem = Problem.draw(parents, heads=2, groups=1, seed=seed)
    dt = problem.sizes()
    first = seed % n
    assert error(problem.scan(dt, first), problem.outputs(dt)[:, first:]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("n", "heads", "headdim", "dstate"), [(1, 2, 5, 7), (65, 1, 70, 70), (128, 1, 16, 40)], ids=str
)
def test_scan_over_several_tiles_equals_the_recursion(n: int, heads: int, headdim: int, dstate: int) -> None:
    parents = oracles.random_parents(1, n, torch.Generator().manual_seed(3))
    problem = Problem.draw(parents, heads, headdim, 1, dstate)
    dt = problem.sizes()
    assert error(problem.scan(dt), problem.outputs(dt)) < TOLERANCE[torch.float32]


def test_rows_that_are_no_ancestors_do_not_leak_whatever_finite_value_they_hold() -> None:
    problem = Problem.draw(draw_parents(torch.Generator().manual_seed(1), 12, padding=3)[2:])
    dt, clean = problem.sizes(), problem.outputs(problem.sizes())
    problem.xbc[:, 9:] = 1e9
    dt[:, 9:] = 1e9
    assert error(problem.scan(dt)[:, :9], clean[:, :9]) < TOLERANCE[torch.float32]


def test_decays_of_all_or_nothing_lose_no_digits_of_the_decays_behind_them() -> None:
    problem = Problem.draw(oracles.random_parents(2, 60, torch.Generator().manual_seed(5)), heads=2, groups=1)
    choice = torch.tensor([0.0, 1e-3, 0.5, 1e4])
    dt = choice[torch.randint(0, 4, (2, 60, 2), generator=torch.Generator().manual_seed(1))]
    problem = Problem(**{**problem.__dict__, "A": -torch.ones(2, device=DEVICE)})
    x = problem.split(problem.xbc)[0]
    x /= dt.to(DEVICE).clamp(min=1)[..., None]
    expected = problem.outputs(dt)
    assert error(problem.scan(dt.to(DEVICE)), expected) < TOLERANCE[torch.float32]
    # What the split into exact and small parts is for: one float32 sum a path is 1e-4 off.
    mask = ancestor_mask(problem.parents).cpu()
    sums = (mask.float() @ -dt).double()
    exact = mask.double() @ -dt.double()
    pairs = mask[..., None].expand(-1, -1, -1, 2)
    lost = (sums[:, :, None] - sums[:, None]).exp() - (exact[:, :, None] - exact[:, None]).exp()
    assert float(lost[pairs].abs().max()) > 1e-4


@pytest.mark.parametrize("first", [0, 5], ids=lambda k: f"first{k}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_step_commits_the_old_tree_then_scores_the_new_one(first: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(2)
    old = Problem.draw(draw_parents(rng, 13), seed=1).to(dtype)
    new = Problem.draw(draw_parents(rng, 11, padding=1), seed=2).to(dtype)
    old = Problem(**{**old.__dict__, "A": new.A, "bias": new.bias})
    state, stash, old_dt, new_dt = old.state.clone(), old.stash(), old.sizes(), new.sizes()
    stash[0][:, :13], stash[1][:, :13] = old.xbc, old_dt
    if first:  # rows that are in the stash already; the path goes through them
        stash[0][:, :first], stash[1][:, :first] = new.xbc[:, :first], new_dt[:, :first]
        old = Problem(**{**old.__dict__, "xbc": torch.cat((new.xbc[:, :first], old.xbc[:, first:]), 1)})
        old_dt = torch.cat((new_dt[:, :first], old_dt[:, first:]), 1)
    ends = (9, None, 12)
    path, lengths = oracles.paths_to(old.parents, ends)
    for row, end in enumerate(ends):  # rows off the path may hold anything
        off = torch.ones(ROOM, dtype=torch.bool)
        off[[] if end is None else oracles.path_to(old.parents[row].tolist(), end)] = False
        off[:first] = False
        stash[0][row, off], stash[1][row, off] = torch.nan, torch.nan
    y = new.step(state, stash, *on_device(path, lengths), first=first)
    states = [old.state[i].double().cpu() if e is None else old.oracle(i, old_dt)[1][e] for i, e in enumerate(ends)]
    assert error(state, torch.stack(states)) < TOLERANCE[torch.float32]
    assert torch.equal(state[1].view(torch.int32), old.state[1].view(torch.int32))
    assert y.dtype == dtype and error(y, new.outputs(states=states)[:, first:]) < TOLERANCE[dtype]
    assert torch.equal(stash[0][:, first:11], new.xbc[:, first:])
    kept = stash[1][:, :11].double().cpu()
    assert float((kept / new.sizes().double().cpu() - 1).abs().max()) < 1e-6


def test_a_step_that_commits_from_another_stash_equals_a_step_in_place() -> None:
    problem = Problem.draw(draw_parents(torch.Generator().manual_seed(4), 13), seed=1)
    path, lengths = on_device(*oracles.paths_to(problem.parents, (12, 3, None)))
    once, twice = problem.stash(0.5), problem.stash()
    other = (once[0].clone(), once[1].clone())
    states = problem.state.clone(), problem.state.clone()
    y = problem.step(states[0], once, path, lengths)
    assert torch.equal(problem.step(states[1], twice, path, lengths, previous=other), y)
    assert torch.equal(states[0], states[1]) and bool((other[0] == 0.5).all())
    assert all(torch.equal(a[:, :13], b[:, :13]) for a, b in zip(once, twice, strict=True))


def test_step_without_a_path_leaves_the_state() -> None:
    problem = Problem.draw(draw_parents(torch.Generator().manual_seed(4), 9), seed=1)
    state, stash = problem.state.clone(), problem.stash()
    y = problem.step(state, stash, None, None)
    assert torch.equal(state, problem.state) and error(y, problem.outputs()) < TOLERANCE[torch.float32]
    assert torch.equal(stash[0][:, :9], problem.xbc) and bool(stash[0][:, 9:].isnan().all())


def test_softplus_keeps_the_digits_of_small_step_sizes() -> None:
    problem = Problem.draw(oracles.random_parents(1, 16, torch.Generator().manual_seed(0)), heads=2, groups=1)
    problem.dt[..., 0] = torch.linspace(-60, 60, 16)
    problem.bias.zero_()
    _, kept = stash = problem.stash()
    ops.ssd_step(
        problem.state.clone(), *stash, None, None, problem.xbc, problem.dt, problem.A, None, problem.parents,
        headdim=problem.headdim, ngroups=1, backend="triton",
    )  # fmt: skip
    expected = torch.nn.functional.softplus(problem.dt.double())
    assert float((kept[:, :16].double() / expected - 1).abs().max()) < 1e-6


def test_commit_of_a_long_path_with_decay_rates_a_row_equals_the_recursion() -> None:
    problem = Problem.draw(draw_parents(torch.Generator().manual_seed(4), 40)[::2], heads=2, groups=1)
    path, lengths = on_device(*oracles.paths_to(problem.parents, (39, 30)))
    state, dt = problem.state.clone(), problem.sizes()
    x, B, _ = problem.split(problem.xbc)
    ops.ssd_commit(state, x, dt, problem.A.expand(2, -1), B, path, lengths, backend="triton")
    expected = torch.stack([problem.oracle(0, dt)[1][39], problem.oracle(1, dt)[1][30]])
    assert error(state, expected) < TOLERANCE[torch.float32]


def test_what_the_kernel_cannot_take_is_refused_with_its_limits() -> None:
    def scan(n: int = 2, headdim: int = 5, dstate: int = 7, dtype: torch.dtype = torch.float32) -> None:
        problem = Problem.draw(torch.arange(-1, n - 1, dtype=torch.int32)[None], 1, headdim, 1, dstate)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        problem = Problem(**{**problem.to(dtype).__dict__, "state": problem.state.to(wide)})
        problem.scan(problem.sizes())

    with pytest.raises(
        NotImplementedError, match="ssd_tree_scan with backend='triton' takes a headdim up to 128, got 129"
    ):
        scan(headdim=129)
    with pytest.raises(NotImplementedError, match="takes a dstate up to 256, got 257"):
        scan(dstate=257)
    with pytest.raises(NotImplementedError, match="takes trees of nodes up to 128, got 129"):
        scan(n=129)
    with pytest.raises(TypeError, match="takes float32, bfloat16 or float16, the same for all, got x float64"):
        scan(dtype=torch.float64)
    problem = Problem.draw(torch.tensor([[-1]], dtype=torch.int32))
    x, B, C = problem.split(problem.xbc)
    state = problem.state.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="state must be contiguous in its last 3 dimensions, got strides"):
        ops.ssd_tree_scan(x, problem.sizes(), problem.A, B, C, problem.parents, state, backend="triton")


def test_without_a_gpu_or_the_interpreter_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    problem = Problem.draw(torch.tensor([[-1]], dtype=torch.int32))
    if DEVICE == "cpu":
        with pytest.raises(
            RuntimeError, match="ssd_tree_scan with backend='triton' needs CUDA tensors, got a tensor on"
        ):
            problem.scan(problem.sizes())
