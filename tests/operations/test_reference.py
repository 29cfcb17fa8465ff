"""stree.kernels.reference against a float64 recursion over nodes (tests/helpers/oracles.py).

Run: python -m pytest tests/operations/test_reference.py
"""

# Inputs travel as tuples and dicts of any length, which a type checker cannot count against a signature.
# mypy: disable-error-code="call-arg, arg-type, misc"

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from helpers import oracles
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stree.kernels import ops
from stree.kernels.topology import AcceptedPath, Topology, ancestor_mask

pytestmark = pytest.mark.usefixtures("poisoned_empty")

# Largest error as a share of the largest value of the oracle, which sees the same rounded inputs.
TOLERANCE = {
    torch.float64: 1e-12,  # 2e-16 rounding, paths of at most 64 nodes, sums of at most some hundred products
    torch.float32: 5e-6,  # 6e-8 rounding, as above
    torch.bfloat16: 4e-3,  # accumulated in float32; the output is rounded to 8 bits, half a step is 2e-3
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Recurrence:
    """One recurrence seen alike by every test: inputs that have a row for each node, and weights that have none."""

    name: str
    state_shape: tuple[int, ...]
    draw: Callable[[torch.Generator, int, int], Inputs]
    weights: Inputs
    scan: Callable[[Inputs, Inputs, Tensor | Topology, Tensor, int], Tensor]
    commit: Callable[[Tensor, Inputs, Inputs, Tensor | Topology, Tensor, Tensor], None]
    oracle: Callable[[Inputs, Inputs, Sequence[int], Tensor], tuple[Tensor, list[Tensor]]]


def draw_ssd(rng: torch.Generator, batch: int, n: int) -> Inputs:
    x, B, C = (torch.randn(batch, n, *shape, generator=rng) for shape in ((6, 5), (3, 7), (3, 7)))
    return x, torch.rand(batch, n, 6, generator=rng), B, C


def draw_gated_delta(rng: torch.Generator, batch: int, n: int, channels: tuple[int, ...] = ()) -> Inputs:
    q, k = (torch.randn(batch, n, 2, 5, generator=rng) for _ in range(2))
    v = torch.randn(batch, n, 6, 3, generator=rng)
    g = -torch.rand(batch, n, 6, *channels, generator=rng)
    beta = torch.rand(batch, n, 6, generator=rng) * 2
    return q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), v, g, beta


def commit_gated_delta(
    state: Tensor, inputs: Inputs, weights: Inputs, parents: Tensor | Topology, path: Tensor, lengths: Tensor
) -> None:
    q, k, v, g, beta = inputs
    _, u = ops.gated_delta_tree_scan(q, k, v, g, beta, parents, state)
    ops.gated_delta_commit(state, k, u, g, path, lengths)


def oracle_diagonal(
    inputs: Inputs, weights: Inputs, parents: Sequence[int], state: Tensor
) -> tuple[Tensor, list[Tensor]]:
    states = oracles.diagonal(*inputs, parents, state)
    return torch.stack(states), states


def make_gated_delta(name: str, channels: tuple[int, ...]) -> Recurrence:
    return Recurrence(
        name,
        (6, 5, 3),
        lambda rng, batch, n: draw_gated_delta(rng, batch, n, channels),
        (),
        lambda i, w, parents, state, first: ops.gated_delta_tree_scan(*i, parents, state, first=first)[0],
        commit_gated_delta,
        lambda i, w, parents, state: oracles.gated_delta(*i, parents, state, 5**-0.5),
    )


