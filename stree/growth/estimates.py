"""Estimates of how likely the target accepts a child: what the value of a slot is made of.

A slot's priority must not depend on the token that is drawn there: it is known before the draw.  A node's value, the
probability that it is accepted together with all its ancestors, may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from stree.sampling import Random
from stree.tree import TokenTree

if TYPE_CHECKING:
    from stree.growth.plan import Plan

__all__ = ["Calibration", "DraftEstimate", "Estimate", "PathEstimate", "RankEstimate", "spent_before"]

# Of the bundled pair at temperatures 0.6 to 1, fitted to tests on prompts 33-48 of HumanEval, GSM8K and MT-Bench, which
# nothing is measured on: log-odds that a child of each rank is accepted, before its draw (level, slope by the sum of
# q^2) and after it (level, slopes by the sum of q^2 and by log q of the token).
BEFORE = ((-0.39, 2.49), (-1.44, 1.99), (-1.73, 1.12), (-1.99, 0.97), (-2.24, 0.63), (-2.3, 0.5))
AFTER = (
    (0.07, 1.96, 0.11), (-0.61, 1.22, 0.22), (-0.77, 0.39, 0.26), (-0.74, 0.27, 0.34), (-1.41, 0.26, 0.21),
    (-1.4, 0.2, 0.2),
)  # fmt: skip
# The same prompts without chance: log-odds that the draft's token of a rank is the target's own (level, slopes by log
# q of the token and by the sum of q^2).  A small draft is right more often than it is sure.
CERTAIN = ((0.43, 0.5, 2.87), (0.45, 0.78, -2.21), (0.95, 1.13, -1.64), (0.19, 0.81, -3.14), (-0.19, 0.86, -2.92))
SHARPNESS_EDGES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
CONFIDENCE_EDGES = (0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 0.9)
PRIOR_TESTS = 8.0  # what a cell of the table knows beforehand counts as so many tests


class Estimate(Protocol):
    """What a growth believes, for one run; it may learn from the verifier's log."""

    def begin(self, plan: Plan, rng: Random) -> None:
        """Forget the nodes kept so far: a new tree begins to grow.

        Args:
            plan: of the tree.
            rng: numbers of this step.
        """
        ...

    def rate(self, reach: Tensor, probs: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
        """Rate the slots below a layer.

        Args:
            reach: float[batch, above], values of the layer's nodes.
            probs: float[batch, above, ranks], probability of each drawn child under ``law``, 0 where there is none.
            law: float[batch, above, vocab].

        Returns:
            float[batch, above, ranks] twice: priorities of the slots, which never grow from sibling to sibling and are
            0 where there is no child, and values of the children.
        """
        ...

    def goes_on(self, values: Tensor) -> Tensor | None:
        """Decide before the next draft call whether anything grows below a new layer.

        Args:
            values: float[batch, width], values of the layer's nodes, leaves left out, 0 where there is none.

        Returns:
            bool[batch], or None where it always does.
        """
        ...

    def keep(self, slots: Tensor) -> None:
        """Take note that int64[batch, width] of the slots rated last became nodes."""
        ...

    def forget(self, row: int) -> None:
        """Forget what was learnt of a sequence: another takes its place."""
        ...

    def learn(self, tree: TokenTree, selected: Tensor | None, ratios: Tensor, is_live: Tensor) -> None:
        """Learn from the fate of the nodes kept.

        Args:
            tree: what was proposed.
            selected: int64[batch, n], number of each of its nodes among all kept ones and the root; None: the same.
            ratios: float[batch, n], acceptance probability of each node's test.
            is_live: bool[batch], sequences that took part.
        """
        ...


class PathEstimate:
    """Children known beforehand: the product of the draft probabilities along the path (OPT-Tree, EAGLE-2)."""

    def begin(self, plan: Plan, rng: Random) -> None:
        """Do nothing."""

    def rate(self, reach: Tensor, probs: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
        """Rate a slot by its child's path probability."""
        value = reach[..., None] * probs
        return value, value

    def goes_on(self, values: Tensor) -> Tensor | None:
        """Never stop."""
        return None

    def keep(self, slots: Tensor) -> None:
        """Learn nothing."""

    def forget(self, row: int) -> None:
        """Do nothing: nothing was learnt."""

    def learn(self, tree: TokenTree, selected: Tensor | None, ratios: Tensor, is_live: Tensor) -> None:
        """Learn nothing."""


class RankEstimate(PathEstimate):
    """Children known beforehand: how often the draft's token of such a rank and probability is the target's own.

    Args:
        ranks: most children of a node.
        device: where to rate.
    """

    def __init__(self, ranks: int, device: torch.device) -> None:
        fits = [CERTAIN[min(rank, len(CERTAIN) - 1)] for rank in range(ranks)]
        self._level, self._by_confidence, self._by_sharpness = torch.tensor(fits, device=device).unbind(1)

    def rate(self, reach: Tensor, probs: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
        """Rate a slot by the product of its path's chances; a younger sibling's is never the greater."""
        ranks = probs.shape[-1]
        odds = self._level[:ranks] + self._by_confidence[:ranks] * probs.clamp(min=1e-9).log()
        odds = odds + self._by_sharpness[:ranks] * torch.linalg.vector_norm(law, dim=-1).square()[..., None]
        value = reach[..., None] * (odds.sigmoid().cummin(-1).values * (probs > 0))
        return value, value


class DraftEstimate(PathEstimate):
    """Drawn children: a test accepts with the draft's own probability (DySpec)."""

    def rate(self, reach: Tensor, probs: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
        """Rate a slot by the probability that verification gets as far as testing it."""
        # Summed before the own probability: no rounding may let a slot depend on its token or pass its elder.
        spent = spent_before(probs)
        return reach[..., None] * (1 - spent).clamp(min=0) * (probs > 0), reach[..., None] * probs


class Calibration:
    """Acceptance by sibling rank and by what the draft knows, learnt from the verifier's log; a table a sequence.

    A slot is rated by its rank and by how sharp its law is, the sum of its squares; once the child is drawn, also by
    the probability that it was drawn with: on that its own children's and its younger siblings' ratings rest.

    Args:
        batch: sequences; none learns from another, so that no result depends on its neighbours.
        ranks: most children of a node.
        device: where to count.
    """

    def __init__(self, batch: int, ranks: int, device: torch.device) -> None:
        self._sharpness, self._confidence = torch.tensor(SHARPNESS_EDGES), torch.tensor(CONFIDENCE_EDGES)
        sharp, sure = _middles(self._sharpness), _middles(self._confidence).log()
        last = len(BEFORE) - 1
        before, after = (torch.tensor([fit[min(rank, last)] for rank in range(ranks)]) for fit in (BEFORE, AFTER))
        level, by_sharpness, by_confidence = after[:, :, None, None].unbind(1)  # [ranks, 1, 1] each
        odds = before[:, :1] + before[:, 1:] * sharp
        odds = torch.cat([odds.flatten(), (level + by_sharpness * sharp[:, None] + by_confidence * sure).flatten()])
        self._sharpness, self._confidence = self._sharpness.to(device), self._confidence.to(device)
        self._tests = torch.full((batch, len(odds)), PRIOR_TESTS, device=device)
        self._prior = odds.sigmoid().to(device) * PRIOR_TESTS
        self._passed = self._prior.repeat(batch, 1)
        self._rank = torch.arange(ranks, device=device)
        self._first_after = ranks * (len(SHARPNESS_EDGES) + 1)  # the cells before a draw stand first
        self._kept: list[Tensor] = []

    def begin(self, plan: Plan, rng: Random) -> None:
        """Forget the cells kept so far."""
        self._kept = []

    def rate(self, reach: Tensor, probs: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
        """Rate a slot by the probability that its child is accepted, over whatever token is drawn."""
        ranks = probs.shape[-1]
        odds = self._passed / self._tests
        sharp = torch.bucketize(torch.linalg.vector_norm(law, dim=-1).square(), self._sharpness)
        sure = torch.bucketize(probs / (1 - spent_before(probs)).clamp(min=1e-6), self._confidence)
        before = self._rank[:ranks] * (len(self._sharpness) + 1) + sharp[..., None]
        after = self._first_after + before * (len(self._confidence) + 1) + sure
        self._cells = torch.stack([before, after], -1)
        expected, found = odds.gather(1, self._cells.flatten(1)).view(self._cells.shape).unbind(-1)
        untested = torch.cat([reach[..., None], (1 - found[..., :-1])], -1).cumprod(-1)
        priority = (untested * expected).cummin(-1).values
        return priority * (probs > 0), untested * found * (probs > 0)

    def goes_on(self, values: Tensor) -> Tensor | None:
        """Never stop."""
        return None

    def forget(self, row: int) -> None:
        """Give a sequence the tables of one that begins."""
        self._tests[row] = PRIOR_TESTS
        self._passed[row] = self._prior

    def keep(self, slots: Tensor) -> None:
        """Remember the cells of new nodes."""
        self._kept.append(self._cells.flatten(1, 2).take_along_dim(slots[..., None], 1))

    def learn(self, tree: TokenTree, selected: Tensor | None, ratios: Tensor, is_live: Tensor) -> None:
        """Count every test by the probability that it is made: its ancestors accepted, its elder siblings not."""
        if not self._kept:
            return
        cells = torch.nn.functional.pad(torch.cat(self._kept, 1), (0, 0, 1, 0))
        if selected is not None:
            cells = cells.take_along_dim(selected[..., None], 1)
        n = cells.shape[1]
        is_drafted = tree.parents >= 0
        ratios = torch.where(is_drafted, ratios, 1.0).to(self._tests.dtype)
        index = torch.arange(n, device=ratios.device)
        is_elder = (tree.parents[:, :, None] == tree.parents[:, None]) & (index[:, None] > index)
        missed = (is_elder * (1 - ratios).clamp(min=1e-6).log()[:, None]).sum(-1)
        path = (tree.ancestor_mask * (ratios.clamp(min=1e-6).log() + missed)[:, None]).sum(-1)
        made = (path - ratios.clamp(min=1e-6).log()).exp() * (is_drafted & is_live[:, None])
        for number in range(2):
            self._tests.scatter_add_(1, cells[..., number], made)
            self._passed.scatter_add_(1, cells[..., number], made * ratios)


def spent_before(probs: Tensor) -> Tensor:
    """Sum what stands before each place, exclusively."""
    return torch.cat([torch.zeros_like(probs[..., :1]), probs.cumsum(-1)[..., :-1]], -1)


def _middles(edges: Tensor) -> Tensor:
    """Give a point in every interval between 0, the edges and 1."""
    bounds = torch.cat([torch.zeros(1), edges, torch.ones(1)])
    return (bounds[1:] + bounds[:-1]) / 2
