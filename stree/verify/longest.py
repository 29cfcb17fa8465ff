"""The acceptance rule of improved multi-candidate speculative decoding (arXiv 2409.10644): not lossless."""

from __future__ import annotations

from torch import Tensor

from stree.kernels.traversal.paths import deepest
from stree.sampling import AnySampling, Random
from stree.tree import TokenTree
from stree.verify.rejection import try_children
from stree.verify.values import Acceptance, DraftProbs

__all__ = ["longest"]


def longest(
    tree: TokenTree, target_logits: Tensor, sampling: AnySampling, rng: Random, draft: DraftProbs | None, max_depth: int
) -> Acceptance:
    """Keep all children of the root, verify the tree below each, and accept the longest path (arXiv 2409.10644).

    The root's children were drawn from the target itself. Choosing among them by the length of the accepted path
    favours tokens that the draft continues well, so the output distribution differs from the target's, also at
    temperature 0. With one child of the root it is recursive rejection.

    The last accepted node becomes ``next_token`` and is left out of the path, because it is the next root; the next
    children are drawn from ``left``, the residual distribution after it. For a root without children the path length
    is 0 and ``left`` is the distribution after the root.
    """
    residuals, ratio, is_accepted = try_children(tree, sampling.probs(target_logits), rng, draft)
    is_candidate = tree.parents == 0
    path, path_lengths, leaf = deepest(tree, is_accepted | is_candidate, max_depth)
    if sampling.is_greedy:  # target_probs are one-hot, but the next candidates are the most probable tokens
        left = target_logits.take_along_dim(leaf[:, None, None], 1).squeeze(1).softmax(-1)
    else:
        left = residuals.at(leaf)
    path = path.scatter(1, (path_lengths - 1)[:, None].long(), -1)
    next_token = tree.tokens.gather(1, leaf[:, None]).squeeze(1)
    ratio = ratio.masked_fill(is_candidate, 1)
    return Acceptance(path, path_lengths - 1, next_token, ratio, left / left.sum(-1, keepdim=True))
