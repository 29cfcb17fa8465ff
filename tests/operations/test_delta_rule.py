"""stree.kernels.delta_rule.kernel against a float64 recursion over nodes (helpers.oracles), interpreted on the CPU.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_delta_rule.py
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
from torch.nn.functional import normalize

from stree.kernels import ops
from stree.kernels.precision import float32_tolerance

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("poisoned_empty")

# Largest error as a share of the largest value of the oracle, which sees the same rounded inputs.
TOLERANCE = {
    torch.float32: float32_tolerance(600),  # 6e-8 rounding, sums of some hundred products
    torch.bfloat16: 2e-2,  # the output has 8 bits, and the interpreter rounds them towards zero
    torch.float16: 2e-3,  # the output has 11 bits
}
ROOM = 20
BOTH = pytest.mark.parametrize("channels", [False, True], ids=["gated_delta", "kda"])
Stash = tuple[Tensor, Tensor, Tensor]  # k, u and g


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value; NaN counts as infinite."""
    difference = (actual.double().cpu() - expected.cpu()).abs().max() / expected.abs().max().cpu()
    return float(difference.nan_to_num(torch.inf))


def chain(n: int) -> Tensor:
    """Make the parents of one chain."""
    return torch.arange(-1, n - 1, dtype=torch.int32)[None]


def draw_parents(rng: torch.Generator, n: int, padding: int = 0) -> Tensor:
    """Draw a chain, a star and a random tree with padding at its end."""
    return torch.cat((chain(n), -(torch.arange(n) == 0).int()[None], oracles.random_parents(1, n, rng, padding)))


