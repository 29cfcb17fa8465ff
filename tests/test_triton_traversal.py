"""stree.kernels.traversal_door against stree.verify.traversal, its kernels interpreted on the CPU.

Run: TRITON_INTERPRET=1 python -m pytest tests/test_triton_traversal.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import oracles
import pytest
import torch
from host_reads import NoHostReads
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from launch_keys import Key, launch_keys
from torch import Tensor

from stree import TokenTree
from stree.kernels import traversal as kernels
from stree.kernels.traversal_door import DraftRows, TraversedPath
from stree.kernels.traversal_door import traverse as traverse_on_device
from stree.sampling import PURPOSES, Random
from stree.verify import DraftLaws
from stree.verify.traversal import _hold, _hold_chain, traverse, traverse_by_kernels
from stree.verify.trials import Trials
from stree.verify.values import DELTA, INDEPENDENT, SAMPLED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Sums of float32 laws, each weight rounded to 2^-24; a test divides by what is left, of which most laws keep a tenth.
CLOSE = 5e-6
STAR = [-1, *[0] * 11]


@dataclass(frozen=True)
class Problem:
    """A batch of trees and the laws that their nodes are tested with."""

    tree: TokenTree
    law: Tensor
    draft: DraftLaws | None
    rng: Random

    @classmethod
    def draw(
        cls,
        n: int,
        vocab: int,
        *,
        seed: int = 0,
        batch: int = 3,
        padding: int = 0,
        kinds: tuple[int, ...] = (SAMPLED, DELTA, INDEPENDENT),
        zeros: float = 0.0,
        shape: list[int] | None = None,
        sharp: float = 1.0,
    ) -> Problem:
        """Draw trees whose laws differ by factors of about two; of the laws some weights are zero."""
        rng = torch.Generator().manual_seed(seed)
        parents = oracles.random_parents(batch, n, rng, padding)
        if shape is not None:
            parents = torch.tensor(shape, dtype=torch.int32).expand(batch, n).contiguous()
        target = sharp * torch.randn(batch, n, vocab, generator=rng)
        target = target.masked_fill(torch.rand(batch, n, vocab, generator=rng) < zeros, -torch.inf)
        target[..., 0] = 1.0
        stored = target + 0.7 * torch.randn(batch, n, vocab, generator=rng)
        stored[..., 1] = 0.0
        row = parents.clamp(min=0)
        law, probs = target.softmax(-1), stored.softmax(-1)
        tokens = torch.zeros(batch, n, dtype=torch.long)
        kind = torch.tensor(kinds)[torch.randint(len(kinds), (batch, n), generator=rng)].to(torch.int8)
        for b in range(batch):
            for i in range(1, n):
                if parents[b, i] >= 0:
                    own = probs[b, row[b, i]].clone()
                    if kind[b, i] == SAMPLED:
                        own[tokens[b, 1:i][parents[b, 1:i] == parents[b, i]]] = 0
                    tokens[b, i] = torch.multinomial(own + 1e-9, 1, generator=rng)
        draft = DraftLaws(probs, row, kind, max_children=None) if kinds != (DELTA,) else None
        sequences, positions = torch.randint(0, 2**20, (2, batch), generator=rng)
        return cls(TokenTree(tokens, parents), law, draft, Random(seed, sequences, positions))

    def moved(self) -> Problem:
        """Give the same on the device."""
        tree, draft, rng = self.tree, self.draft, self.rng
        words = (tensor.to(DEVICE) for tensor in (tree.tokens, tree.parents, tree.depths, tree.ancestor_mask))
        if draft is not None:
            laws = draft.probs.to(DEVICE), draft.row.to(DEVICE), draft.kind.to(DEVICE)
            draft = DraftLaws(*laws, draft.max_children)
        rng = Random(rng.seed, rng.sequences.to(DEVICE), rng.positions.to(DEVICE))
        return Problem(TokenTree.unchecked(*words), self.law.to(DEVICE), draft, rng)

    @property
    def depth(self) -> int:
        """Depth of the deepest tree."""
        return int(self.tree.depths.max())

    def wide(self, kind: int | None = None) -> tuple[Tensor, Tensor]:
        """Compute coins and ratios in float64, of nodes of another kind if one is given."""
        draft = self.draft
        if draft is not None:
            given = draft.kind if kind is None else torch.full_like(draft.kind, kind)
            draft = replace(draft, probs=draft.probs.double(), kind=given)
        trials = Trials(self.tree, self.law.double(), draft)
        return self._hold(trials), trials.ratio[:, :-1].clamp(max=1)

    def narrow(self) -> Tensor:
        """Compute coins in float32, in torch."""
        return self._hold(Trials(self.tree, self.law.clone(), self.draft))

    def _hold(self, trials: Trials) -> Tensor:
        chains = trials.siblings.most == 1
        return _hold_chain(trials, self.depth) if chains else _hold(self.tree, trials, self.depth)

    def found(self, max_children: int | None = None) -> TraversedPath:
        """Run the kernels."""
        moved, rows = self.moved(), None
        tree, rng = moved.tree, moved.rng
        if moved.draft is not None:
            rows = DraftRows(moved.draft.probs, moved.draft.row, moved.draft.kind, DELTA, INDEPENDENT)
        return traverse_on_device(
            tree.tokens, tree.parents, tree.ancestor_mask, tree.depths, moved.law, rows, max_depth=self.depth,
            max_children=max_children, seed=rng.seed, sequences=rng.sequences, positions=rng.positions,
        )  # fmt: skip

    def error(self, coins: Tensor, ratios: Tensor, found: TraversedPath) -> float:
        """Measure how far the kernels' coins and ratios are from these, at drafted nodes."""
        drafted = self.tree.parents >= 0
        pairs = (found.coins.cpu() - coins, found.ratios.cpu() - ratios)
        return max(float((pair.abs() * drafted).max()) for pair in pairs)

    def check(self, found: TraversedPath, close: float = CLOSE) -> None:
        """Require the coins of float64 and the outcome of the torch code."""
        assert self.error(*self.wide(), found) < close
        expected = traverse(self.tree, self.law.clone(), self.rng, self.draft, self.depth)
        for name in ("path", "path_lengths", "next_token"):
            left, right = getattr(found, name).cpu(), getattr(expected, name)
            assert left.dtype == right.dtype and torch.equal(left, right), name
        assert expected.ratios is not None
        assert float((found.ratios.cpu() - expected.ratios).abs().max()) < close


