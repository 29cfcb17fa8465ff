"""Exact probability that each drafted node is accepted, over the random numbers of a verifier."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stree.kernels.traversal.paths import Siblings
from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify import Acceptance, DraftProbs, accept

__all__ = ["expected_path", "from_coins"]


@dataclass(frozen=True, slots=True, eq=False)
class _Coins(Random):
    """Random numbers that record the acceptance probability of each test of ``accept``."""

    seen: list[Tensor]

    def bernoulli(self, purpose: str, probs: Tensor, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        """Record the probabilities, then draw as ``Random`` does."""
        self.seen.append(probs)
        return Random.bernoulli(self, purpose, probs, offset, node)


def expected_path(
    tree: TokenTree, target_logits: Tensor, sampling: Sampling, dists: DraftProbs | None, verifier: str
) -> tuple[Tensor, Acceptance]:
    """Compute how likely each drafted node is on the accepted path, over the verifier's random numbers.

    The tree is given; a step emits one token more than the sum in the mean.

    Returns:
        float64[batch, n], 0 for the root and padding; and one acceptance with its log.
    """
    batch, n = tree.tokens.shape
    rows = torch.arange(batch)
    rng = _Coins(0, rows, torch.zeros_like(rows), [])
    accepted = accept(tree, target_logits, sampling, rng, dists, verifier)
    siblings = Siblings.of(tree)
    if rng.seen:
        coins = torch.nn.functional.pad(rng.seen[0].double(), (1, 0))
        return from_coins(tree, coins, is_from_leaves=verifier != "rejection"), accepted
    if sampling.is_greedy:
        on_path = torch.zeros(batch, n + 1, dtype=torch.float64)
        on_path.scatter_(1, torch.where(accepted.path > 0, accepted.path, n).long(), 1.0)
        return on_path[:, :n], accepted
    dist = sampling.probs(target_logits).double()
    share = dist[rows[:, None], siblings.parents, tree.tokens]
    is_again = (siblings.is_earlier & (tree.tokens[:, :, None] == tree.tokens[:, None])).any(-1)
    share = torch.where(siblings.is_drafted, share * ~is_again, 1.0)
    return _along_paths(tree, share) * siblings.is_drafted, accepted


def from_coins(tree: TokenTree, coins: Tensor, *, is_from_leaves: bool) -> Tensor:
    """Compute how likely each drafted node is on the accepted path if each has a coin of its own.

    It is if the coins of its ancestors and its own show and those of their elder siblings do not (recursive rejection);
    or if a coin in its subtree shows and none in those of its ancestors' and its own elder siblings (traversal, which
    takes the first node in post-order whose coin shows).

    Args:
        tree: n nodes.
        coins: float64[batch, n], probability that each shows; those of the root and padding are not read.
        is_from_leaves: traversal.
    """
    siblings = Siblings.of(tree)
    fails = torch.where(siblings.is_drafted, 1 - coins, 1.0)
    if is_from_leaves:
        fails = torch.where(tree.ancestor_mask.transpose(1, 2), fails[:, None], 1.0).prod(-1)  # of the whole subtree
    elders_fail = torch.where(siblings.is_earlier, fails[:, None], 1.0).prod(-1)
    if is_from_leaves:
        return _along_paths(tree, elders_fail) * (1 - fails) * siblings.is_drafted
    return _along_paths(tree, torch.where(siblings.is_drafted, coins * elders_fail, 1.0)) * siblings.is_drafted


def _along_paths(tree: TokenTree, factor: Tensor) -> Tensor:
    """Multiply float64[batch, n] over every node's ancestors and itself."""
    return torch.where(tree.ancestor_mask, factor[:, None], 1.0).prod(-1)
