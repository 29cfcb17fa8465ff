"""Retrieved first tokens are removed from a draft model's distribution, for trees that test those tokens first."""

from __future__ import annotations

import torch
from torch import Tensor

from stree.drafters.tree_builder import FIRST_DRAFTED
from stree.growth import Growth
from stree.sampling import Sampling
from stree.tree import TokenTree

__all__ = ["Hiding", "has_share"]

UNLIKELY = -1e30  # logit of a hidden token: its probability is 0 unless nothing else is left, and then no NaN


class Hiding:
    """Processes a draft model's logits so that no first token that was retrieved is drawn after the root.

    Its tree then grows beside the retrieved one: no token is a child of the root twice.

    Attributes:
        shown: bool[batch, n], the retrieved nodes that stay; the first call for a tree prunes them.
    """

    shown: Tensor
    _retrieved: TokenTree

    def hide(self, tree: TokenTree, is_kept: Tensor, growth: Growth | None, least_share: float) -> None:
        """Hide the first tokens of bool[batch, n] nodes of a retrieved tree while the next tree is drafted."""
        self._retrieved, self.shown, self._kept = tree, is_kept, is_kept
        self._sampling, self._least_share = Sampling() if growth is None else growth.sampling, least_share

    def __call__(self, tree: TokenTree, logits: Tensor) -> Tensor:
        """Hide tokens in a tree's first call, which scores the root; logits are float[batch, columns, vocab]."""
        if tree.tokens.shape[1] > FIRST_DRAFTED:
            return logits
        if not self._sampling.is_greedy:
            probs = self._sampling.draft_probs(logits[:, 0])[0]
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