@dataclass(frozen=True)
class Problem:
    """Operands of a scan: two value heads share a key head, and a scale that is not the default."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    parents: Tensor
    state: Tensor
    scale: float = 0.7

    @classmethod
    def draw(
        cls, parents: Tensor, channels: bool, heads: tuple[int, int] = (2, 4), dk: int = 7, dv: int = 5, seed: int = 0
    ) -> Problem:
        rng = torch.Generator().manual_seed(seed)
        batch, n = parents.shape
        q, k = (normalize(torch.randn(batch, n, heads[0], dk, generator=rng), dim=-1) for _ in range(2))
        v, state = (
            torch.randn(batch, n, heads[1], dv, generator=rng),
            torch.randn(batch, heads[1], dk, dv, generator=rng),
        )
        g = -torch.rand(batch, n, heads[1], *[dk] * channels, generator=rng)
        beta = 2 * torch.rand(batch, n, heads[1], generator=rng)
        return cls(*(t.to(DEVICE) for t in (q, k, v, g, beta, parents, state)))

    def changed(self, **tensors: Tensor) -> Problem:
        return Problem(**{**self.__dict__, **tensors})

    def to(self, dtype: torch.dtype) -> Problem:
        return self.changed(q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))

    @property
    def rows(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    def oracle(self, row: int, state: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        state = (self.state[row] if state is None else state).cpu()
        return oracles.gated_delta(*(t[row].cpu() for t in self.rows), self.parents[row].tolist(), state, self.scale)

    def outputs(self, states: list[Tensor] | None = None) -> Tensor:
        rows = range(len(self.parents))
        return torch.stack([self.oracle(row, None if states is None else states[row])[0] for row in rows])

    def scan(self, first: int = 0, u: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return ops.gated_delta_tree_scan(
            *self.rows, self.parents, self.state, scale=self.scale, first=first, u=u, backend="triton"
        )

    def stash(self, fill: float = torch.nan) -> Stash:
        """Make a stash with room for more than a tree: k like the rows, u and g in float32."""
        shapes = [(self.k, self.k.dtype), (self.v, torch.float32), (self.g, torch.float32)]
        k, u, g = (torch.full((len(t), ROOM, *t.shape[2:]), fill, dtype=d, device=DEVICE) for t, d in shapes)
        return k, u, g

    def step(
        self, state: Tensor, stash: Stash, path: object, lengths: object, first: int = 0, previous: Stash | None = None,
        backend: str = "triton",
    ) -> Tensor:  # fmt: skip
        return ops.gated_delta_step(
            state, *stash, path, lengths, *(t[:, first:] for t in self.rows), self.parents, scale=self.scale,
            first=first, previous=previous, backend=backend,
        )  # fmt: skip


def on_device(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(DEVICE) for t in tensors)


@BOTH
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
def test_scan_of_chains_stars_and_padded_trees_equals_the_recursion(dtype: torch.dtype, channels: bool) -> None:
    problem = Problem.draw(draw_parents(torch.Generator().manual_seed(1), 13, padding=3), channels).to(dtype)
    o, u = problem.scan()
    assert o.dtype == dtype and u.dtype == torch.float32 and o.is_contiguous()
    assert error(o, problem.outputs()) < TOLERANCE[dtype]
    wide = [t.double() for t in problem.rows]
    _, expected = ops.gated_delta_tree_scan(*wide, problem.parents, problem.state.double(), backend="reference")
    assert error(u, expected) < TOLERANCE[torch.float32]


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 3), st.booleans())
@settings(max_examples=8, deadline=None)
def test_scan_of_drawn_trees_equals_the_recursion(seed: int, n: int, padding: int, channels: bool) -> None:
    parents = oracles.random_parents(1, n, torch.Generator().manual_seed(seed), min(padding, n - 1))
    problem = Problem.draw(parents, channels, (1, 2), seed=seed)
    first = seed % n
    assert error(problem.scan(first)[0], problem.outputs()[:, first:]) < TOLERANCE[torch.float32]


@BOTH
@pytest.mark.parametrize(("n", "dk", "dv"), [(1, 7, 5), (65, 70, 70), (128, 40, 16)], ids=str)
def test_scan_over_several_tiles_equals_the_recursion(n: int, dk: int, dv: int, channels: bool) -> None:
    parents = oracles.random_parents(1, n, torch.Generator().manual_seed(3))
    problem = Problem.draw(parents, channels, (1, 1), dk, dv)
    assert error(problem.scan()[0], problem.outputs()) < TOLERANCE[torch.float32]


@BOTH
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the overflow is meant
def test_rows_that_are_no_ancestors_do_not_leak_whatever_finite_value_they_hold(channels: bool) -> None:
    problem = Problem.draw(draw_parents(torch.Generator().manual_seed(1), 12, padding=3)[2:], channels)
    clean = problem.outputs()
    for tensor in (problem.q, problem.k, problem.v, problem.beta):
        tensor[:, 9:] = 1e25  # products of these are infinite
    problem.g[:, 9:] = -1e30
    assert error(problem.scan()[0][:, :9], clean[:, :9]) < TOLERANCE[torch.float32]


@BOTH
def test_decays_of_all_or_nothing_lose_no_digits_of_the_decays_behind_them(channels: bool) -> None:
    problem = Problem.draw(oracles.random_parents(2, 60, torch.Generator().manual_seed(5)), channels, (1, 2))
    draws = torch.randint(0, 4, problem.g.shape, generator=torch.Generator().manual_seed(1))
    problem = problem.changed(g=torch.tensor([0.0, -1e-3, -0.5, -1e4])[draws].to(DEVICE))
    o, u = problem.scan()
    assert error(o, problem.outputs()) < TOLERANCE[torch.float32]
    state, ends = problem.state.clone(), (59, 41)
    path, lengths = on_device(*oracles.paths_to(problem.parents, ends))
    ops.gated_delta_commit(state, problem.k, u, problem.g, path, lengths, backend="triton")
    expected = torch.stack([problem.oracle(row)[1][end] for row, end in enumerate(ends)])
    assert error(state, expected) < TOLERANCE[torch.float32]


@BOTH
def test_decays_that_pass_many_windows_keep_their_digits(channels: bool) -> None:
    problem = Problem.draw(chain(100), channels, (1, 1))
    problem = problem.changed(g=-torch.linspace(60, 104, problem.g.numel()).view(problem.g.shape).to(DEVICE))
    problem.g[:, ::3] *= 1e-4  # each sees its parent undimmed, behind sums whose float32 is spaced 5e-4
    assert float(problem.g.sum(1).max()) < -4096
    assert error(problem.scan()[0], problem.outputs()) < TOLERANCE[torch.float32]


@BOTH
@pytest.mark.parametrize("cosine", [0.9, 1.0], ids=lambda c: f"cosine{c}")
def test_correlated_keys_of_a_chain_of_depth_63(cosine: float, channels: bool) -> None:
    problem = Problem.draw(chain(64), channels, (1, 1), 7, 5, seed=2)
    noise = torch.cat((torch.zeros_like(problem.k[..., :1]), normalize(problem.k[..., 1:], dim=-1)), -1)
    common = torch.zeros_like(noise)
    common[..., 0] = 1
    keys = cosine * common + (1 - cosine**2) ** 0.5 * noise
    problem = problem.changed(k=keys, q=keys, g=problem.g * 1e-3, beta=torch.where(problem.beta > 1, 2.0, problem.beta))
    # Keys that repeat with beta 2 never shrink an error, so it grows with depth.
    assert error(problem.scan()[0], problem.outputs()) < 2 * TOLERANCE[torch.float32]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_step_commits_the_old_tree_then_scores_the_new_one(dtype: torch.dtype, channels: bool) -> None:
    rng = torch.Generator().manual_seed(2)
    old = Problem.draw(draw_parents(rng, 13), channels, seed=1).to(dtype)
    new = Problem.draw(draw_parents(rng, 11, padding=1), channels, seed=2).to(dtype)
    old.state[1, ::2] = -0.0
    state, stash, ends, u = old.state.clone(), old.stash(), (9, None, 12), old.scan()[1]
    for row, end in enumerate(ends):  # rows off the path may hold anything
        on = [] if end is None else oracles.path_to(old.parents[row].tolist(), end)
        for kept, tensor in zip(stash, (old.k, u, old.g), strict=True):
            kept[row, on] = tensor[row, on]
    o = new.step(state, stash, *on_device(*oracles.paths_to(old.parents, ends)))
    states = [old.state[i].double().cpu() if e is None else old.oracle(i)[1][e] for i, e in enumerate(ends)]
    assert error(state, torch.stack(states)) < TOLERANCE[torch.float32]
    assert torch.equal(state[1].view(torch.int32), old.state[1].view(torch.int32))
    assert o.dtype == dtype and error(o, new.outputs(states)) < TOLERANCE[dtype]
    assert torch.equal(stash[0][:, :11], new.k) and torch.equal(stash[2][:, :11], new.g)
    assert all(bool(kept[:, 13:].isnan().all()) for kept in stash)


@BOTH
def test_three_trees_in_a_row_follow_the_recursion(channels: bool) -> None:
    parents = draw_parents(torch.Generator().manual_seed(7), 10)
    problem = Problem.draw(parents, channels, (1, 2))
    state, stash = problem.state.clone(), problem.stash()
    expected, path, lengths = [s.double().cpu() for s in state], None, None
    for seed, ends in enumerate([(9, None, 4), (0, 7, 8), (None, 9, 9)]):
        tree = Problem.draw(parents, channels, (1, 2), seed=seed)
        o = tree.step(state, stash, path, lengths)
        assert error(o, tree.outputs(expected)) < TOLERANCE[torch.float32]
        states = [tree.oracle(row, expected[row])[1] for row in range(3)]
        expected = [s if end is None else states[i][end] for i, (s, end) in enumerate(zip(expected, ends, strict=True))]
        path, lengths = on_device(*oracles.paths_to(parents, ends))
    ops.gated_delta_commit(state, *stash, path, lengths, backend="triton")
    assert error(state, torch.stack(expected)) < TOLERANCE[torch.float32]


@BOTH
def test_a_tree_grown_in_the_stash_equals_one_call(channels: bool) -> None:
    problem = Problem.draw(draw_parents(torch.Generator().manual_seed(8), 17, padding=1)[::2], channels, (1, 2))
    whole, whole_u = problem.scan()
    stash = problem.stash()
    for first, n in ((0, 1), (1, 6), (6, 17)):
        part = problem.changed(
            **{name: getattr(problem, name)[:, :n].contiguous() for name in ("q", "k", "v", "g", "beta", "parents")}
        )
        o = part.step(problem.state, stash, None, None, first=first)
        assert error(o, whole[:, first:n].double()) < TOLERANCE[torch.float32]
        again, u = part.scan(first, stash[1])
        assert error(again, whole[:, first:n].double()) < TOLERANCE[torch.float32]
        assert error(u, whole_u[:, :n].double()) < TOLERANCE[torch.float32]
    assert error(stash[1][:, :17], whole_u.double()) < TOLERANCE[torch.float32]


@BOTH
@pytest.mark.parametrize("first", [0, 4], ids=lambda k: f"first{k}")
def test_a_step_that_commits_from_another_stash_equals_a_step_in_place(first: int, channels: bool) -> None:
    problem = Problem.draw(draw_parents(torch.Generator().manual_seed(4), 13), channels, (1, 2), seed=1)
    path, lengths = on_device(*oracles.paths_to(problem.parents, (12, 3, None)))
    once, twice, third, other = (problem.stash(-0.5) for _ in range(4))
    for kept in (*twice, *third):
        kept[:, first:] = torch.nan
    states = [problem.state.clone() for _ in range(3)]
    o = problem.step(states[0], once, path, lengths, first)
    assert torch.equal(problem.step(states[1], twice, path, lengths, first, other), o)
    assert torch.equal(states[0], states[1]) and all(bool((t == -0.5).all()) for t in other)
    assert all(torch.equal(a[:, :13], b[:, :13]) for a, b in zip(once, twice, strict=True))
    expected = problem.step(states[2], third, path, lengths, first, other, backend="reference")
    pairs = ((o, expected), (states[0], states[2]), (once[1][:, :13], third[1][:, :13]))
    assert all(error(ours, theirs.double()) < TOLERANCE[torch.float32] for ours, theirs in pairs)


def test_a_stash_may_be_narrower_than_the_rows_and_the_scan_reads_the_rounded_keys() -> None:
    problem = Problem.draw(draw_parents(torch.Generator().manual_seed(4), 9), False)
    exact = problem.k.bfloat16().float()  # the interpreter rounds otherwise than torch; these need no rounding
    problem = problem.changed(k=exact, v=problem.v.bfloat16(), beta=problem.beta.bfloat16())
    narrow = problem.changed(k=exact.bfloat16()).stash()
    o = problem.step(problem.state.clone(), narrow, None, None)
    assert narrow[0].dtype == torch.bfloat16 and torch.equal(narrow[0][:, :9].float(), exact)
    assert o.dtype == torch.bfloat16 and error(o, problem.outputs()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("n", "dk", "dv", "message"),
    [
        (2, 257, 5, "gated_delta_tree_scan with backend='triton' takes a dk up to 256, got 257"),
        (2, 7, 257, "takes a dv up to 256, got 257"),
        (129, 7, 5, "takes trees of nodes up to 128, got 129"),
    ],
    ids=["dk", "dv", "n"],
)
def test_sizes_without_a_tile_are_refused_with_their_limits(n: int, dk: int, dv: int, message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        Problem.draw(chain(n), False, (1, 1), dk, dv).scan()


def test_what_the_kernel_cannot_read_is_refused() -> None:
    problem = Problem.draw(chain(2), False).to(torch.float64)
    with pytest.raises(TypeError, match="takes float32, bfloat16 or float16, the same for all, got q float64"):
        problem.changed(state=problem.state.double()).scan()
    problem = Problem.draw(chain(1), False)
    keys = problem.k.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="k must be contiguous in its last 2 dimensions, got strides"):
        problem.changed(k=keys).scan()
    stash, other = problem.stash(), problem.stash()
    path, lengths = on_device(*oracles.paths_to(problem.parents, (0,)))
    with pytest.raises(ValueError, match=r"previous\[1\] must be float\[1, 20, 4, 5\], got float32\[1, 20, 4, 4\]"):
        problem.step(problem.state, stash, path, lengths, previous=(other[0], other[1][..., :4], other[2]))