def make_recurrences() -> list[Recurrence]:
    rng = torch.Generator().manual_seed(7)
    rate, skip = -torch.rand(6, generator=rng) * 3, torch.randn(6, generator=rng)
    rates, skips = -torch.rand(5, 3, generator=rng) * 3, torch.randn(5, generator=rng)
    ssd = Recurrence(
        "ssd",
        (6, 5, 7),
        draw_ssd,
        (rate, skip),
        lambda i, w, parents, state, first: ops.ssd_tree_scan(
            i[0], i[1], w[0], i[2], i[3], parents, state, D=w[1], first=first
        ),
        lambda state, i, w, parents, path, lengths: ops.ssd_commit(state, i[0], i[1], w[0], i[2], path, lengths),
        lambda i, w, parents, state: oracles.ssd(i[0], i[1], w[0], i[2], i[3], parents, state, w[1]),
    )
    selective = Recurrence(
        "selective",
        (5, 3),
        lambda rng, batch, n: (
            torch.randn(batch, n, 5, generator=rng),
            torch.rand(batch, n, 5, generator=rng),
            *(torch.randn(batch, n, 3, generator=rng) for _ in range(2)),
        ),
        (rates, skips),
        lambda i, w, parents, state, first: ops.selective_tree_scan(
            i[0], i[1], w[0], i[2], i[3], parents, state, D=w[1], first=first
        ),
        lambda state, i, w, parents, path, lengths: ops.selective_commit(state, i[0], i[1], w[0], i[2], path, lengths),
        lambda i, w, parents, state: oracles.selective(i[0], i[1], w[0], i[2], i[3], parents, state, w[1]),
    )
    diagonal = Recurrence(
        "diagonal",
        (5,),
        lambda rng, batch, n: (-torch.rand(batch, n, 5, generator=rng), torch.randn(batch, n, 5, generator=rng)),
        (),
        lambda i, w, parents, state, first: ops.diagonal_tree_scan(*i, parents, state, first=first),
        lambda state, i, w, parents, path, lengths: ops.diagonal_commit(state, *i, path, lengths),
        oracle_diagonal,
    )
    return [ssd, make_gated_delta("gated_delta", ()), make_gated_delta("kda", (5,)), selective, diagonal]


RECURRENCES = make_recurrences()
every_recurrence = pytest.mark.parametrize("recurrence", RECURRENCES, ids=lambda r: r.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])


