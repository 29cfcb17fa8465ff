"""Random numbers, draws and MATCH of stree.kernels.ops against stree.sampling and stree.verify, kernels interpreted.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_sampling.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from helpers import oracles
from helpers.fast_cases import slow_unless
from helpers.host_reads import NoHostReads
from helpers.launch_keys import Key, launch_keys
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stree import Sampling, TokenTree, accept
from stree.kernels.ops import (
    Backend,
    MatchedPath,
    choice,
    draw_distinct,
    match_accept,
    philox_uniform,
)
from stree.kernels.sampling import blocks
from stree.kernels.sampling.blocks import BLOCK
from stree.kernels.sampling.kernel import draw_kernel, walk_kernel
from stree.kernels.topology import Topology
from stree.sampling import Random
from stree.verify import Acceptance
from stree.verify.match import match, match_by_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS: tuple[Backend, ...] = ("reference", "triton")
SEEDS = (0, 1, 2**31, 2**40 + 3, 2**63 + 1, -1)
by_backend = pytest.mark.parametrize("backend", BACKENDS)


@dataclass(frozen=True)
class Problem:
    """A batch of trees with few different tokens, so that paths match often, and the target's logits."""

    tree: TokenTree
    logits: Tensor
    seed: int
    sequences: Tensor
    positions: Tensor

    @classmethod
    def draw(
        cls, n: int, vocab: int, *, seed: int = 0, batch: int = 3, padding: int = 0, favoured: float = 3.0
    ) -> Problem:
        rng = torch.Generator().manual_seed(seed)
        parents = oracles.random_parents(batch, n, rng, padding)
        tokens = torch.randint(0, min(vocab, 3), (batch, n), generator=rng)  # siblings of one token among them
        tokens[(parents < 0) & (torch.arange(n) > 0)] = 0
        logits = torch.randn(batch, n, vocab, generator=rng)
        logits[..., :3] += favoured
        sequences = torch.randint(0, 2**40, (batch,), generator=rng)
        positions = torch.randint(0, 2**20, (batch,), generator=rng)
        return cls(TokenTree(tokens, parents), logits, SEEDS[seed % len(SEEDS)], sequences, positions)

    def expected(self, sampling: Sampling) -> Acceptance:
        rng = Random(self.seed, self.sequences, self.positions)
        return accept(self.tree, self.logits, sampling, rng, verifier="match")

    def walk(self, sampling: Sampling, backend: Backend, offset: int = 0, parents: Tensor | None = None) -> MatchedPath:
        tokens, depth = self.tree.tokens.to(DEVICE), int(self.tree.depths.max())
        parents = self.tree.parents if parents is None else parents
        if sampling.is_greedy:
            return match_accept(tokens, parents.to(DEVICE), self.logits.to(DEVICE), max_depth=depth, backend=backend)
        dist = sampling.probs(self.logits).to(DEVICE)
        words = self.sequences.to(DEVICE), self.positions.to(DEVICE) + offset
        return match_accept(
            tokens, parents.to(DEVICE), dist, max_depth=depth, seed=self.seed, sequences=words[0], positions=words[1],
            backend=backend,
        )  # fmt: skip


def is_same(found: MatchedPath, expected: Acceptance) -> bool:
    """Tell whether all three tensors are equal, dtypes too."""
    pairs = ((getattr(found, name).cpu(), getattr(expected, name)) for name in MatchedPath.__slots__)
    return all(left.dtype == right.dtype and torch.equal(left, right) for left, right in pairs)


