"""MATCH of stree.kernels.ops against stree.verify, kernels interpreted.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_match.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from helpers import oracles
from helpers.fast_cases import slow_unless
from helpers.on_device import NoHostReads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stree import Sampling, TokenTree, accept
from stree.kernels.ops import Backend, MatchedPath, match_accept
from stree.kernels.sampling.blocks import BLOCK
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


@pytest.mark.slow
@given(st.integers(0, 10**6), st.integers(1, 40), st.sampled_from([3, 31, 200]), st.integers(0, 3))
@settings(max_examples=2, deadline=None)
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


SMALL = Problem.draw(3, 5)
TREE, WORDS = (SMALL.tree.tokens, SMALL.tree.parents, SMALL.logits), (SMALL.sequences, SMALL.positions)
CHAIN_129 = torch.arange(-1, 128, dtype=torch.int32)[None]
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: match_accept(TREE[0][:, :2], *TREE[1:]), ValueError,
     r"parents must be int32\[3, 2\], for 2 rows of tokens, got int32\[3, 3\]"),
    (lambda: match_accept(TREE[0], TREE[1][:, :2], TREE[2]), ValueError,
     r"parents must be int32\[3, 3\], for 3 rows of tokens, got int32\[3, 2\]"),
    (lambda: match_accept(*TREE[:2], TREE[2][..., 0]), ValueError,
     r"scores must be \[b, n, vocab\], got float32\[3, 3\]"),
    (lambda: match_accept(*TREE, sequences=WORDS[0], positions=WORDS[1]), ValueError,
     "seed, sequences and positions go together, got seed None and sequences tensor"),
    (lambda: match_accept(*TREE, seed=1, sequences=WORDS[0]), ValueError,
     "seed, sequences and positions go together, got seed 1 and positions None"),
    (lambda: match_accept(*TREE, seed=1, sequences=WORDS[0], positions=WORDS[1].int()), TypeError,
     r"positions must be int64\[3\], got int32\[3\]"),
    (lambda: match_accept(*TREE, max_depth=-1), ValueError, "max_depth must not be negative, got -1"),
    (lambda: match_accept(CHAIN_129.long(), CHAIN_129, torch.zeros(1, 129, 2), backend="triton"), NotImplementedError,
     "match_accept with backend='triton' takes trees of nodes up to 128, got 129"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED, ids=[row[2][:40] for row in REFUSED])
def test_what_cannot_be_taken_is_refused(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