@given(
    st.integers(0, 10**6),
    st.integers(1, 33),
    st.sampled_from([9, 40, 200]),
    st.integers(0, 3),
    st.sampled_from([(SAMPLED, DELTA, INDEPENDENT), (SAMPLED,), (INDEPENDENT,), (DELTA,), (SAMPLED, DELTA)]),
    st.sampled_from([0.0, 0.5]),
)
@settings(max_examples=20, deadline=None)
def test_coins_and_outcomes_are_those_of_the_verifier(
    seed: int, n: int, vocab: int, padding: int, kinds: tuple[int, ...], zeros: float
) -> None:
    problem = Problem.draw(n, vocab, seed=seed, padding=min(padding, n - 1), kinds=kinds, zeros=zeros)
    # Where more siblings are drawn than a law has tokens to give, float32 and float64 part in torch, too.
    assume(float((problem.narrow() - problem.wide()[0]).abs().max()) < 1e-5)
    problem.check(problem.found(), close=1e-3)


@pytest.mark.parametrize("kinds", [(INDEPENDENT,), (SAMPLED, DELTA, INDEPENDENT)], ids=str)
def test_siblings_of_one_token_are_counted_once(kinds: tuple[int, ...]) -> None:
    for seed in range(3):
        problem = Problem.draw(7, 6, seed=seed, kinds=kinds, shape=[-1, 0, 0, 0, 0, 0, 0])
        tokens = problem.tree.tokens[:, 1:]
        assert all(len(set(row)) < 6 for row in tokens.tolist())
        problem.check(problem.found(), close=1e-4)


@pytest.mark.parametrize("kinds", [(SAMPLED,), (DELTA,), (SAMPLED, DELTA, INDEPENDENT)], ids=str)
def test_a_full_vocabulary_of_several_blocks_is_tested_and_drawn_from(kinds: tuple[int, ...]) -> None:
    accepted = 0
    for seed in range(3):
        problem = Problem.draw(9, 2 * kernels.BLOCK + 813, seed=seed, batch=2, kinds=kinds, sharp=8.0)
        found = problem.found()
        problem.check(found)
        accepted += int(found.path_lengths.sum()) - 2
    assert accepted > 0