@dataclass(frozen=True)
class Problem:
    """A drawn instance of a recurrence."""

    recurrence: Recurrence
    inputs: Inputs
    weights: Inputs
    parents: Tensor
    state: Tensor

    @classmethod
    def draw(
        cls,
        recurrence: Recurrence,
        batch: int,
        n: int,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        padding: int = 0,
    ) -> Problem:
        rng = torch.Generator().manual_seed(seed)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        parents = oracles.random_parents(batch, n, rng, padding)
        inputs = tuple(t.to(dtype) for t in recurrence.draw(rng, batch, n))
        weights = tuple(t.to(wide) for t in recurrence.weights)
        state = torch.randn(batch, *recurrence.state_shape, generator=rng).to(wide)
        return cls(recurrence, inputs, weights, parents, state)

    def scan(self, parents: Tensor | Topology | None = None, state: Tensor | None = None, first: int = 0) -> Tensor:
        parents = self.parents if parents is None else parents
        return self.recurrence.scan(self.inputs, self.weights, parents, self.state if state is None else state, first)

    def commit(self, state: Tensor, path: Tensor, lengths: Tensor) -> None:
        self.recurrence.commit(state, self.inputs, self.weights, self.parents, path, lengths)

    def oracle(self, row: int, state: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        inputs = tuple(t[row] for t in self.inputs)
        state = self.state[row] if state is None else state
        return self.recurrence.oracle(inputs, self.weights, self.parents[row].tolist(), state)

    def outputs(self) -> Tensor:
        return torch.stack([self.oracle(row)[0] for row in range(len(self.parents))])


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value."""
    return float((actual.double() - expected).abs().max() / expected.abs().max())


# Topology.


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_mask_depths_and_conv_rows_follow_the_parents(seed: int, n: int, padding: int) -> None:
    parents = oracles.random_parents(2, n, torch.Generator().manual_seed(seed), min(padding, n - 1))
    topology = Topology.of(parents, 4, jumps=True)
    assert torch.equal(topology.hidden, ~topology.mask)
    assert topology.conv_index is not None
    for row, tree in enumerate(parents.tolist()):
        for i in range(n):
            path = oracles.path_to(tree, i)
            assert topology.mask[row, i].nonzero().flatten().tolist() == path
            assert int(topology.depths[row, i]) == len(path) - 1
            assert topology.conv_index[row, i].tolist() == [0, 1, 2, *(3 + j for j in path)][-4:]


def test_a_topology_takes_over_a_mask_and_depths_and_computes_what_it_was_not_asked_for() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2]], dtype=torch.int32)
    mask = ancestor_mask(parents)
    depths = torch.tensor([[0, 1, 1, 2, 2, 2]], dtype=torch.int32)
    full, bare = Topology.of(parents, 4, mask=mask, depths=depths, jumps=True), Topology.of(parents)
    assert full.mask is mask and full.depths is depths
    assert torch.equal(full.conv_rows(3), bare.conv_rows(3)) and full.conv_rows(4) is full.conv_index
    assert all(torch.equal(a, b) for a, b in zip(full.jump_rows(), bare.jump_rows(), strict=True))
    assert bare.jump_rows()[1].tolist() == [[6, 6, 6, 0, 0, 0, 6]]


# Scans and commits of every recurrence.


@every_recurrence
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 24))
@settings(max_examples=12, deadline=None)
def test_scan_equals_the_recursion_on_random_trees(recurrence: Recurrence, seed: int, batch: int, n: int) -> None:
    problem = Problem.draw(recurrence, batch, n, seed=seed)
    assert error(problem.scan(), problem.outputs()) < TOLERANCE[torch.float64]


@every_recurrence
@pytest.mark.parametrize(("dtype", "n"), [*zip(DTYPES, (64, 13, 13), strict=True), (torch.float64, 1)], ids=str)
def test_scan_equals_the_recursion_in_every_dtype(recurrence: Recurrence, dtype: torch.dtype, n: int) -> None:
    problem = Problem.draw(recurrence, 2, n, dtype)
    y = problem.scan()
    assert y.dtype == dtype and y.is_contiguous()
    assert error(y, problem.outputs()) < TOLERANCE[dtype]


@every_recurrence
def test_scan_of_a_chain_equals_the_sequential_scan(recurrence: Recurrence) -> None:
    problem = Problem.draw(recurrence, 2, 11)
    state = problem.state.clone()
    chain = torch.arange(-1, 10, dtype=torch.int32).expand(2, 11)
    y = problem.scan(chain)
    one = torch.zeros(2, 1, dtype=torch.int32)
    for i in range(11):
        step = Problem(recurrence, tuple(t[:, i : i + 1] for t in problem.inputs), problem.weights, one - 1, state)
        assert error(y[:, i : i + 1], step.scan()) < TOLERANCE[torch.float64]
        step.commit(state, one, one[:, 0] + 1)


@every_recurrence
@pytest.mark.parametrize("first", [1, 5, 12], ids=lambda k: f"first{k}")
def test_first_returns_the_last_rows_of_the_whole_scan(recurrence: Recurrence, first: int) -> None:
    problem = Problem.draw(recurrence, 2, 13)
    assert error(problem.scan(first=first), problem.scan()[:, first:]) < TOLERANCE[torch.float64]


@every_recurrence
def test_scan_reads_the_state_and_leaves_it_as_it_is(recurrence: Recurrence) -> None:
    problem = Problem.draw(recurrence, 2, 9)
    before = problem.state.clone()
    problem.scan()
    assert torch.equal(before, problem.state)


@every_recurrence
def test_padding_changes_no_node_and_stays_finite(recurrence: Recurrence) -> None:
    padded = Problem.draw(recurrence, 2, 12, padding=3)
    short = Problem(
        recurrence, tuple(t[:, :9] for t in padded.inputs), padded.weights, padded.parents[:, :9], padded.state
    )
    y = padded.scan()
    assert error(y[:, :9], short.scan()) < TOLERANCE[torch.float64]
    assert bool(y.isfinite().all())


@every_recurrence
@every_dtype
def test_three_trees_in_a_row_follow_the_recursion(recurrence: Recurrence, dtype: torch.dtype) -> None:
    state = Problem.draw(recurrence, 3, 10, dtype).state
    expected = [state[row].double() for row in range(3)]
    ends = [(9, None, 4), (0, 7, 8), (None, 9, 9)]
    for seed, nodes in enumerate(ends):
        drawn = Problem.draw(recurrence, 3, 10, dtype, seed)
        problem = Problem(recurrence, drawn.inputs, drawn.weights, drawn.parents, state)
        rows = [problem.oracle(row, expected[row]) for row in range(3)]
        assert error(problem.scan(), torch.stack([y for y, _ in rows])) < TOLERANCE[dtype]
        problem.commit(state, *oracles.paths_to(problem.parents, nodes))
        expected = [s if i is None else states[i] for (_, states), s, i in zip(rows, expected, nodes, strict=True)]
        # u of a delta rule is kept in the accumulator here, so even bfloat16 inputs leave a float32 state
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert error(state, torch.stack(expected)) < TOLERANCE[wide]


@every_recurrence
def test_an_empty_path_leaves_every_bit_of_a_state(recurrence: Recurrence) -> None:
    problem = Problem.draw(recurrence, 2, 8, torch.float32)
    state = problem.state.clone()
    state[:, ::2] = -0.0
    state[0] = torch.where(state[0] > 1, torch.inf, state[0])
    before = state.clone()
    nodes = (None, 7)
    problem.commit(state, *oracles.paths_to(problem.parents, nodes))
    assert torch.equal(state[0].view(torch.int32), before[0].view(torch.int32))
    assert not torch.equal(state[1], before[1])
    for width in (0, 1):  # no path at all, and a path of nonsense only
        before = state.clone()
        path = torch.full((2, width), -1, dtype=torch.int32)
        problem.commit(state, path, torch.zeros(2, dtype=torch.int32))
        assert torch.equal(state.view(torch.int32), before.view(torch.int32))


@every_recurrence
def test_commit_ignores_rows_off_the_path_whatever_they_hold(recurrence: Recurrence) -> None:
    problem = Problem.draw(recurrence, 1, 6)
    path, lengths = torch.tensor([[0, -1, 10**6, 5]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    clean, dirty = problem.state.clone(), problem.state.clone()
    problem.commit(clean, path, lengths)
    rows = tuple(torch.cat((t[:, :1], torch.full_like(t[:, 1:], torch.nan)), 1) for t in problem.inputs)
    if recurrence.name in ("gated_delta", "kda"):
        _, k, _, g, _ = problem.inputs
        _, u = ops.gated_delta_tree_scan(*problem.inputs, problem.parents, problem.state)
        u = torch.cat((u[:, :1], torch.full_like(u[:, 1:], torch.nan)), 1)
        ops.gated_delta_commit(dirty, rows[1], u, rows[3], path, lengths)
    else:
        recurrence.commit(dirty, rows, problem.weights, problem.parents, path, lengths)
    assert torch.equal(clean, dirty)


@pytest.mark.slow
@every_recurrence
def test_two_thousand_commits_do_not_drift(recurrence: Recurrence) -> None:
    problem = Problem.draw(recurrence, 1, 5, torch.float32, seed=3)
    state, exact = problem.state.clone(), problem.state.double()[0]
    rng = torch.Generator().manual_seed(5)
    for step in range(2000):
        inputs = recurrence.draw(rng, 1, 4)
        end = int(torch.randint(0, 4, (), generator=rng))
        parents = oracles.random_parents(1, 4, rng)
        path, lengths = oracles.paths_to(parents, (end,))
        recurrence.commit(state, inputs, problem.weights, parents, path, lengths)
        nodes = oracles.path_to(parents[0].tolist(), end)
        chain = list(range(-1, len(nodes) - 1))
        exact = recurrence.oracle(tuple(t[0, nodes] for t in inputs), problem.weights, chain, exact)[1][-1]
        if step % 500 == 499:
            assert error(state[0], exact) < TOLERANCE[torch.float32]


@every_recurrence
def test_layers_may_be_stacked_into_the_batch_of_a_commit(recurrence: Recurrence) -> None:
    layers = [Problem.draw(recurrence, 2, 7, seed=0), Problem.draw(recurrence, 2, 7, seed=1)]
    weights = [tuple(w * (1 + i) for w in layer.weights) for i, layer in enumerate(layers)]
    path, lengths = oracles.paths_to(layers[0].parents, (6, 3))
    parents = layers[0].parents
    apart = [layer.state.clone() for layer in layers]
    for state, layer, own in zip(apart, layers, weights, strict=True):
        recurrence.commit(state, layer.inputs, own, parents, path, lengths)
    together = torch.cat([layer.state for layer in layers])
    inputs = tuple(torch.cat(pair) for pair in zip(*(layer.inputs for layer in layers), strict=True))
    stacked = tuple(torch.stack(pair).repeat_interleave(2, 0) for pair in zip(*weights, strict=True))
    twice = parents.repeat(2, 1)
    recurrence.commit(together, inputs, stacked, twice, path.repeat(2, 1), lengths.repeat(2))
    assert error(together, torch.cat(apart)) < TOLERANCE[torch.float64]


# Negative controls: what the tests above must be able to see.


@every_recurrence
@pytest.mark.parametrize("fault", ["chain", "zeroed state", "sibling leak"])
def test_a_wrong_tree_or_state_is_far_outside_the_tolerance(recurrence: Recurrence, fault: str) -> None:
    problem = Problem.draw(recurrence, 1, 8, torch.float32)
    tree = torch.tensor([[-1, 0, 0, 1, 1, 2, 2, 5]], dtype=torch.int32)
    expected = Problem(recurrence, problem.inputs, problem.weights, tree, problem.state).outputs()
    assert error(problem.scan(tree), expected) < TOLERANCE[torch.float32]
    if fault == "chain":
        wrong = problem.scan(torch.arange(-1, 7, dtype=torch.int32)[None])
    elif fault == "zeroed state":
        wrong = problem.scan(tree, torch.zeros_like(problem.state))
    else:
        mask = ancestor_mask(tree)
        mask[0, 2, 1] = True  # node 2 sees its sibling
        leaking = tree.clone()
        leaking[0, 2] = 1  # what a diagonal recurrence goes by
        wrong = problem.scan(Topology.of(leaking, mask=mask))
    assert error(wrong, expected) > 100 * TOLERANCE[torch.float32]


# Extremes.


@every_recurrence
@every_dtype
def test_extreme_decays_forget_all_or_nothing(recurrence: Recurrence, dtype: torch.dtype) -> None:
    problem = Problem.draw(recurrence, 2, 21, dtype)
    choice = torch.tensor([0.0, -1e-3, -0.5, -1e4])
    rng = torch.Generator().manual_seed(1)
    inputs, weights = list(problem.inputs), list(problem.weights)
    at = {"ssd": 1, "selective": 1, "gated_delta": 3, "kda": 3, "diagonal": 0}[recurrence.name]
    shape = inputs[at].shape
    inputs[at] = choice[torch.randint(0, 4, shape, generator=rng)].to(dtype)
    if recurrence.name in ("ssd", "selective"):
        inputs[at], weights[0] = -inputs[at], -torch.ones_like(weights[0])
        inputs[0] = inputs[0] / inputs[at].clamp(min=1)[(...,) + (None,) * (inputs[0].ndim - inputs[at].ndim)]
    extreme = Problem(recurrence, tuple(inputs), tuple(weights), problem.parents, problem.state)
    assert error(extreme.scan(), extreme.outputs()) < TOLERANCE[dtype]
    state = extreme.state.clone()
    extreme.commit(state, *oracles.paths_to(extreme.parents, (20, 17)))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ends = torch.stack([extreme.oracle(0)[1][20], extreme.oracle(1)[1][17]])
    assert error(state, ends) < TOLERANCE[wide]


def draw_correlated(cosine: float, n: int, dtype: torch.dtype) -> Problem:
    """Draw a delta rule whose keys all have this cosine to one direction, with beta up to 2 and weak decay."""
    recurrence = RECURRENCES[1]
    problem = Problem.draw(recurrence, 1, n, torch.float64, seed=2)
    _, k, v, g, beta = problem.inputs
    common = torch.zeros(5, dtype=torch.float64)
    common[0] = 1
    noise = k * torch.tensor([0.0, 1, 1, 1, 1], dtype=torch.float64)
    noise /= noise.norm(dim=-1, keepdim=True)
    k = cosine * common + (1 - cosine**2) ** 0.5 * noise
    beta = torch.where(beta > 1, 2.0, beta)
    inputs = tuple(t.to(dtype) for t in (k, k, v, g * 1e-3, beta))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    chain = torch.arange(-1, n - 1, dtype=torch.int32)[None]
    return Problem(recurrence, inputs, (), chain, problem.state.to(wide))


@every_dtype
@pytest.mark.parametrize("cosine", [0.9, 0.99, 1.0], ids=lambda c: f"cosine{c}")
def test_correlated_keys_of_a_chain_of_depth_63(cosine: float, dtype: torch.dtype) -> None:
    problem = draw_correlated(cosine, 64, dtype)
    # Keys that repeat with beta 2 never shrink an error, so it grows with depth; the doubling product is off by 1e14.
    assert error(problem.scan(), problem.outputs()) < 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("channels", [(), (5,)], ids=["gated_delta", "kda"])
@pytest.mark.parametrize("cuts", [(0, 1, 4, 9, 13), (0, 12, 13)], ids=str)
def test_gated_delta_grown_in_pieces_equals_one_call(channels: tuple[int, ...], cuts: tuple[int, ...]) -> None:
    problem = Problem.draw(make_gated_delta("", channels), 2, 13)
    whole, whole_u = ops.gated_delta_tree_scan(*problem.inputs, problem.parents, problem.state)
    u = torch.full((2, 16, 6, 3), torch.nan, dtype=torch.float64)
    for first, n in zip(cuts, cuts[1:], strict=False):
        rows = tuple(t[:, :n] for t in problem.inputs)
        parents = problem.parents[:, :n].contiguous()
        o, u_rows = ops.gated_delta_tree_scan(*rows, parents, problem.state, first=first, u=u)
        u[:, first:n] = u_rows[:, first:]
        assert error(o, whole[:, first:n]) < TOLERANCE[torch.float64]
    assert error(u[:, :13], whole_u) < TOLERANCE[torch.float64]


# Convolution.


def draw_conv(dtype: torch.dtype, n: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x, window = torch.randn(2, n, 5, generator=rng), torch.randn(2, 5, width - 1, generator=rng)
    weight, bias = torch.randn(5, width, generator=rng), torch.randn(5, generator=rng)
    parents = oracles.random_parents(2, n, rng, min(1, n - 1))
    return x.to(dtype), window.to(dtype), weight.to(dtype), bias.to(dtype), parents


@pytest.mark.parametrize(
    ("dtype", "n", "width", "plain"),
    [(dtype, 13, 4, False) for dtype in DTYPES]
    + [
        (torch.float64, n, width, plain)
        for n, width, plain in ((1, 4, True), (2, 4, False), (13, 2, True), (13, 1, False))
    ],
    ids=str,
)
def test_conv_follows_the_path_into_the_window(n: int, width: int, plain: bool, dtype: torch.dtype) -> None:
    x, window, weight, bias, parents = draw_conv(dtype, n, width)
    taps = None if plain else bias
    y = ops.tree_conv1d(x, weight, taps, parents, window, activation=None if plain else "silu")
    assert y.dtype == dtype
    expected = [oracles.conv(x[b], weight, taps, parents[b].tolist(), window[b], not plain)[0] for b in range(2)]
    assert error(y, torch.stack(expected)) < TOLERANCE[dtype]


@pytest.mark.parametrize("first", [1, 7, 12])
def test_conv_from_a_first_row_equals_the_last_rows(first: int) -> None:
    x, window, weight, bias, parents = draw_conv(torch.float64, 13, 4)
    whole = ops.tree_conv1d(x, weight, bias, parents, window)
    assert torch.equal(ops.tree_conv1d(x, weight, bias, parents, window, first=first), whole[:, first:])


@pytest.mark.parametrize("width", [1, 2, 4, 7], ids=lambda w: f"width{w}")
@pytest.mark.parametrize("ends", [(0, 11), (None, 5), (None, None)], ids=str)
def test_conv_commit_moves_the_accepted_rows_in(width: int, ends: tuple[int | None, ...]) -> None:
    x, window, weight, bias, parents = draw_conv(torch.float32, 13, width)
    expected = window.clone()
    for row, end in enumerate(ends):
        if end is not None:
            expected[row] = oracles.conv(x[row], weight, bias, parents[row].tolist(), window[row], True)[1][end]
    ops.conv_commit(window, x, *oracles.paths_to(parents, ends))
    assert torch.equal(window, expected)


# Attention.


@dataclass(frozen=True)
class Attention:
    """A drawn instance of attention: two sequences, one with an empty context."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor
    k: Tensor
    v: Tensor
    parents: Tensor

    @classmethod
    def draw(cls, dtype: torch.dtype, n: int, heads: tuple[int, int] = (6, 2)) -> Attention:
        rng = torch.Generator().manual_seed(0)
        drawn = (
            (2, n, heads[0], 5),
            (2, heads[1], 9, 5),
            (2, heads[1], 9, 3),
            (2, n, heads[1], 5),
            (2, n, heads[1], 3),
        )
        q, k_cache, v_cache, k, v = (torch.randn(shape, generator=rng).to(dtype) for shape in drawn)
        lengths = torch.tensor([0, 7], dtype=torch.int32)
        return cls(q, k_cache, v_cache, lengths, k, v, oracles.random_parents(2, n, rng))

    def run(self, first: int = 0, **options: float | None) -> Tensor:
        q, n = self.q[:, first:], self.q.shape[1]
        return ops.tree_attention(
            q, self.k_cache, self.v_cache, self.lengths, self.k[:, :n], self.v[:, :n], self.parents, scale=0.4,
            first=first, **options,
        )  # fmt: skip

    def oracle(self, **options: float | None) -> Tensor:
        rows = []
        for b, length in enumerate(self.lengths.tolist()):
            k_context, v_context = self.k_cache[b, :, :length], self.v_cache[b, :, :length]
            parents = self.parents[b].tolist()
            rows.append(
                oracles.attention(
                    self.q[b],
                    k_context,
                    v_context,
                    self.k[b],
                    self.v[b],
                    parents,
                    scale=0.4,
                    **options,
                )  # fmt: skip
            )
        return torch.stack(rows)


@pytest.mark.parametrize(
    ("dtype", "n", "heads", "options"),
    [(dtype, 13, (6, 2), {"softcap": 0.7, "window": 9}) for dtype in DTYPES]
    + [
        (torch.float64, 13, (4, 4), {}),
        (torch.float64, 13, (3, 1), {"window": 4}),
        (torch.float64, 13, (6, 2), {"window": 1}),
        (torch.float64, 1, (6, 2), {}),
        (torch.float64, 1, (3, 1), {"window": 4}),
    ],
    ids=str,
)
def test_attention_sees_the_context_and_its_own_path(
    dtype: torch.dtype, n: int, heads: tuple[int, int], options: dict[str, float]
) -> None:
    problem = Attention.draw(dtype, n, heads)
    y = problem.run(**options)
    assert y.dtype == dtype and y.is_contiguous()
    assert error(y, problem.oracle(**options)) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 4])
