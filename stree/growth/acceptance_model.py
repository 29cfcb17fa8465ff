"""Estimates of how likely the target accepts a child: what the value of a slot is made of.

A slot's priority must not depend on the token that is drawn there: it is known before the draw.  A node's value, the
probability that it is accepted together with all its ancestors, may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from stree.kernels.growth_door import RankFit, Siblings, Table, Words, rate_by_rank, rate_by_table
from stree.kernels.growth_learning import Kept, Level, Memory, Verdicts, learn, learn_level, remember
from stree.kernels.reference_growth import spent_before
from stree.sampling import Random
from stree.tree import TokenTree

if TYPE_CHECKING:
    from stree.growth.plan import Plan

__all__ = [
    "Calibration",
    "DraftEstimate",
    "Estimate",
    "Notes",
    "PathEstimate",
    "Proposal",
    "RankEstimate",
    "Slots",
    "spent_before",
]

# Of the bundled pair at temperatures 0.6, 0.8 and 1, fitted to the tests of trees of 32 and 64 nodes on prompts 33-48
# of HumanEval, GSM8K and MT-Bench, which ``benchmarks/studies/who_wins.py`` leaves out: log-odds that a child of each
# rank is accepted, before its draw (level, slope by -log(1 - the sum of q^2)) and after it (so, and slope by log q).
BEFORE = ((-0.26, 1.2), (-1.35, 0.73), (-1.55, 0.3), (-1.96, 0.17), (-2.33, 0.45), (-2.06, 0.33), (-2.53, 0.28))
AFTER = (
    (0.24, 0.99, 0.16), (-0.38, 0.3, 0.3), (-0.44, -0.03, 0.35), (-0.72, -0.09, 0.38), (-0.76, 0.01, 0.47),
    (-0.36, -0.04, 0.5), (-0.82, -0.23, 0.47),
)  # fmt: skip
# How the eldest child's level grows with the temperature, which draws draft and target nearer to each other.
BY_TEMPERATURE = 1.7
FITTED_AT = (0.6, 0.8, 1.0)  # least, the levels' own, greatest
LEVEL_WEIGHT = 2.0  # of what is known of a text beforehand: as much as eight tests of even chance tell
# Texts of 96 tokens without chance, on prompts 33-48 and 81-112: log-odds that the draft's token of a rank is the
# target's own (level, slopes by log q of the token and by -log(1 - the sum of q^2), and where the text holds the pair
# that it would make, its triple, another child's pair, another's triple).
CERTAIN = (
    (1.06, 0.9, 1.62, 0.86, 3.06, -0.33, -2.44),
    (0.49, 0.88, -1.92, 1.15, 2.91, -0.48, -2.17),
    (-0.81, 0.61, -3.56, 2.34, 2.32, -0.34, -2.29),
    (-0.8, 0.76, -2.2, 2.74, 2.52, -1.18, -1.45),
    (-2.14, 0.49, -1.11, 2.37, 2.79, -0.91, -1.25),
    (-3.86, 0.12, -2.06, 2.57, 3.01, -0.06, -2.63),
    (-2.1, 0.61, -1.26, 1.47, 4.21, -0.49, -2.31),
    (-2.09, 0.63, -3.95, 3.63, 2.4, 0.24, -2.99),
)
SHARPNESS_EDGES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
CONFIDENCE_EDGES = (0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 0.9)
Notes = Sequence[Kept | None]  # of nodes that were kept, layer by layer
PRIOR_TESTS = 8.0  # what a cell of the table knows beforehand counts as so many tests


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A proposed tree, as the estimate that it grew by learns from it.

    Attributes:
        tree: what was proposed.
        values: float[batch, n], of its nodes.
        selected: int64[batch, n], number of each of its nodes among all kept ones and the root; None: the same.
        notes: what the estimate noted of the kept nodes, layer by layer.
    """

    tree: TokenTree
    values: Tensor
    selected: Tensor | None
    notes: Notes


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """The slots below a layer, and what their children are.

    Attributes:
        reach: float[batch, above], values of the layer's nodes.
        probs: float[batch, above, ranks], probability that the draft gives each child, 0 where there is none.
        dist: float[batch, above, vocab], that the drawn ones were drawn from.
        norms: float[batch, above], Euclidean norms of ``dist``; None: computed where they are needed.
        words: tokens of the children and of the nodes above them; None: unknown.
    """

    reach: Tensor
    probs: Tensor
    dist: Tensor
    norms: Tensor | None = None
    words: Words | None = None

    def siblings(self) -> Siblings:
        """Give the children as kernels rate them."""
        norms = torch.linalg.vector_norm(self.dist, dim=-1) if self.norms is None else self.norms
        return Siblings(self.reach, self.probs, norms, self.words)


