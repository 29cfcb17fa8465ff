"""What a draft law offers below a node: children in draw order, with their probabilities."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from stree.growth import Plan
from stree.growth.plan import Drawing
from stree.sampling import MAX_RANKS, Draws, Random

__all__ = ["Independent", "Offers", "offers_of", "top"]


class Offers(Protocol):
    """Children of the nodes of a growing tree."""

    def __call__(self, law: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Offer children.

        Args:
            law: float[batch, rows, vocab], laws below the nodes first, first + 1, ...
            first: number of the first node.
            count: children a node.

        Returns:
            int64[batch, rows, count] tokens in draw order and float[batch, rows, count] their probabilities under
            ``law``: 0 where there is none.
        """
        ...


def offers_of(drawing: Drawing, rng: Random, plan: Plan) -> Offers:
    """Give the children of a step's tree; drawn ones ask ``rng``."""
    if drawing == "top":
        return top
    if drawing == "independent":
        return Independent(rng)
    num_nodes = 1 + sum(layer.width for layer in plan.layers[:-1])
    return Draws(rng, num_nodes, max((layer.ranks for layer in plan.layers), default=0)).draw


def top(law: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Offer the most probable tokens, chosen without chance; arguments as for ``Offers``."""
    probs, tokens = law.topk(min(count, law.shape[-1]), -1)
    beyond = (0, count - probs.shape[-1])  # more children than tokens
    return torch.nn.functional.pad(tokens, beyond), torch.nn.functional.pad(probs, beyond)


class Independent:
    """Children drawn with replacement: siblings may carry the same token.

    Args:
        rng: source of the numbers, purpose "draft"; node i draws its children with the numbers i * MAX_RANKS + rank.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def __call__(self, law: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Offer tokens drawn one by one from the same law; arguments as for ``Offers``."""
        batch, rows = law.shape[:2]
        node = torch.arange(first, first + rows, device=law.device)[:, None] * MAX_RANKS
        node = (node + torch.arange(count, device=law.device)).expand(batch, -1, -1)
        offset = torch.zeros_like(node[..., :1])
        if type(self._rng).choice is Random.choice:
            cumulative = law.cumsum(-1, dtype=torch.float64)
            total = cumulative[..., -1:] * (1 - 2.0**-52)  # products that round up stay below it
            level = self._rng.uniform("draft", offset, node) * total
            tokens = torch.searchsorted(cumulative, level, right=True).clamp_(max=law.shape[-1] - 1)
        else:  # a stand-in that chooses by itself is asked for every single draw
            law_of_each, node = law.repeat_interleave(count, 1), node.flatten(1)
            tokens = self._rng.choice("draft", law_of_each, torch.zeros_like(node), node).view(batch, rows, count)
        return tokens, law.gather(-1, tokens)
