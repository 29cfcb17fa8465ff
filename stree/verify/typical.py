"""Typical acceptance (Medusa, arXiv 2401.10774): not lossless."""

from __future__ import annotations

import torch
from torch import Tensor

from stree.checks import check_shares
from stree.kernels.traversal.paths import deepest
from stree.sampling import AnySampling, Random
from stree.tree import TokenTree
from stree.verify.values import Acceptance, DraftProbs
from stree.verify.verifier import Verifier

__all__ = ["TypicalAcceptance"]

EPSILON = 1e-5  # within the logarithm of the entropy, as in Medusa's code


class TypicalAcceptance(Verifier):
    """Accept every drafted token that the target finds likely enough, and of the longest paths the most probable one.

    A token is accepted where its probability is above min(threshold, alpha * exp(-entropy)), entropy being that of the
    target's distribution there.  It does not matter what the token was drawn from, so likely tokens are emitted more
    often than the target would: ``generate`` takes this rule with ``allow_lossy=True`` only, for comparison.  At
    temperature 0 it is greedy decoding.

    The token after the path is sampled from the target.  Defaults are those of Medusa's code; a paper's own text may
    use others.

    Args:
        threshold: probability that is enough anywhere.
        alpha: factor of the bound by entropy.

    Raises:
        ValueError: an argument outside [0, 1].
    """

    is_lossless = False

    def __init__(self, threshold: float = 0.09, alpha: float = 0.3) -> None:
        check_shares(threshold=threshold, alpha=alpha)
        self.threshold, self.alpha = threshold, alpha

    def __call__(
        self, tree: TokenTree, target_logits: Tensor, sampling: AnySampling, rng: Random, draft: DraftProbs | None,
        max_depth: int,
    ) -> Acceptance:  # fmt: skip
        """Accept by probability."""
        probs, parents = sampling.probs(target_logits), tree.parents.clamp(min=0).long()
        entropy = -(probs * (probs + EPSILON).log()).sum(-1)
        least = (self.alpha * (-entropy).exp()).clamp(max=self.threshold).gather(1, parents)
        of_token = probs.gather(1, parents[..., None].expand_as(probs)).gather(2, tree.tokens[..., None]).squeeze(2)
        is_accepted = (of_token > least) & (tree.parents >= 0)
        is_accepted[:, 0] = True
        ancestors = tree.ancestor_mask
        is_reached = ~(ancestors & ~is_accepted[:, None]).any(-1) & ~tree.is_padding
        of_token[:, 0] = 1  # the root is no guess
        log_probs = (ancestors * of_token.log().clamp(min=-1e4)[:, None]).sum(-1)  # of paths
        depths = tree.depths.masked_fill(~is_reached, -1)
        best = log_probs.masked_fill(depths < depths.amax(1, keepdim=True), -torch.inf).argmax(1)
        is_on = ancestors.gather(1, best.view(-1, 1, 1).expand(-1, 1, ancestors.shape[2])).squeeze(1)
        path, path_lengths, leaf = deepest(tree, is_accepted & is_on, max_depth)
        after = probs.take_along_dim(leaf[:, None, None], 1).squeeze(1)
        depth = tree.depths.gather(1, leaf[:, None]).squeeze(1)
        return Acceptance(path, path_lengths, rng.choice("target", after, depth + 1))