class Estimate(Protocol):
    """How a growth rates slots, for one run; it may learn from the verifier's log."""

    def begin(self, plan: Plan, rng: Random) -> None:
        """Take note that a new tree begins to grow.

        Args:
            plan: of the tree.
            rng: numbers of this step.
        """
        ...

    def rate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Rate the slots below a layer.

        Returns:
            float[batch, above, ranks] twice: priorities of the slots, which never grow from drawn sibling to drawn
            sibling and are 0 where there is no child, and values of the children.
        """
        ...

    def draws(self, reach: Tensor, dist: Tensor) -> Tensor | None:
        """Decide after a draft call, before tokens are drawn from its laws: bool[batch], None where it draws anyway.

        Args:
            reach: float[batch, above], values of the nodes that were run, 0 where there is none.
            dist: float[batch, above, vocab].
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

    def note(self, slots: Tensor) -> Kept | None:
        """Give what is to be known when int64[batch, width] of the slots rated last, which became nodes, are judged."""
        ...

    def forget(self, row: int) -> None:
        """Forget what was learnt of a sequence: another takes its place."""
        ...

    def remember(self, tokens: Tensor, path: Tensor | None, lengths: Tensor) -> None:
        """Read how the texts go on, or begin.

        Args:
            tokens: int64[batch, n], of a tree; or of the texts.
            path: int32[batch, m], its nodes whose tokens are read; None: all tokens, in their order.
            lengths: int32[batch], how many of them; 0 where nothing is read.
        """
        ...

    def learn(self, proposal: Proposal, ratios: Tensor, is_live: Tensor) -> None:
        """Learn from the fate of the nodes kept.

        Args:
            proposal: their tree.
            ratios: float[batch, n], acceptance probability of each node's test; where no log of tests was kept, 1 for
                accepted nodes and 0 for others.
            is_live: bool[batch], sequences that took part.
        """
        ...


class PathEstimate:
    """Children known beforehand: the product of the draft probabilities along the path (OPT-Tree, EAGLE-2)."""

    def begin(self, plan: Plan, rng: Random) -> None:
        """Do nothing."""

    def draws(self, reach: Tensor, dist: Tensor) -> None:
        """Draw anyway."""

    def rate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Rate a slot by its child's path probability."""
        value = slots.reach[..., None] * slots.probs
        return value, value

    def goes_on(self, values: Tensor) -> Tensor | None:
        """Never stop."""
        return None

    def note(self, slots: Tensor) -> Kept | None:
        """Note nothing."""
        return None

    def forget(self, row: int) -> None:
        """Do nothing: nothing was learnt."""

    def remember(self, tokens: Tensor, path: Tensor | None, lengths: Tensor) -> None:
        """Do nothing: texts do not matter."""

    def learn(self, proposal: Proposal, ratios: Tensor, is_live: Tensor) -> None:
        """Learn nothing."""


class RankEstimate(PathEstimate):
    """Children known beforehand: how often the draft's token of such a rank and probability is the target's own.

    The fit is that of texts at large; how much surer the likeliest children of this one are is learnt from it.  Texts
    repeat themselves: what was said behind the same token, or the same two, is likelier to be said again.

    Args:
        batch: sequences; none learns from another.
        ranks: most children of a node.
        device: where to rate.
    """

    def __init__(self, batch: int, ranks: int, device: torch.device) -> None:
        fits = [CERTAIN[min(rank, len(CERTAIN) - 1)] for rank in range(ranks)]
        columns = torch.tensor(fits, dtype=torch.float32, device=device).T.contiguous()
        self._fit = RankFit(columns[0], columns[1], columns[2], columns[3:])
        self._memory = Memory.empty(batch, device)
        self._level = Level(
            torch.zeros(batch, dtype=torch.float32, device=device),
            torch.full((batch,), LEVEL_WEIGHT, dtype=torch.float32, device=device),
        )

    def rate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Rate a slot by the product of its path's chances."""
        value = rate_by_rank(self._fit, self._level, self._memory, slots.siblings())
        return value, value

    def forget(self, row: int) -> None:
        """Give a sequence the level of one that begins, and nothing to remember."""
        self._level.shift[row] = 0
        self._level.weight[row] = LEVEL_WEIGHT
        self._memory.forget(row)

    def remember(self, tokens: Tensor, path: Tensor | None, lengths: Tensor) -> None:
        """Note the pairs and triples of tokens that the texts hold."""
        remember(self._memory, tokens, path, lengths)

    def learn(self, proposal: Proposal, ratios: Tensor, is_live: Tensor) -> None:
        """Move each text's level to where its own likeliest children put it."""
        learn_level(self._level, proposal.values, _verdicts(proposal, ratios, is_live))


