"""A draft model from whose distribution retrieved first tokens are removed, for trees that test those tokens first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stree.growth import Growth
from stree.models.tree_lm import TreeLM
from stree.sampling import AnySampling, Sampling
from stree.tree import TokenTree

__all__ = ["HidingLM", "has_share"]

UNLIKELY = -1e30  # logit of a hidden token: its probability is 0 unless nothing else is left, and then no NaN


class HidingLM:
    """A draft model whose distribution after the root excludes the first tokens that were retrieved.

    Its tree then grows beside the retrieved one: no token is a child of the root twice.

    Args:
        lm: the draft model.

    Attributes:
        shown: bool[batch, n], the retrieved nodes that stay; the first call of a tree prunes them.
    """

    shown: Tensor

    def __init__(self, lm: TreeLM) -> None:
        self._lm = lm
        self._retrieved: TokenTree | None = None
        self._sampling: AnySampling = Sampling()
        self._least_share = 0.0

    def __getattr__(self, name: str) -> Any:
        """Delegate everything else to the model."""
        return getattr(self._lm, name)

    def hide(self, tree: TokenTree, is_kept: Tensor, growth: Growth | None, least_share: float) -> None:
        """Hide the first tokens of bool[batch, n] nodes of a retrieved tree while the next tree is drafted."""
        self._retrieved, self.shown, self._kept = tree, is_kept, is_kept
        self._sampling, self._least_share = Sampling() if growth is None else growth.sampling, least_share

    def verify(self, state: Any, tree: TokenTree, first: int = 0) -> Tensor:
        """Score a tree; its first call (``first=0``) scores the root."""
        logits = self._lm.verify(state, tree, first)
        if first or self._retrieved is None:
            return logits
        if not self._sampling.is_greedy:
            # The model's tree begins with its last leaf and the root, or with the root and padding.
            root = (tree.parents[:, 1] >= 0).long()
            probs = self._sampling.draft_probs(logits[torch.arange(len(root), device=root.device), root])[0]
            self.shown = self._kept & has_share(self._retrieved, probs, self._least_share)
        is_first = self.shown & (self._retrieved.depths == 1)
        hidden = torch.zeros(len(logits), logits.shape[-1], dtype=torch.int32, device=logits.device)
        hidden.scatter_add_(1, self._retrieved.tokens, is_first.to(torch.int32))
        return logits.masked_fill(hidden[:, None] > 0, UNLIKELY)


def has_share(tree: TokenTree, probs: Tensor, least: float) -> Tensor:
    """Mask of the nodes below a first token with at least probability ``least``: bool[batch, n].

    Args:
        tree: retrieved.
        probs: float[batch, vocab], after the root.
        least: RASD's pruning threshold.
    """
    unlikely = (tree.depths == 1) & (probs.gather(1, tree.tokens) < least)
    return ~(tree.ancestor_mask & unlikely[:, None]).any(-1)
