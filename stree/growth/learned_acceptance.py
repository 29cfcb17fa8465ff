"""Acceptance models of ``Calibrated``: a parametric prior, corrected by what each sequence's own tests show.

The prior's coefficients are functions of the rank, set by hand to follow a fit by rank to the bundled pair (HumanEval,
GSM8K, MT-Bench, prompts 33-48 and, at temperature 0, also 81-112).  Sharpness is -log(1 - sum of squares) of the draft
distribution, confidence the log of the child's draft probability.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from stree.growth.acceptance_model import AcceptanceModel, Proposal, Slots
from stree.kernels.tree_growth.api import learn, learn_level, rate_by_rank, rate_by_table, remember
from stree.kernels.tree_growth.operands import Kept, Level, Memory, RankFit, Table, Verdicts

__all__ = ["GreedyAcceptance", "SampledAcceptance", "prior_after_draw", "prior_before_draw", "prior_when_greedy"]

SHARPNESS_EDGES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
CONFIDENCE_EDGES = (0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 0.9)
PRIOR_TESTS = 8.0  # weight of the prior: it counts as so many tests


def prior_before_draw(rank: int) -> tuple[float, float]:
    """Return log-odds that the drawn child of a rank is accepted, before its draw: intercept, slope by sharpness."""
    u = math.log1p(rank)
    return -0.3 - 1.15 * u, 1.2 / (1 + rank)


def prior_after_draw(rank: int) -> tuple[float, float, float]:
    """Return the same log-odds once the child is drawn: intercept, slopes by sharpness and by confidence."""
    u = math.log1p(rank)
    return 0.2 - 0.5 * u, 1.0 / (1 + rank) ** 2, 0.2 + 0.15 * u


def prior_when_greedy(rank: int) -> tuple[float, float, float, float, float, float, float]:
    """Return log-odds that the draft's token of a rank is the target's most probable one.

    Returns:
        Intercept, slopes by confidence and by sharpness; then what is added where the text already contains the pair of
        tokens (parent, child), where it contains the triple that ends with this pair, and the same two for another
        child of the same parent.
    """
    u = math.log1p(rank)
    return 1.0 - 1.6 * u, 0.7, 1.6 if rank == 0 else -2.0, 1 + 0.9 * u, 2.8, -0.5, -2.1


class SampledAcceptance(AcceptanceModel):
    """Drawn children: acceptance counted in a table per sequence, from the verifier's log of its tests.

    Cells are (rank, sharpness of the distribution) before the draw, which gives priorities, and (rank, sharpness,
    confidence of the child) after it, which gives values.  Every cell begins with the prior.

    Args:
        batch: sequences; each has its own table, so results do not depend on what shares the batch.
        ranks: most children of a node.
        device: of the tables.

    Attributes:
        table: counted tests.
    """

    def __init__(self, batch: int, ranks: int, device: torch.device) -> None:
        sharpness_edges, confidence_edges = (
            torch.tensor(edges, dtype=torch.float32) for edges in (SHARPNESS_EDGES, CONFIDENCE_EDGES)
        )
        sharpness, confidence = -torch.log1p(-_midpoints(sharpness_edges)), _midpoints(confidence_edges).log()
        before = sharpness.new_tensor([prior_before_draw(rank) for rank in range(ranks)])
        after = sharpness.new_tensor([prior_after_draw(rank) for rank in range(ranks)])
        intercept, by_sharpness, by_confidence = after[:, :, None, None].unbind(1)  # [ranks, 1, 1] each
        log_odds_before = before[:, :1] + before[:, 1:] * sharpness
        log_odds_after = intercept + by_sharpness * sharpness[:, None] + by_confidence * confidence
        prior = torch.cat([log_odds_before.flatten(), log_odds_after.flatten()]).sigmoid()
        self._prior = prior.to(device) * PRIOR_TESTS
        self.table = Table(
            passed=self._prior.repeat(batch, 1),
            tests=self._prior.new_full((batch, len(prior)), PRIOR_TESTS),
            sharpness=sharpness_edges.to(device),
            confidence=confidence_edges.to(device),
            rank=torch.arange(ranks, device=device),
        )

    def rate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Return priorities and values by the tables; the cells are remembered for ``keep``."""
        priority, value, self._cells = rate_by_table(self.table, slots.children())
        return priority, value

    def keep(self, slots: Tensor) -> Kept:
        """Return the cells of the slots rated last, and which of them became nodes."""
        return Kept(self._cells, slots)

    def learn(self, proposal: Proposal, ratios: Tensor, is_live: Tensor) -> None:
        """Count every test with the probability that it is made: ancestors accepted, earlier siblings rejected."""
        kept = [layer for layer in proposal.kept_slots if layer is not None]
        if kept:
            learn(self.table, kept, _verdicts(proposal, ratios, is_live))

    def reset(self, row: int) -> None:
        """Set the table of a sequence to the prior."""
        self.table.tests[row] = PRIOR_TESTS
        self.table.passed[row] = self._prior

    def select(self, rows: Tensor) -> SampledAcceptance:
        """Copy the tables of some sequences."""
        other = copy(self)
        other.table = replace(self.table, passed=self.table.passed[rows], tests=self.table.tests[rows])
        return other


