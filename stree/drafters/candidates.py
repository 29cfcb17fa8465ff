"""Candidate tokens below a node: children in the order in which they are tested, with their draft probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from stree.drafters.draws import Candidates, Draws
from stree.growth import Plan
from stree.growth.plan import Drawing
from stree.sampling import MAX_RANKS, AnySampling, Random

__all__ = [
    "CandidateSource", "Candidates", "IndependentDraws", "Offered", "by_kind", "candidate_source", "top_candidates",
]  # fmt: skip


class Offered(NamedTuple):
    """All candidates of a tree, of which some became its nodes.

    Attributes:
        layers: candidates below the nodes that were run, layer by layer.
        rows: int32[batch, n], of each node of the tree its parent's place among the nodes that were run.
    """

    layers: tuple[Candidates, ...]
    rows: Tensor

    def probs(self, tokens: Tensor) -> Tensor:
        """Return the draft's probability of each of int64[batch, n] nodes, float[batch, n]; the root's is undefined."""
        most = max(layer.tokens.shape[-1] for layer in self.layers)
        same_ranks = ([pad(part, (0, most - part.shape[-1])) for part in layer] for layer in self.layers)
        offered = (torch.cat(parts, 1) for parts in zip(*same_ranks, strict=True))
        rows = self.rows.clamp(min=0).long()[..., None]
        names, probs = (part.take_along_dim(rows, 1) for part in offered)
        return (probs * (names == tokens[..., None])).amax(-1)  # drawn with replacement, a token may occur twice


class CandidateSource(Protocol):
    """Takes candidates from the distributions below the nodes of one growing tree."""

    def __call__(self, dist: Tensor, first: int, count: int, /) -> Candidates:
        """Return candidates of every row.

        Args:
            dist: float[batch, rows, vocab], distributions below the nodes first, first + 1, ...
            first: number of the first node in random draws.
            count: candidates per node.
        """
        ...


def candidate_source(drawing: Drawing, rng: Random, plan: Plan, sampling: AnySampling) -> CandidateSource:
    """Return the source of candidates for one tree; sources that draw use ``rng``.

    Greedy sequences of a batch get the most probable tokens, also where others are sampled.
    """
    if drawing == "top":
        return top_candidates
    num_nodes = 1 + sum(layer.width for layer in plan.layers[:-1])
    most = max((layer.ranks for layer in plan.layers), default=0)
    draw = IndependentDraws(rng) if drawing == "independent" else Draws(rng, num_nodes, most).draw

    if sampling.greedy_rows is None:
        return draw
    is_greedy = sampling.greedy_rows[:, None, None]

    def candidates(dist: Tensor, first: int, count: int) -> Candidates:
        likeliest = top_candidates(dist, first, count)
        pairs = zip(likeliest, draw(dist, first, count), strict=True)
        return Candidates(*(torch.where(is_greedy, best, drawn) for best, drawn in pairs))

    return candidates


def by_kind(sampling: AnySampling, if_greedy: Callable[[], Tensor], if_sampled: Callable[[], Tensor]) -> Tensor:
    """Compute [batch, ...] values of greedy or of sampled sequences, and both where the batch holds both."""
    if sampling.is_greedy:
        return if_greedy()
    if sampling.greedy_rows is None:
        return if_sampled()
    return torch.where(sampling.greedy_rows[:, None], if_greedy(), if_sampled())


def top_candidates(dist: Tensor, first: int, count: int) -> Candidates:
    """Return the most probable tokens; arguments as for ``CandidateSource``."""
    probs, tokens = dist.topk(min(count, dist.shape[-1]))
    if dist.shape[-1] >= count:
        return Candidates(tokens, probs)
    beyond = (0, count - dist.shape[-1])
    return Candidates(pad(tokens, beyond), pad(probs, beyond))


class IndependentDraws:
    """Children drawn with replacement: siblings may carry the same token.

    Args:
        rng: random numbers, purpose "draft"; node i draws its children with the numbers i * MAX_RANKS + rank.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def __call__(self, dist: Tensor, first: int, count: int) -> Candidates:
        """Draw every candidate from the same distribution; arguments as for ``CandidateSource``."""
        batch, rows = dist.shape[:2]
        node = torch.arange(first, first + rows, device=dist.device)[:, None] * MAX_RANKS
        node = (node + torch.arange(count, device=dist.device)).expand(batch, -1, -1)
        offset = torch.zeros_like(node[..., :1])
        if type(self._rng).choice is Random.choice:
            cumulative = dist.cumsum(-1, dtype=torch.float64)
            total = cumulative[..., -1:] * (1 - 2.0**-52)  # products that round up stay below it
            level = self._rng.uniform("draft", offset, node) * total
            tokens = torch.searchsorted(cumulative, level, right=True).clamp_(max=dist.shape[-1] - 1)
        else:  # a test's source of choices is asked for every single draw
            probs_of_each, node = dist.repeat_interleave(count, 1), node.flatten(1)
            tokens = self._rng.choice("draft", probs_of_each, torch.zeros_like(node), node).view(batch, rows, count)
        return Candidates(tokens, dist.gather(-1, tokens))