def test_attention_from_a_first_row_equals_the_last_rows(window: int | None) -> None:
    problem = Attention.draw(torch.float64, 13)
    assert error(problem.run(first=5, window=window), problem.run(window=window)[:, 5:]) < TOLERANCE[torch.float64]


def test_rows_beyond_the_length_do_not_leak() -> None:
    problem = Attention.draw(torch.float32, 7)
    before = problem.run()
    for cache in (problem.k_cache, problem.v_cache):
        cache[0] = 1e30
        cache[1, :, 7:] = -1e30
    assert torch.equal(problem.run(), before)


def test_attention_of_a_leaking_mask_is_far_outside_the_tolerance() -> None:
    problem = Attention.draw(torch.float32, 9)
    chain = Topology.of(torch.arange(-1, 8, dtype=torch.int32).expand(2, 9))
    wrong = Attention(
        problem.q, problem.k_cache, problem.v_cache, problem.lengths, problem.k, problem.v, chain.parents
    ).run()
    assert error(wrong, problem.oracle()) > 100 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("ends", [(12, 3), (None, 12), (None, None)], ids=str)
def test_kv_commit_appends_the_path_and_touches_nothing_else(ends: tuple[int | None, ...]) -> None:
    problem = Attention.draw(torch.float32, 13)
    expected = problem.k_cache.clone(), problem.v_cache.clone()
    for b, end in enumerate(ends):
        for t, node in enumerate([] if end is None else oracles.path_to(problem.parents[b].tolist(), end)):
            place = int(problem.lengths[b]) + t
            if place < 9:  # a path that does not fit is cut at the end of the cache
                expected[0][b, :, place] = problem.k[b, node]
                expected[1][b, :, place] = problem.v[b, node]
    lengths = problem.lengths.clone()
    path = oracles.paths_to(problem.parents, ends)
    ops.kv_commit(problem.k_cache, problem.v_cache, problem.lengths, problem.k, problem.v, *path)
    assert torch.equal(problem.k_cache, expected[0]) and torch.equal(problem.v_cache, expected[1])
    assert torch.equal(problem.lengths, lengths)


def test_an_accepted_path_serves_every_commit() -> None:
    x, window, _, _, parents = draw_conv(torch.float32, 13, 4)
    path, lengths = oracles.paths_to(parents, (4, 11))
    for accepted in (AcceptedPath.of(path, lengths, 4), AcceptedPath.of(path, lengths)):
        ours, theirs = window.clone(), window.clone()
        ops.conv_commit(ours, x, accepted, None)
        ops.conv_commit(theirs, x, path, lengths)
        assert torch.equal(ours, theirs)