@pytest.mark.parametrize("bound", [None, 1])
def test_a_deep_chain_is_block_verification(bound: int | None) -> None:
    chain = list(range(-1, 15))
    lengths = []
    for seed in range(4):
        problem = Problem.draw(16, 40, seed=seed, kinds=(SAMPLED,), shape=chain)
        found = problem.found(bound)
        problem.check(found)
        lengths += found.path_lengths.tolist()
    assert max(lengths) > 4 and min(lengths) < max(lengths)


def test_rows_without_a_drafted_node_draw_from_the_target_s_law() -> None:
    problem = Problem.draw(6, 40, seed=1)
    parents, tokens = problem.tree.parents.clone(), problem.tree.tokens.clone()
    parents[1, 1:], tokens[1, 1:] = -1, 0
    problem = replace(problem, tree=TokenTree(tokens, parents))
    found = problem.found()
    problem.check(found)
    assert found.path[1].tolist()[:2] == [0, -1]


def same_laws(vocab: int, shape: list[int], seed: int = 0) -> Problem:
    """Draw trees from the target's own law."""
    problem = Problem.draw(len(shape), vocab, seed=seed, kinds=(SAMPLED,), shape=shape)
    assert problem.draft is not None
    return replace(problem, draft=replace(problem.draft, probs=problem.law.clone()))


def test_float32_laws_that_agree_leave_nothing_and_are_accepted_whole() -> None:
    for seed in range(3):
        problem = same_laws(50, [-1, 0, 0, 1, 1, 3], seed)
        found = problem.found()
        assert found.path.tolist() == [[0, 1, 3, 5]] * 3
        problem.check(found, close=float("inf"))  # tests of siblings that follow a sure one weigh nothing but rounding


def test_a_law_of_which_nothing_is_left_stays_as_it_was() -> None:
    tokens = torch.tensor([[0, 2, 1, 0]])
    tree = TokenTree(tokens, torch.tensor([[-1, 0, 0, 0]], dtype=torch.int32))
    law = torch.tensor([0.0, 0.0, 1.0, 0.0]).expand(1, 4, 4).contiguous()
    rng = Random(3, torch.tensor([5]), torch.tensor([7]))
    problem = Problem(tree, law, None, rng)
    found = problem.found()
    problem.check(found)
    assert found.path.tolist() == [[0, 1]] and found.next_token.tolist() == [2]
    assert found.ratios.tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_the_last_child_leaves_the_law_as_it_was_where_nothing_is_left() -> None:
    # A law of half a weight: the child fails every other time, though it takes all there is.
    tree = TokenTree(torch.tensor([[0, 1]] * 8), torch.tensor([[-1, 0]] * 8, dtype=torch.int32))
    law = torch.tensor([0.0, 0.5, 0.0, 0.0]).expand(8, 2, 4).contiguous()
    problem = Problem(tree, law, None, Random(1, torch.arange(8), torch.zeros(8, dtype=torch.long)))
    found = problem.found()
    problem.check(found)
    assert found.next_token.tolist() == [1] * 8 and set(found.path_lengths.tolist()) == {1, 2}


def test_a_token_that_an_elder_took_out_of_the_draft_s_law_has_no_weight_in_it() -> None:
    problem = Problem.draw(3, 6, seed=2, batch=8, kinds=(SAMPLED,), shape=[-1, 0, 0])
    tokens = problem.tree.tokens.clone()
    tokens[:, 2] = tokens[:, 1]
    problem = replace(problem, tree=TokenTree(tokens, problem.tree.parents))
    found = problem.found()
    problem.check(found)
    assert set(found.ratios[:, 2].tolist()) == {0.0, 1.0}  # by whether anything is left of the target's


def test_what_a_node_of_no_law_names_may_hold_anything() -> None:
    problem = Problem.draw(9, 40, seed=3, kinds=(SAMPLED, DELTA))
    assert problem.draft is not None
    draft, is_delta = problem.draft, problem.draft.kind == DELTA
    row = torch.where(is_delta, 9, draft.row)
    probs = torch.cat([draft.probs, torch.full((3, 1, 40), torch.nan)], 1)
    found = replace(problem, draft=replace(draft, probs=probs, row=row)).found()
    problem.check(found)
    assert bool(is_delta[problem.tree.parents >= 0].any())


