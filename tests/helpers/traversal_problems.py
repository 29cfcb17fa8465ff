"""Problems for the tests of traversal in Triton and numba: trees, distributions, and float64 references in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import oracles
from stree import TokenTree
from stree.kernels.dispatch import as_on_device
from stree.kernels.traversal import cpu
from stree.kernels.traversal.api import traverse as traverse_on_device
from stree.kernels.traversal.operands import Held, TraversedPath
from stree.kernels.traversal.reference import accept_probs
from stree.kernels.traversal.residuals import Residuals
from stree.sampling import Random
from stree.verify import Acceptance, DraftProbs
from stree.verify.traversal import traverse
from stree.verify.values import DELTA, INDEPENDENT, SAMPLED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Sums of float32 distributions, each weight rounded to 2^-24; a test divides by what is left, of which most
# distributions keep a tenth.
CLOSE = 5e-6
STAR = [-1, *[0] * 11]


@dataclass(frozen=True)
class Problem:
    """A batch of trees and the distributions that their nodes are tested with."""

    tree: TokenTree
    dist: Tensor
    draft: DraftProbs | None
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
        """Draw trees whose distributions differ by factors of about two; of the distributions some weights are zero."""
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
        dist, probs = target.softmax(-1), stored.softmax(-1)
        tokens = torch.zeros(batch, n, dtype=torch.long)
        kind = torch.tensor(kinds)[torch.randint(len(kinds), (batch, n), generator=rng)].to(torch.int8)
        for b in range(batch):
            for i in range(1, n):
                if parents[b, i] >= 0:
                    own = probs[b, row[b, i]].clone()
                    if kind[b, i] == SAMPLED:
                        own[tokens[b, 1:i][parents[b, 1:i] == parents[b, i]]] = 0
                    tokens[b, i] = torch.multinomial(own + 1e-9, 1, generator=rng)
        draft = DraftProbs(probs, row, kind, max_children=None) if kinds != (DELTA,) else None
        sequences, positions = torch.randint(0, 2**20, (2, batch), generator=rng)
        return cls(TokenTree(tokens, parents), dist, draft, Random(seed, sequences, positions))

    def moved(self) -> Problem:
        """Give the same on the device."""
        tree, draft, rng = self.tree, self.draft, self.rng
        words = (tensor.to(DEVICE) for tensor in (tree.tokens, tree.parents, tree.depths, tree.ancestor_mask))
        if draft is not None:
            dists = draft.probs.to(DEVICE), draft.row.to(DEVICE), draft.kind.to(DEVICE)
            draft = DraftProbs(*dists, draft.max_children)
        rng = Random(rng.seed, rng.sequences.to(DEVICE), rng.positions.to(DEVICE))
        return Problem(TokenTree.unchecked(*words), self.dist.to(DEVICE), draft, rng)

    @property
    def depth(self) -> int:
        """Depth of the deepest tree."""
        return int(self.tree.depths.max())

    def wide(self, kind: int | None = None) -> tuple[Tensor, Tensor]:
        """Compute accept_probs and ratios in float64, of nodes of another kind if one is given."""
        accept_probs, residuals = self.wide_residuals(kind)
        return accept_probs, residuals.ratio[:, :-1].clamp(max=1)

    def wide_residuals(self, kind: int | None = None) -> tuple[Tensor, Residuals]:
        """Compute accept_probs in float64; give what is left of the distributions, too."""
        draft = self.draft
        if draft is not None:
            given = draft.kind if kind is None else torch.full_like(draft.kind, kind)
            draft = replace(draft, probs=draft.probs.double(), kind=given)
        residuals = Residuals(self.tree, self.dist.to(torch.float64, copy=True), draft)
        return accept_probs(self.tree, residuals, self.depth), residuals

    def narrow(self) -> Tensor:
        """Compute accept_probs in float32, in torch."""
        return accept_probs(self.tree, Residuals(self.tree, self.dist.clone(), self.draft), self.depth)

    def outcome(self) -> Acceptance:
        """Traverse in torch."""
        with as_on_device(triton=False):
            return traverse(self.tree, self.dist.clone(), self.rng, self.draft, self.depth)

    def found(self, max_children: int | None = None) -> TraversedPath:
        """Run the kernels."""
        moved = self.moved()
        rng, draft = moved.rng, None if moved.draft is None else replace(moved.draft, max_children=max_children)
        return traverse_on_device(
            moved.tree, moved.dist, draft, max_depth=self.depth, seed=rng.seed, sequences=rng.sequences,
            positions=rng.positions,
        )  # fmt: skip

    def error(self, accept_probs: Tensor, ratios: Tensor, found: TraversedPath | Compiled) -> float:
        """Measure how far found accept_probs and ratios are from these, at drafted nodes."""
        drafted = self.tree.parents >= 0
        pairs = (found.accept_probs.cpu() - accept_probs, found.ratios.cpu() - ratios)
        return max(float((pair.abs() * drafted).max()) for pair in pairs)

    def check(self, found: TraversedPath | Compiled, close: float = CLOSE) -> None:
        """Require the accept_probs of float64 and the outcome of the torch code."""
        accept_probs, residuals = self.wide_residuals()
        assert self.error(accept_probs, residuals.ratio[:, :-1].clamp(max=1), found) < close
        expected = self.outcome()
        for name in ("path", "path_lengths", "next_token"):
            left, right = getattr(found, name).cpu(), getattr(expected, name)
            assert left.dtype == right.dtype and torch.equal(left, right), name
        assert expected.ratios is not None
        assert float((found.ratios.cpu() - expected.ratios).abs().max()) < close
        if isinstance(found, Compiled):
            assert found.accept_probs.dtype == torch.float64 and found.ratios.dtype == self.dist.dtype
            assert not bool(found.ratios[self.tree.parents < 0].any())
            left, total = found.left.double(), residuals._probs.sum(-1, keepdim=True)
            apart = left / left.sum(-1, keepdim=True) - residuals._probs / total
            assert bool((left >= 0).all()) and float((apart.abs() * total).max()) < close


@dataclass(frozen=True)
class Compiled:
    """What the code compiled for the CPU made of a problem.

    Attributes:
        left: what is left of the distributions.
    """

    accept_probs: Tensor
    ratios: Tensor
    left: Tensor
    path: Tensor
    path_lengths: Tensor
    next_token: Tensor

    @classmethod
    def of(cls, problem: Problem, dist: Tensor | None = None) -> Compiled:
        """Traverse, and look on."""
        seen: list[Tensor] = []
        hold = cpu.hold

        def watched(*given: Any) -> Held:
            held = hold(*given)
            seen.extend(part.clone() for part in held)
            return held

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu, "hold", watched)
            given = problem.dist.clone() if dist is None else dist
            accepted = traverse(problem.tree, given, problem.rng, problem.draft, problem.depth)
        accept_probs, ratios, left = seen
        assert accepted.ratios is not None and torch.equal(accepted.ratios, ratios)
        return cls(accept_probs, ratios, left, accepted.path, accepted.path_lengths, accepted.next_token)


_test = Residuals.test


def weigh_parent_by_own_probs(
    residuals: Residuals, nodes: Tensor, child: Tensor, held: Tensor
) -> tuple[Tensor, Tensor]:
    """Test as ``Residuals`` does, but weigh a parent anew by min(S / (1 - q(x)), 1), not by S / (S + 1 - r).

    A public reimplementation of the paper has it so.
    """
    below, above = _test(residuals, nodes, child, held)
    total = (above * (1 - held) / (1 - above).clamp(min=1e-12)).where(above < 1, held)
    own = 1 / residuals._draft_terms[residuals._batch, child][..., 0].clamp(min=1e-12)
    return below, torch.where(child < residuals.ratio.shape[1] - 1, (total / (1 - own)).clamp(max=1), held)


def parent_by_own_probs(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """Weigh parents wrongly."""
    with monkeypatch.context() as patch:
        patch.setattr(Residuals, "test", weigh_parent_by_own_probs)
        return problem.wide()


def parent_that_stays(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """Leave a parent's weight as it was."""
    test = Residuals.test
    with monkeypatch.context() as patch:
        patch.setattr(Residuals, "test", lambda *given: (test(*given)[0], given[3]))
        return problem.wide()