class DraftEstimate(PathEstimate):
    """Drawn children: a test accepts with the draft's own probability (DySpec)."""

    def rate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Rate a slot by the probability that verification gets as far as testing it."""
        # Summed before the own probability: no rounding may let a slot depend on its token or pass its elder.
        reach, probs = slots.reach[..., None], slots.probs
        spent = spent_before(probs)
        return reach * (1 - spent).clamp(min=0) * (probs > 0), reach * probs


class Calibration(PathEstimate):
    """Acceptance by sibling rank and by what the draft knows, learnt from the verifier's log; a table a sequence.

    A slot is rated by its rank and by how sharp its distribution is, the sum of its squares; once the child is drawn,
    also by the probability that it was drawn with: on that its own children's and its younger siblings' ratings rest.

    Args:
        batch: sequences; none learns from another, so that no result depends on its neighbours.
        ranks: most children of a node.
        device: where to count.
        temperature: that children are drawn with.
    """

    def __init__(self, batch: int, ranks: int, device: torch.device, temperature: float) -> None:
        edges = [torch.tensor(edges, dtype=torch.float32) for edges in (SHARPNESS_EDGES, CONFIDENCE_EDGES)]
        sharp, sure = -torch.log1p(-_middles(edges[0])), _middles(edges[1]).log()
        before, after = (
            edges[0].new_tensor([fit[min(rank, len(fit) - 1)] for rank in range(ranks)]) for fit in (BEFORE, AFTER)
        )
        level, by_sharpness, by_confidence = after[:, :, None, None].unbind(1)  # [ranks, 1, 1] each
        least, own, most = FITTED_AT
        warmer = BY_TEMPERATURE * (min(max(temperature, least), most) - own)
        before[0, 0] += warmer
        level[0] += warmer
        odds = before[:, :1] + before[:, 1:] * sharp
        drawn = level + by_sharpness * sharp[:, None] + by_confidence * sure
        odds = torch.cat([odds.flatten(), drawn.flatten()])
        self._prior = odds.sigmoid().to(device) * PRIOR_TESTS
        self._tests = self._prior.new_full((batch, len(odds)), PRIOR_TESTS)
        self._passed = self._prior.repeat(batch, 1)
        rank = torch.arange(ranks, device=device)
        self._table = Table(self._passed, self._tests, edges[0].to(device), edges[1].to(device), rank)

    def rate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Rate a slot by the probability that its child is accepted, over whatever token is drawn."""
        priority, value, self._cells = rate_by_table(self._table, slots.siblings())
        return priority, value

    def forget(self, row: int) -> None:
        """Give a sequence the tables of one that begins."""
        self._tests[row] = PRIOR_TESTS
        self._passed[row] = self._prior

    def note(self, slots: Tensor) -> Kept:
        """Note the cells of new nodes."""
        return Kept(self._cells, slots)

    def learn(self, proposal: Proposal, ratios: Tensor, is_live: Tensor) -> None:
        """Count every test by the probability that it is made: its ancestors accepted, its elder siblings not."""
        kept = [note for note in proposal.notes if note is not None]
        if kept:
            learn(self._table, kept, _verdicts(proposal, ratios, is_live))


def _verdicts(proposal: Proposal, ratios: Tensor, is_live: Tensor) -> Verdicts:
    """Say what verification says of a tree's nodes."""
    tree = proposal.tree
    return Verdicts(tree.parents, tree.ancestor_mask, proposal.selected, ratios, is_live)


def _middles(edges: Tensor) -> Tensor:
    """Give a point in every interval between 0, the edges and 1."""
    bounds = torch.cat([edges.new_zeros(1), edges, edges.new_ones(1)])
    return (bounds[1:] + bounds[:-1]) / 2