@pytest.mark.parametrize("launched", [0, 1, 3])
def test_waves_that_have_no_launch_of_their_own_are_run_by_the_last_one(
    launched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shape, vocab in ((STAR, 40), ([-1, 0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9], kernels.BLOCK + 90)):
        problem = Problem.draw(len(shape), vocab, seed=5, shape=shape)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "MAX_WAVES", 99)
            expected = problem.found()
            patch.setattr(kernels, "MAX_WAVES", launched)
            found = problem.found()
        problem.check(found)
        for name in TraversedPath.__slots__:
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_more_waves_than_launches_are_needed_and_bounded_by_what_the_host_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem.draw(12, 40, seed=6, shape=STAR)
    names = {}
    for bound in (None, 11, 4):
        with launch_keys(monkeypatch) as keys:
            found = problem.found(bound)
        names[bound] = [name for name, _ in keys]
        if bound != 4:
            problem.check(found)
    assert names[None] == names[11] and len(names[None]) == 22
    assert names[None].count("settle_kernel") == kernels.MAX_WAVES
    assert names[None].count("rest_kernel") == 1 and names[4].count("rest_kernel") == 0
    assert names[4].count("settle_kernel") == names[4].count("reject_kernel") == 4
    assert kernels.num_waves(12, 1, 11) == 11 and kernels.num_waves(12, 5, None) == 11
    assert kernels.num_waves(7, 3, 2) == 4 and kernels.num_waves(1, 0, None) == 0


def keys_of(monkeypatch: pytest.MonkeyPatch, problem: Problem) -> list[Key]:
    with launch_keys(monkeypatch) as keys:
        problem.found()
    return keys


def test_launches_depend_on_sizes_and_not_on_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = keys_of(monkeypatch, Problem.draw(16, 101, shape=list(range(-1, 15))))
    for seed in range(2):
        assert keys_of(monkeypatch, Problem.draw(16, 101, seed=seed)) == expected
    chosen = set(expected)
    for n in (10, 13, 16):  # trees of another number of nodes take no builds of their own
        assert set(keys_of(monkeypatch, Problem.draw(n, 101, batch=1 + n % 3))) == chosen
    assert set(keys_of(monkeypatch, Problem.draw(16, 101, kinds=(DELTA,)))) != chosen


def test_a_traversal_reads_nothing_of_the_device() -> None:
    problem = Problem.draw(9, 40).moved()
    depth = problem.depth
    with NoHostReads():
        traverse_by_kernels(problem.tree, problem.law, problem.rng, problem.draft, depth)


def test_the_rule_of_a_gpu_gives_an_acceptance_and_leaves_the_law_as_it_is() -> None:
    problem = Problem.draw(17, 40, seed=8, padding=2)
    moved = problem.moved()
    rng = replace(moved.rng, positions=moved.rng.positions.int())
    found = traverse_by_kernels(moved.tree, moved.law, rng, moved.draft, problem.depth)
    assert torch.equal(moved.law.cpu(), problem.law)
    expected = traverse(problem.tree, problem.law.clone(), problem.rng, problem.draft, problem.depth)
    assert torch.equal(found.path.cpu(), expected.path) and torch.equal(found.next_token.cpu(), expected.next_token)
    assert found.ratios is not None and found.ratios.dtype == torch.float32 and found.left is None


def test_a_seed_on_the_device_and_strides_of_the_laws_change_nothing() -> None:
    problem = Problem.draw(9, 203, seed=9)
    assert problem.draft is not None
    expected = problem.found()
    seed = torch.tensor(problem.rng.seed)
    law = torch.nn.functional.pad(problem.law, (0, 5), value=torch.nan)[..., :203]
    probs = torch.nn.functional.pad(problem.draft.probs, (0, 9), value=torch.nan)[..., :203]
    found = replace(
        problem, law=law, draft=replace(problem.draft, probs=probs), rng=replace(problem.rng, seed=seed.to(DEVICE))
    ).found()
    for name in TraversedPath.__slots__:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_coins_are_tossed_with_the_numbers_of_their_own_purpose() -> None:
    assert PURPOSES["accept"] == kernels.ACCEPT
    changed = 0
    for seed in range(4):
        problem = Problem.draw(9, 40, seed=seed)
        found = problem.found()
        later = replace(problem, rng=replace(problem.rng, positions=problem.rng.positions + 1)).found()
        assert torch.equal(found.coins, later.coins)
        changed += not torch.equal(found.path, later.path)
    assert changed


