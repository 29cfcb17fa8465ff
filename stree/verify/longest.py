"""The longest of several branches: improved multi-candidate speculative decoding's rule.  It is not lossless."""

from __future__ import annotations

from torch import Tensor

from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify.paths import deepest
from stree.verify.rejection import try_children
from stree.verify.values import Acceptance, DraftProbs

__all__ = ["longest"]


def longest(
    tree: TokenTree, target_logits: Tensor, sampling: Sampling, rng: Random, draft: DraftProbs | None, max_depth: int
) -> Acceptance:
    """Keep all children of the root, test what stands below each, and follow the branch that lasts longest.

    The root's children come from the target's own distribution (arXiv 2409.10644).  To choose among them by how far
    the draft's continuations last favours tokens that the draft continues well, so the text has another distribution
    than the target's, at temperature 0 as well.  With one child it is recursive rejection.

    The last accepted node becomes ``next_token`` and is left out of the path: it is run again as the next root, and
    ``left`` is the distribution of what follows it, from which the next children are drawn.  A root without children
    emits
    nothing: its path length is 0, and ``left`` is the distribution after itself.
    """
    trials, ratio, is_kept = try_children(tree, sampling.probs(target_logits), rng, draft)
    is_candidate = tree.parents == 0
    leaf, path, path_lengths = deepest(tree, is_kept | is_candidate, max_depth)
    if sampling.is_greedy:  # the distribution is one-hot; the next candidates are the most probable tokens
        left = target_logits.take_along_dim(leaf[:, None, None], 1).squeeze(1).softmax(-1)
    else:
        left = trials.dist_at(leaf)
    held_back = (path_lengths - 1)[:, None].long()
    path = path.scatter(1, held_back, -1)
    next_token = tree.tokens.gather(1, leaf[:, None]).squeeze(1)
    ratio = ratio.masked_fill(is_candidate, 1)
    return Acceptance(path, path_lengths - 1, next_token, ratio, left / left.sum(-1, keepdim=True))