@pytest.mark.parametrize(
    ("vocab", "count", "sharpness"),
    slow_unless(
        lambda vocab, _, sharpness: vocab < 999 and sharpness == 3 or vocab == 101,
        [(*sizes, sharpness) for sizes in ((3, 4), (101, 1), (4097, 6), (9000, 12)) for sharpness in (0.0, 3.0, 30.0)],
    ),
)
def test_distinct_draws_are_choices_from_what_the_earlier_ones_leave(vocab: int, count: int, sharpness: float) -> None:
    rng = torch.Generator().manual_seed(vocab)
    dist = (sharpness * torch.randn(2, 3, vocab, generator=rng)).softmax(-1).to(DEVICE)
    dist[0, 1] = torch.tensor([0.3, 0.2] + [0.0] * (vocab - 2))
    dist[1, 2] = 0.0
    uniform = torch.rand(2, 3, count, generator=rng, dtype=torch.float64).to(DEVICE)
    uniform[0, 0, -1] = 1 - 2.0**-53
    least = 2.0**-20
    tokens, probs = draw_distinct(dist, uniform, least=least, backend="triton")
    left, is_left = dist.clone(), probs > 0
    for place in range(count):
        assert torch.equal(is_left[..., place], left.double().sum(-1) > least * dist.double().sum(-1))
        one = choice(left, uniform[..., place].contiguous(), backend="reference")
        assert torch.equal(tokens[..., place][is_left[..., place]], one[is_left[..., place]])
        assert torch.equal(probs[..., place], dist.gather(-1, one[..., None]).squeeze(-1) * is_left[..., place])
        left.scatter_(-1, tokens[..., place, None], 0.0)
    expected = draw_distinct(dist, uniform, least=least, backend="reference")
    assert torch.equal(probs, expected[1]) and torch.equal(tokens[is_left], expected[0][is_left])
    strided = draw_distinct(dist.repeat(1, 2, 1)[:, ::2], uniform, least=least, backend="triton")
    assert strided[0].shape == uniform.shape
    for numbers in (torch.nn.functional.pad(uniform, (0, 3))[..., :count], uniform.mT.contiguous().mT):
        again = draw_distinct(dist, numbers, least=least, backend="triton")
        assert torch.equal(again[1], probs) and torch.equal(again[0], tokens)
    with pytest.raises(ValueError, match="uniform must be float64"):
        draw_distinct(dist, uniform[:1], least=least)


@pytest.mark.slow
def test_no_layer_of_a_tree_asks_for_a_build_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(rows: int, count: int, vocab: int = 101) -> list[Key]:
        dist = torch.full((2, rows, vocab), 1 / vocab, device=DEVICE)
        with launch_keys(monkeypatch) as seen:
            draw_distinct(dist, torch.zeros(2, rows, count, dtype=torch.float64, device=DEVICE), backend="triton")
        return seen

    first = keys(1, 4)
    assert [name for name, _ in first] == ["blocks_kernel", "distinct_kernel"]
    assert keys(16, 3) == first == keys(17, 4)
    assert keys(1, 4, 5000) != first


@by_backend
@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed{seed}")
def test_numbers_are_those_of_the_sampler_bit_for_bit(seed: int, backend: Backend) -> None:
    rng = torch.Generator().manual_seed(3)
    position, sequence, node = torch.randint(-(2**40), 2**40, (3, 5, 27), generator=rng)
    for purpose, number in (("target", 0), ("accept", 1), ("draft", 2)):
        rows = Random(seed, sequence.flatten(), torch.zeros(135, dtype=torch.long))
        expected = rows.uniform(purpose, position.flatten(), node.flatten()).view(5, 27)
        words = (position.to(DEVICE), sequence.to(DEVICE), node.to(DEVICE))
        found = philox_uniform(*words, seed=seed, purpose=number, backend=backend)
        assert torch.equal(found.cpu(), expected) and found.dtype == torch.float64


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 7, 33, 4096, 5001]), st.booleans())
@settings(max_examples=12, deadline=None)
@pytest.mark.slow
def test_choice_is_that_of_the_sampler(seed: int, vocab: int, is_sparse: bool) -> None:
    rng = torch.Generator().manual_seed(seed)
    dist = (3 * torch.randn(9, vocab, generator=rng)).softmax(-1)
    if is_sparse:
        dist = dist * (torch.rand(9, vocab, generator=rng) < 0.3)
        dist[0] = 0  # nothing to draw
    rows = Random(seed, torch.arange(9), torch.zeros(9, dtype=torch.long))
    offset = torch.arange(9)
    uniform = rows.uniform("target", offset).to(DEVICE)
    expected = rows.choice("target", dist, offset)
    for backend in BACKENDS:
        assert torch.equal(choice(dist.to(DEVICE), uniform, backend=backend).cpu(), expected)


@by_backend
def test_choice_on_every_boundary_takes_what_begins_there_and_never_a_weight_of_zero(backend: Backend) -> None:
    dist = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.0, 0.125, 0.125, 0.0], device=DEVICE)
    last = 1 - 2.0**-53
    numbers = torch.tensor([0.0, 0.25, 0.75, 0.875, last, 0.25 - 2.0**-53, 0.75 - 2.0**-53], dtype=torch.float64)
    expected = [1, 3, 5, 6, 6, 1, 3]
    for factor in (1.0, 2.0**-20, 3.0):
        dists = (dist * factor).expand(7, 8)
        assert choice(dists, numbers.to(DEVICE), backend=backend).tolist() == expected
    third = torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.0], device=DEVICE)  # the product of number and total may round up
    assert choice(third, torch.tensor(last, dtype=torch.float64, device=DEVICE), backend=backend).item() == 2


