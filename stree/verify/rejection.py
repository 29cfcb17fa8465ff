"""Recursive rejection sampling without replacement."""

from __future__ import annotations

import torch
from torch import Tensor

from stree.kernels.traversal.paths import deepest
from stree.kernels.traversal.residuals import Residuals
from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify.values import Acceptance, DraftProbs

__all__ = ["draw_tests", "reject", "try_children"]


def reject(tree: TokenTree, target_probs: Tensor, rng: Random, draft: DraftProbs | None, max_depth: int) -> Acceptance:
    """Test the children of a node in draw order and go on below the first one that is accepted.

    A child with token x is accepted with probability min(1, p(x) / q(x)). After a rejection p becomes the residual
    distribution, max(p - q, 0) normalised, and the next sibling is tested against it. Recursive rejection sampling
    without replacement: RSD, arXiv 2402.14160; multi-step speculative sampling: SpecInfer, arXiv 2305.09781.

    Tests below different nodes are independent, so all nodes are tested in parallel, one sibling rank at a time.
    """
    residuals, ratio, is_accepted = try_children(tree, target_probs, rng, draft)
    path, path_lengths, leaf = deepest(tree, is_accepted, max_depth)
    depth = tree.depths.gather(1, leaf[:, None]).squeeze(1)
    return Acceptance(path, path_lengths, rng.choice("target", residuals.at(leaf), depth + 1), ratio)


def try_children(
    tree: TokenTree, target_probs: Tensor, rng: Random, draft: DraftProbs | None
) -> tuple[Residuals, Tensor, Tensor]:
    """Test all drafted nodes, one sibling rank at a time.

    Returns:
        The residual distributions; float[batch, n] acceptance ratios min(1, p / q); bool[batch, n], of each node's
        children the first one that is accepted.
    """
    residuals = Residuals(tree, target_probs, draft)
    siblings = residuals.siblings
    for nodes, child in residuals.waves(siblings.rank, siblings.most):
        residuals.test(nodes, child, torch.ones_like(child, dtype=target_probs.dtype))
    ratio = residuals.ratio[:, :-1].clamp(max=1)
    return residuals, ratio, siblings.first_of(draw_tests(rng, ratio, siblings.is_drafted))


def draw_tests(rng: Random, probs: Tensor, is_drafted: Tensor) -> Tensor:
    """Draw whether each drafted node passes its test, one random number per node: bool[batch, n].

    Nodes are numbered without padding, of which there is more where other rows of the batch have larger trees.
    """
    node = is_drafted.cumsum(1)[:, 1:]
    is_passed = rng.bernoulli("accept", (probs * is_drafted)[:, 1:], torch.zeros_like(node), node)
    return torch.nn.functional.pad(is_passed, (1, 0))
