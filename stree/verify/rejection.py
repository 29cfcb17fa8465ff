"""Recursive rejection: children in draw order, each against what its elder siblings' rejection leaves of p."""

from __future__ import annotations

import torch
from torch import Tensor

from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify.paths import deepest
from stree.verify.trials import Trials
from stree.verify.values import Acceptance, DraftProbs

__all__ = ["reject", "toss", "try_children"]


def reject(tree: TokenTree, target_probs: Tensor, rng: Random, draft: DraftProbs | None, max_depth: int) -> Acceptance:
    """Accept a child with probability min(1, p / q) and go on below it; after a rejection p <- norm(max(p - q, 0)).

    Recursive rejection without replacement: RSD, arXiv 2402.14160; SpecInfer, arXiv 2305.09781.  A test does not depend
    on those of other nodes' children, so all nodes are tested at once, one sibling rank after the other.
    """
    trials, ratio, is_kept = try_children(tree, target_probs, rng, draft)
    leaf, path, path_lengths = deepest(tree, is_kept, max_depth)
    depth = tree.depths.gather(1, leaf[:, None]).squeeze(1)
    return Acceptance(path, path_lengths, rng.choice("target", trials.dist_at(leaf), depth + 1), ratio)


def try_children(
    tree: TokenTree, target_probs: Tensor, rng: Random, draft: DraftProbs | None
) -> tuple[Trials, Tensor, Tensor]:
    """Test all nodes, one sibling rank after the other.

    Returns:
        What is left of the distributions; float[batch, n] acceptance probabilities; bool[batch, n], of each node's
        children the first one that is accepted.
    """
    trials = Trials(tree, target_probs, draft)
    for nodes, child in trials.waves(trials.siblings.rank, trials.siblings.most):
        trials.test(nodes, child, torch.ones_like(child, dtype=target_probs.dtype))
    ratio = trials.ratio[:, :-1].clamp(max=1)
    return trials, ratio, trials.siblings.eldest_of(toss(rng, ratio, trials.siblings.is_drafted))


def toss(rng: Random, probs: Tensor, is_drafted: Tensor) -> Tensor:
    """Toss the coin of every drafted node: bool[batch, n]."""
    node = torch.arange(1, probs.shape[1], device=probs.device).expand(len(probs), -1)
    shown = rng.bernoulli("accept", (probs * is_drafted)[:, 1:], torch.zeros_like(node), node)
    return torch.nn.functional.pad(shown, (1, 0))