def test_sums_of_a_whole_vocabulary_are_the_same_in_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    dist = (4 * torch.randn(6, 40_003, generator=torch.Generator().manual_seed(0))).softmax(-1).to(DEVICE)
    uniform = torch.rand(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(DEVICE)
    expected = choice(dist, uniform, backend="reference")
    for block in (512, 4096, 65536):
        monkeypatch.setattr(blocks, "BLOCK", block)
        assert torch.equal(choice(dist, uniform, backend="triton"), expected)


@pytest.mark.slow
@given(st.integers(0, 10**6), st.integers(1, 40), st.sampled_from([3, 31, 200]), st.integers(0, 3))
@settings(max_examples=12, deadline=None)
def test_walks_are_those_of_the_verifier(seed: int, n: int, vocab: int, padding: int) -> None:
    problem = Problem.draw(n, vocab, seed=seed, padding=min(padding, n - 1))
    for sampling in (Sampling(), Sampling(temperature=1.3, top_k=20)):
        expected = problem.expected(sampling)
        for backend in BACKENDS:
            assert is_same(problem.walk(sampling, backend), expected)


@by_backend
@pytest.mark.parametrize("temperature", [0.0, 1.1])
def test_the_rule_of_a_gpu_accepts_what_that_of_the_host_accepts(temperature: float, backend: Backend) -> None:
    problem, sampling = Problem.draw(17, 40, seed=2, padding=2), Sampling(temperature=temperature)
    rng = Random(7, problem.sequences, problem.positions.int())
    depth = int(problem.tree.depths.max())
    host = match(problem.tree, problem.logits, sampling, rng, depth)
    found = match_by_kernels(problem.tree, problem.logits, sampling, rng, depth, backend)
    assert all(torch.equal(getattr(found, name), getattr(host, name)) for name in MatchedPath.__slots__)
    assert int(host.path_lengths.max()) > 1


@by_backend
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_chain_a_star_and_a_single_node_are_walked(temperature: float, backend: Backend) -> None:
    shapes = torch.arange(-1, 16), -(torch.arange(17) == 0).int(), torch.tensor([-1])
    longest = 0
    for shape in shapes:
        n = len(shape)
        problem = Problem.draw(n, 3, favoured=0.0)
        tree = TokenTree(problem.tree.tokens[:1], shape[None].int())
        logits = 0.1 * problem.logits[:1]
        logits[0, :-1].scatter_(1, problem.tree.tokens[0, 1:, None], 6.0)  # on a chain nearly every token matches
        problem = Problem(tree, logits, 5, problem.sequences[:1], problem.positions[:1])
        expected = problem.expected(Sampling(temperature=temperature))
        assert is_same(problem.walk(Sampling(temperature=temperature), backend), expected)
        longest = max(longest, int(expected.path_lengths))
    assert longest > 5


@by_backend
def test_of_equal_logits_the_first_is_drawn_and_of_equal_siblings_the_one_that_goes_deeper(backend: Backend) -> None:
    tokens, parents = torch.tensor([[9, 4, 4, 4, 2]]), torch.tensor([[-1, 0, 0, 0, 2]], dtype=torch.int32)
    logits = torch.zeros(1, 5, 5)
    logits[0, 0, 4], logits[0, 2, 2:] = 1, 1
    walk = match_accept(tokens.to(DEVICE), parents.to(DEVICE), logits.to(DEVICE), backend=backend)
    assert walk.path.tolist() == [[0, 2, 4, -1, -1]] and walk.next_token.tolist() == [0]
    walk = match_accept(tokens[:, :4].to(DEVICE), parents[:, :4].to(DEVICE), logits[:, :4].to(DEVICE), backend=backend)
    assert walk.path.tolist() == [[0, 1, -1, -1]] and walk.next_token.tolist() == [0]


@by_backend
def test_a_walk_reads_nothing_of_the_device(backend: Backend) -> None:
    problem = Problem.draw(9, 40)
    tokens, dist = problem.tree.tokens, problem.logits.softmax(-1)
    operands = tokens.to(DEVICE), Topology.of(problem.tree.parents.to(DEVICE)), dist.to(DEVICE)
    words = problem.sequences.to(DEVICE), problem.positions.to(DEVICE)
    with NoHostReads():
        match_accept(*operands, max_depth=3, backend=backend)
        match_accept(*operands, max_depth=3, seed=3, sequences=words[0], positions=words[1], backend=backend)


@by_backend
def test_trees_that_are_parts_of_wider_tensors_are_walked_as_their_own(backend: Backend) -> None:
    problem, sampling = Problem.draw(9, 5, seed=2), Sampling(temperature=1.1)
    tree, expected = problem.tree, problem.expected(sampling)
    parents, depths = (F.pad(part.to(DEVICE), (0, 5), value=8)[:, :9] for part in (tree.parents, tree.depths))
    mask = F.pad(tree.ancestor_mask.to(DEVICE), (0, 5, 0, 5), value=True)[:, :9, :9]
    walk = match_accept(
        F.pad(tree.tokens.to(DEVICE), (0, 5))[:, :9], Topology.of(parents, mask=mask, depths=depths),
        sampling.probs(problem.logits).to(DEVICE), max_depth=int(tree.depths.max()), seed=problem.seed,
        sequences=problem.sequences.to(DEVICE), positions=problem.positions.to(DEVICE), backend=backend,
    )  # fmt: skip
    assert is_same(walk, expected) and int(expected.path_lengths.max()) > 1


@by_backend
def test_a_bound_below_the_depth_cuts_the_path_and_nothing_else(backend: Backend) -> None:
    tokens, parents = torch.tensor([[1, 2, 3, 4, 0]] * 2), torch.arange(-1, 4, dtype=torch.int32).expand(2, -1)
    logits = torch.eye(5)[[2, 3, 4, 0, 1]].expand(2, -1, -1).contiguous()
    operands = tokens.to(DEVICE), parents.contiguous().to(DEVICE), logits.to(DEVICE)
    walk = match_accept(*operands, max_depth=1, backend=backend)
    assert walk.path.tolist() == [[0, 1]] * 2 and walk.path_lengths.tolist() == [5, 5]
    assert walk.next_token.tolist() == [1, 1]


def test_a_whole_vocabulary_of_bfloat16_logits_with_strides_is_searched() -> None:
    logits = torch.randn(2, 5, 9001, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    logits[0, 0, [10, 10 + BLOCK, 10 + 2 * BLOCK]] = 9.0  # equals in one lane of different passes
    tokens, parents = torch.zeros(2, 5, dtype=torch.long, device=DEVICE), torch.zeros(2, 5, dtype=torch.int32) - 1
    padded = torch.nn.functional.pad(logits, (0, 7), value=torch.inf)[..., :9001]
    walk = match_accept(tokens, parents.to(DEVICE), padded, backend="triton")
    assert torch.equal(walk.next_token, logits[:, 0].argmax(-1))


def _younger_first(problem: Problem) -> Problem:
    """Turn the order of all nodes but the root around where no parent comes after its child."""
    order = torch.tensor([0, *range(problem.tree.tokens.shape[1] - 1, 0, -1)])
    tree = TokenTree(problem.tree.tokens[:, order], problem.tree.parents)
    return Problem(tree, problem.logits, problem.seed, problem.sequences, problem.positions)


# What is wrong, and how a walk that is wrong so is made.
CONTROLS: dict[str, Callable[[Problem, Sampling], MatchedPath]] = {
    "numbers of the position before": lambda problem, sampling: problem.walk(sampling, "triton", offset=-1),
    "numbers of the position after": lambda problem, sampling: problem.walk(sampling, "triton", offset=1),
    "siblings in the wrong order": lambda problem, sampling: _younger_first(problem).walk(sampling, "triton"),
    "all nodes below the root": lambda problem, sampling: problem.walk(
        sampling, "triton", parents=-(torch.arange(problem.tree.tokens.shape[1]) == 0).int().expand(3, -1)
    ),
    "a greedy walk": lambda problem, _: problem.walk(Sampling(), "triton"),
}


@pytest.mark.parametrize("control", slow_unless(lambda name: name == "siblings in the wrong order", CONTROLS))
def test_a_walk_that_is_wrong_in_one_thing_is_rejected(control: str) -> None:
    problem, sampling = Problem.draw(12, 7, seed=4, favoured=1.0), Sampling(temperature=1.0)
    expected = problem.expected(sampling)
    assert is_same(problem.walk(sampling, "triton"), expected)
    assert not is_same(CONTROLS[control](problem, sampling), expected)


def test_what_cannot_be_taken_is_refused() -> None:
    problem = Problem.draw(3, 5)
    tokens, parents, logits = problem.tree.tokens, problem.tree.parents, problem.logits
    words = problem.sequences, problem.positions
    with pytest.raises(ValueError, match=r"parents must be int32\[3, 2\], for 2 rows of tokens, got int32\[3, 3\]"):
        match_accept(tokens[:, :2], parents, logits)
    with pytest.raises(ValueError, match=r"parents must be int32\[3, 3\], for 3 rows of tokens, got int32\[3, 2\]"):
        match_accept(tokens, parents[:, :2], logits)
    with pytest.raises(ValueError, match=r"scores must be \[b, n, vocab\], got float32\[3, 3\]"):
        match_accept(tokens, parents, logits[..., 0])
    with pytest.raises(
        ValueError, match="seed, sequences and positions go together, got seed None and sequences tensor"
    ):
        match_accept(tokens, parents, logits, sequences=words[0], positions=words[1])
    with pytest.raises(ValueError, match="seed, sequences and positions go together, got seed 1 and positions None"):
        match_accept(tokens, parents, logits, seed=1, sequences=words[0])
    with pytest.raises(TypeError, match=r"positions must be int64\[3\], got int32\[3\]"):
        match_accept(tokens, parents, logits, seed=1, sequences=words[0], positions=words[1].int())
    with pytest.raises(ValueError, match="max_depth must not be negative, got -1"):
        match_accept(tokens, parents, logits, max_depth=-1)
    with pytest.raises(ValueError, match="choice needs that vocab > 0, got vocab = 0"):
        choice(torch.zeros(2, 0), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"uniform must be float64\[2\], got float32\[2\]"):
        choice(torch.ones(2, 3), torch.zeros(2))
    with pytest.raises(TypeError, match="choice with backend='triton' takes float32, bfloat16 or float16"):
        choice(torch.ones(2, 3).double(), torch.zeros(2, dtype=torch.float64), backend="triton")
    with pytest.raises(
        NotImplementedError, match="choice with backend='triton' takes a vocabulary up to 1048576, got 1048577"
    ):
        choice(torch.ones(1, 2**20 + 1), torch.zeros(1, dtype=torch.float64), backend="triton")
    with pytest.raises(ValueError, match=r"node must be int64\[2\], got int64\[3\]"):
        philox_uniform(words[0][:2], words[0][:2], words[0], seed=0)
    long = torch.arange(-1, 128, dtype=torch.int32)[None]
    with pytest.raises(
        NotImplementedError, match="match_accept with backend='triton' takes trees of nodes up to 128, got 129"
    ):
        match_accept(torch.zeros(1, 129, dtype=torch.long), long, torch.zeros(1, 129, 2), backend="triton")


def test_without_a_gpu_or_the_interpreter_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if DEVICE == "cpu":
        with pytest.raises(RuntimeError, match="choice with backend='triton' needs CUDA tensors, got a tensor on cpu"):
            choice(torch.ones(1, 2), torch.zeros(1, dtype=torch.float64), backend="triton")


def keys_of(monkeypatch: pytest.MonkeyPatch, n: int, vocab: int, sampling: Sampling, batch: int = 1) -> list[Key]:
    problem = Problem.draw(n, vocab, batch=batch)
    with launch_keys(monkeypatch) as keys:
        problem.walk(sampling, "triton")
    return keys


@pytest.mark.parametrize(
    ("vocab", "temperature"),
    slow_unless(lambda *_: False, itertools.product((101, 128), (0.0, 1.0))),
)
def test_no_tree_of_a_generation_asks_for_a_build_of_its_own(
    monkeypatch: pytest.MonkeyPatch, vocab: int, temperature: float
) -> None:
    sampling = Sampling(temperature)
    first = keys_of(monkeypatch, 7, vocab, sampling)
    assert [name for name, _ in first] == ["blocks_kernel", "draw_kernel", "walk_kernel"]
    for n, batch in ((1, 1), (16, 1), (2, 8), (16, 16)):
        assert keys_of(monkeypatch, n, vocab, sampling, batch) == first
    assert keys_of(monkeypatch, 17, vocab, sampling) != first, "a wider walk is another build, and its key shows it"


def test_a_kernel_that_specialises_its_integers_has_another_key_for_one_and_for_sixteen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kernel in (draw_kernel, walk_kernel):
        options = "kwargs" if hasattr(kernel, "kwargs") else "__dict__"
        monkeypatch.setitem(getattr(kernel, options), "do_not_specialize", [])
    seen = {tuple(keys_of(monkeypatch, n, 101, Sampling(0.0))) for n in (1, 7, 16)}
    assert len(seen) == 3
