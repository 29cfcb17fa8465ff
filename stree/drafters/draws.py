"""Draws of child tokens without replacement, and the distributions that they were drawn from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stree.growth import Plan
from stree.kernels.constants import constant
from stree.kernels.ops import draw_distinct
from stree.kernels.tiles import padded
from stree.sampling import MAX_RANKS, Random
from stree.verify import DELTA, INDEPENDENT, SAMPLED, DraftProbs

__all__ = ["Candidates", "Draws", "draft_probs"]

# Draws without replacement stop when this share of a distribution is left: float64 sums would not be exact enough.
LEAST_MASS = 2.0**-20


class Candidates(NamedTuple):
    """Candidate children of some nodes.

    Attributes:
        tokens: int64[batch, rows, count], by rank.
        probs: float[batch, rows, count], under the distribution that was passed in: 0 where there is no child.
    """

    tokens: Tensor
    probs: Tensor


class Draws:
    """Draws of child tokens for a whole tree, without replacement below each node.

    All random numbers are generated at once, unless ``rng`` overrides ``choice``: then each draw is one call of it.

    Args:
        rng: random numbers, purpose "draft".
        num_nodes: nodes that may get children; node i draws its children with the counters i * MAX_RANKS + rank.
        num_ranks: largest number of children of a node.
    """

    def __init__(self, rng: Random, num_nodes: int, num_ranks: int) -> None:
        self._rng = rng
        self._numbers: Tensor | None = None
        if type(rng).choice is Random.choice:
            offset, node = _draft_counters(padded(num_nodes), num_ranks, rng.positions.device)
            rows = len(rng.positions)
            self._numbers = rng.uniform("draft", offset.expand(rows, -1, -1), node[:, :num_nodes].expand(rows, -1, -1))

    def draw(self, probs: Tensor, first: int, count: int) -> Candidates:
        """Draw children one after the other, each from the distribution without the earlier ones.

        Args:
            probs: float[batch, rows, vocab], distributions below the nodes first, first + 1, ...
            first: the first node.
            count: draws per row.

        Returns:
            The tokens in draw order; their probabilities are 0, and the tokens meaningless, once LEAST_MASS or less of
            the distribution is left.
        """
        rows = probs.shape[1]
        if self._numbers is not None:
            return Candidates(*draw_distinct(probs, self._numbers[:, first : first + rows, :count], least=LEAST_MASS))
        tokens, drawn = [], []
        node = torch.arange(first, first + rows, device=probs.device).expand(probs.shape[:2]) * MAX_RANKS
        least = LEAST_MASS * probs.sum(-1, keepdim=True)
        for rank in range(count):
            token = self._rng.choice("draft", probs, torch.zeros_like(node), node + rank).unsqueeze(-1)
            tokens.append(token)
            drawn.append(probs.gather(-1, token) * (probs.sum(-1, keepdim=True) > least))
            probs = probs.scatter(-1, token, 0.0)
        return Candidates(torch.cat(tokens, -1), torch.cat(drawn, -1))


@constant
def _draft_counters(num_nodes: int, num_ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Counters of the draws of a tree: int64[1, 1, 1] offset, 0, and int64[1, num_nodes, num_ranks] nodes."""
    node = torch.arange(num_nodes, device=device).unsqueeze(-1) * MAX_RANKS + torch.arange(num_ranks, device=device)
    return node.new_zeros(1, 1, 1), node.unsqueeze(0)


def draft_probs(probs: Tensor, rows: Tensor, plan: Plan, greedy_rows: Tensor | None) -> DraftProbs:
    """Distributions that nodes were drawn from: float[batch, nodes run, vocab], and each node's row of them.

    The nodes of greedy sequences, bool[batch], were not drawn.
    """
    most = plan.num_nodes if plan.is_heap else max((layer.ranks for layer in plan.layers), default=0)
    kind = INDEPENDENT if plan.drawing == "independent" else SAMPLED
    kinds = _kinds(padded(rows.numel()), kind, rows.device)[: rows.numel()].view(rows.shape)
    if greedy_rows is not None:
        kinds = kinds.masked_fill(greedy_rows[:, None], DELTA)
    return DraftProbs(probs, rows, kinds, most)


@constant
def _kinds(size: int, kind: int, device: torch.device) -> Tensor:
    """int8[size], of nodes that are all of one kind."""
    return torch.full((size,), kind, dtype=torch.int8, device=device)
