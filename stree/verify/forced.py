"""Acceptance of a given mean length, to time pairs whose own acceptance says nothing, such as random weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stree.checks import check_numbers
from stree.kernels.traversal.paths import deepest
from stree.sampling import AnySampling, Random
from stree.tree import TokenTree
from stree.verify.acceptance import VERIFIERS, Match
from stree.verify.values import Acceptance, DraftProbs

__all__ = ["ForcedLength"]


@dataclass(frozen=True)
class ForcedLength(Match):
    """Accept so many tokens a step on average, whatever the target says: not lossless, for timing only.

    A step accepts the first path of the tree down to a depth, ``tokens - 1`` rounded up or down at random so that it is
    the mean, or to the tree's deepest node where that is less deep.  The rule "auto" runs, too, so that its time is
    part of the step's.

    Args:
        tokens: of a step, that behind the accepted nodes included.

    Raises:
        TypeError: no number.
        ValueError: it is below 1 or not finite.
    """

    is_lossless = False

    tokens: float

    def __post_init__(self) -> None:
        check_numbers(tokens=self.tokens)
        if not 1 <= self.tokens < math.inf:
            raise ValueError(f"tokens must be at least 1 and finite, got {self.tokens}")

    def __call__(
        self, tree: TokenTree, target_logits: Tensor, sampling: AnySampling, rng: Random, draft: DraftProbs | None,
        max_depth: int,
    ) -> Acceptance:  # fmt: skip
        """Accept the first path down to the depth that is drawn; the target's own token follows."""
        accepted = VERIFIERS["auto"](tree, target_logits, sampling, rng, draft, max_depth)
        whole = math.floor(self.tokens - 1)
        offset = torch.zeros_like(tree.tokens[:, 0])
        share = torch.full_like(offset, self.tokens - 1 - whole, dtype=torch.float64)
        depth = whole + rng.bernoulli("accept", share, offset).long()
        is_kept = (tree.parents >= 0) & (tree.depths <= depth[:, None])
        path, path_lengths, leaf = deepest(tree, is_kept, max_depth)
        probs = sampling.probs(target_logits.take_along_dim(leaf[:, None, None], 1))
        next_token = rng.choice("target", probs, path_lengths[:, None]).squeeze(1)
        return replace(accepted, path=path, path_lengths=path_lengths, next_token=next_token)