class GreedyAcceptance(AcceptanceModel):
    """Children at temperature 0: probability that the draft's token of a rank is the target's most probable one.

    Two things are learnt per sequence.  The n-gram table holds the pairs and triples of tokens of the text, because
    greedy texts repeat themselves.  The level is added to the log-odds of each node's most probable child; its siblings
    share what remains.

    Args:
        batch: sequences; none learns from another.
        ranks: most children of a node.
        device: of the tables.

    Attributes:
        fit: the prior, by rank.
        level: what is added per sequence, and its weight.
        ngrams: pairs and triples of each text.
    """

    def __init__(self, batch: int, ranks: int, device: torch.device) -> None:
        prior = torch.tensor([prior_when_greedy(rank) for rank in range(ranks)], dtype=torch.float32, device=device)
        columns = prior.T.contiguous()
        self.fit = RankFit(columns[0], columns[1], columns[2], columns[3:])
        self.ngrams = Memory.empty(batch, device)
        # A test that passes with probability p informs by p (1 - p), so PRIOR_TESTS tests of even chance by a quarter.
        weight = columns.new_full((batch,), PRIOR_TESTS / 4)
        self.level = Level(torch.zeros_like(weight), weight)

    def rate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Return the product of the probabilities on each child's path, twice."""
        value = rate_by_rank(self.fit, self.level, self.ngrams, slots.children())
        return value, value

    def learn(self, proposal: Proposal, ratios: Tensor, is_live: Tensor) -> None:
        """Update the level of each sequence by its most probable children."""
        learn_level(self.level, proposal.values, _verdicts(proposal, ratios, is_live))

    def read_text(self, tokens: Tensor, path: Tensor | None, lengths: Tensor) -> None:
        """Add the pairs and triples of new tokens to the n-gram table."""
        remember(self.ngrams, tokens, path, lengths)

    def reset(self, row: int) -> None:
        """Reset the level and the n-grams of a sequence."""
        self.level.shift[row] = 0
        self.level.weight[row] = PRIOR_TESTS / 4
        self.ngrams.forget(row)

    def select(self, rows: Tensor) -> GreedyAcceptance:
        """Copy the levels and n-grams of some sequences."""
        other = copy(self)
        other.level = Level(self.level.shift[rows], self.level.weight[rows])
        other.ngrams = Memory(self.ngrams.places[rows], self.ngrams.last[rows])
        return other


def _verdicts(proposal: Proposal, ratios: Tensor, is_live: Tensor) -> Verdicts:
    """Describe a verified tree as the kernels take it."""
    tree = proposal.tree
    return Verdicts(tree.parents, tree.ancestor_mask, proposal.column, ratios, is_live)


def _midpoints(edges: Tensor) -> Tensor:
    """Return the midpoint of every interval between 0, the edges and 1."""
    bounds = torch.cat([edges.new_zeros(1), edges, edges.new_ones(1)])
    return (bounds[1:] + bounds[:-1]) / 2