# What is wrong, and how accept_probs and ratios that are wrong so are made.
CONTROLS: dict[str, Callable[[Problem, pytest.MonkeyPatch], tuple[Tensor, Tensor]]] = {
    "the parent's weight by the child's own distribution": parent_by_own_probs,
    "the parent's weight as before": parent_that_stays,
    "elders not taken out of the draft's distribution": lambda problem, _: problem.wide(INDEPENDENT),
    "distributions taken for one-hot": lambda problem, _: problem.wide(DELTA),
}


@dataclass(frozen=True)
class OneDraft:
    """Trees of one drafted token, every token of 200 pairs of distributions: far apart to equal but for the last bit.

    Attributes:
        tree: a root and its child.
        dist: float32[trees, 2, vocab], the target's.
        draft: that each child was drawn from.
    """

    tree: TokenTree
    dist: Tensor
    draft: DraftProbs

    @classmethod
    def draw(cls, scale: float) -> OneDraft:
        """Draw distributions whose logits have a deviation of ``scale``: of great ones tails underflow."""
        count, vocab = 200, 20
        generator = torch.Generator().manual_seed(0)
        logits = scale * torch.randn(count, vocab, generator=generator, dtype=torch.float64)
        apart = 10 ** torch.linspace(-9, 0.5, count, dtype=torch.float64)[:, None]
        other = logits + apart * torch.randn(count, vocab, generator=generator, dtype=torch.float64)
        probs, drafted = (one.float().softmax(-1).repeat_interleave(vocab, 0) for one in (logits, other))
        tokens = torch.arange(vocab).repeat(count)
        tree = TokenTree.chain(torch.stack([torch.zeros_like(tokens), tokens], 1))
        rows = torch.zeros_like(tree.parents)
        return cls(tree, probs[:, None].repeat(1, 2, 1), DraftProbs(drafted[:, None], rows, rows))

    def check(self, left: Tensor, accepted: Tensor) -> None:
        """Require that what is emitted errs by no more than rounding.

        Args:
            left: float[trees, vocab], what a rejection leaves of the target's distribution, not normalised.
            accepted: float[trees], probability with which each child is accepted.
        """
        left, accepted, tokens = left.double(), accepted.double(), self.tree.tokens[:, 1:]
        assert bool((left >= 0).all()) and bool((left.sum(-1) > 0).all())
        probs, drafted = self.dist[:, 0].double(), self.draft.probs[:, 0].double()
        target, drafted = probs / probs.sum(-1, True), drafted / drafted.sum(-1, True)
        right = (target / drafted.clamp(min=1e-300)).gather(1, tokens).squeeze(1).clamp(max=1)
        after = (target - drafted).clamp(min=0)
        wrong = (left / left.sum(-1, True) - after / after.sum(-1, True).clamp(min=1e-300)).abs().sum(-1)
        error = drafted.gather(1, tokens).squeeze(1) * ((1 - accepted) * wrong + (accepted - right).abs())
        assert float(error.view(-1, left.shape[1]).sum(1).max()) < 2e-6