def parent_by_own_law(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """Weigh a parent anew by min(S / (1 - q(x)), 1), as a public reimplementation does."""
    test = Trials.test

    def wrong(trials: Trials, nodes: Tensor, child: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        below, above = test(trials, nodes, child, held)
        total = (above * (1 - held) / (1 - above).clamp(min=1e-12)).where(above < 1, held)
        own = 1 / trials._facts[trials._batch, child][..., 0].clamp(min=1e-12)
        return below, torch.where(child < trials.ratio.shape[1] - 1, (total / (1 - own)).clamp(max=1), held)

    with monkeypatch.context() as patch:
        patch.setattr(Trials, "test", wrong)
        return problem.wide()


def parent_that_stays(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """Leave a parent's weight as it was."""
    test = Trials.test
    with monkeypatch.context() as patch:
        patch.setattr(Trials, "test", lambda *given: (test(*given)[0], given[3]))
        return problem.wide()


# What is wrong, and how coins and ratios that are wrong so are made.
CONTROLS: dict[str, Callable[[Problem, pytest.MonkeyPatch], tuple[Tensor, Tensor]]] = {
    "the parent's weight by the child's own law": parent_by_own_law,
    "the parent's weight as before": parent_that_stays,
    "elders not taken out of the draft's law": lambda problem, _: problem.wide(INDEPENDENT),
    "laws taken for one-hot": lambda problem, _: problem.wide(DELTA),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_coins_that_are_wrong_in_one_thing_are_told_apart(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.draw(12, 7, seed=4, kinds=(SAMPLED,), shape=[-1, 0, 0, 0, 1, 1, 2, 2, 4, 4, 6, 6])
    found = problem.found()
    problem.check(found)
    assert problem.error(*CONTROLS[control](problem, monkeypatch), found) > 100 * CLOSE


def test_what_cannot_be_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.draw(3, 5)
    with pytest.raises(TypeError, match=r"law must be float32\[3, 3, 5\], got float64\[3, 3, 5\]"):
        replace(problem, law=problem.law.double()).found()
    with pytest.raises(ValueError, match=r"tokens must be int64\[3, 4\], got int64\[3, 3\]"):
        replace(problem, law=torch.ones(3, 4, 5)).found()
    assert problem.draft is not None
    with pytest.raises(ValueError, match=r"draft.probs must be float\[3, 3, 5\], got float32\[3, 3, 4\]"):
        replace(problem, draft=replace(problem.draft, probs=torch.ones(3, 3, 4))).found()
    with pytest.raises(ValueError, match=r"draft.row and draft.kind must be \[3, 3\], got \[3, 2\] and \[3, 3\]"):
        replace(problem, draft=replace(problem.draft, row=problem.draft.row[:, :2])).found()
    with pytest.raises(ValueError, match=r"mask must be bool\[3, 3, 3\], got bool\[3, 3, 2\]"):
        tree = problem.tree
        traverse_on_device(
            tree.tokens, tree.parents, tree.ancestor_mask[..., :2], tree.depths, problem.law, max_depth=1, seed=0,
            sequences=problem.rng.sequences, positions=problem.rng.positions,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"draft.probs must be contiguous in its last dimension, got strides"):
        replace(problem, draft=replace(problem.draft, probs=torch.ones(3, 5, 3).mT)).found()
    long = TokenTree(torch.zeros(1, 129, dtype=torch.long), torch.arange(-1, 128)[None])
    rng = Random(0, torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    with pytest.raises(NotImplementedError, match="traverse with backend='triton' takes trees of nodes up to 128"):
        Problem(long, torch.ones(1, 129, 2), None, rng).found()
    if DEVICE == "cpu":
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        with pytest.raises(RuntimeError, match="traverse needs CUDA tensors, got a tensor on cpu"):
            problem.found()
