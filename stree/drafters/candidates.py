"""What a draft distribution offers below a node: children in the order of their tests, with their probabilities."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from stree.growth import Plan
from stree.growth.plan import Drawing
from stree.kernels.dispatch import host_can_read
from stree.sampling import MAX_RANKS, Draws, Random

__all__ = ["Independent", "Offered", "Offers", "offers_of", "top"]


class Offered(NamedTuple):
    """Children of some nodes.

    Attributes:
        tokens: int64[batch, rows, count], in the order of their tests.
        probs: float[batch, rows, count], under the distribution as it was given: 0 where there is no child.
    """

    tokens: Tensor
    probs: Tensor


class Offers(Protocol):
    """Children of the nodes of a growing tree."""

    def __call__(self, dist: Tensor, first: int, count: int) -> Offered:
        """Offer children.

        Args:
            dist: float[batch, rows, vocab], distributions below the nodes first, first + 1, ...
            first: number of the first node.
            count: children a node.
        """
        ...


def offers_of(drawing: Drawing, rng: Random, plan: Plan) -> Offers:
    """Give the children of a step's tree; drawn ones ask ``rng``."""
    if drawing == "top":
        return top
    if drawing == "independent":
        return Independent(rng)
    num_nodes = 1 + sum(layer.width for layer in plan.layers[:-1])
    draws = Draws(rng, num_nodes, max((layer.ranks for layer in plan.layers), default=0))
    return lambda dist, first, count: Offered(*draws.draw(dist, first, count))


def top(dist: Tensor, first: int, count: int) -> Offered:
    """Offer the most probable tokens, chosen without chance; arguments as for ``Offers``."""
    probs, tokens = (_top_on_host if host_can_read(dist) else torch.topk)(dist, min(count, dist.shape[-1]))
    if dist.shape[-1] >= count:
        return Offered(tokens, probs)
    beyond = (0, count - dist.shape[-1])
    return Offered(torch.nn.functional.pad(tokens, beyond), torch.nn.functional.pad(probs, beyond))


def _top_on_host(dist: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the most probable tokens of CPU distributions: float[batch, rows, count] probabilities, and the tokens."""
    from stree.kernels.sampling.cpu import top_rows  # imports numba

    probs, tokens = dist.new_empty(*dist.shape[:-1], count), torch.empty(*dist.shape[:-1], count, dtype=torch.long)
    top_rows(*(part.reshape(-1, part.shape[-1]).numpy() for part in (dist, tokens, probs)))
    return probs, tokens


class Independent:
    """Children drawn with replacement: siblings may carry the same token.

    Args:
        rng: source of the numbers, purpose "draft"; node i draws its children with the numbers i * MAX_RANKS + rank.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def __call__(self, dist: Tensor, first: int, count: int) -> Offered:
        """Offer tokens drawn one by one from the same distribution; arguments as for ``Offers``."""
        batch, rows = dist.shape[:2]
        node = torch.arange(first, first + rows, device=dist.device)[:, None] * MAX_RANKS
        node = (node + torch.arange(count, device=dist.device)).expand(batch, -1, -1)
        offset = torch.zeros_like(node[..., :1])
        if type(self._rng).choice is Random.choice:
            cumulative = dist.cumsum(-1, dtype=torch.float64)
            total = cumulative[..., -1:] * (1 - 2.0**-52)  # products that round up stay below it
            level = self._rng.uniform("draft", offset, node) * total
            tokens = torch.searchsorted(cumulative, level, right=True).clamp_(max=dist.shape[-1] - 1)
        else:  # a stand-in that chooses by itself is asked for every single draw
            probs_of_each, node = dist.repeat_interleave(count, 1), node.flatten(1)
            tokens = self._rng.choice("draft", probs_of_each, torch.zeros_like(node), node).view(batch, rows, count)
        return Offered(tokens, dist.gather(-1, tokens))
