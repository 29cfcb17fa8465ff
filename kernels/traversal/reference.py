"""Traversal verification in plain torch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from stree.kernels.traversal.operands import DraftProbs, Held, Tree, Walked
from stree.kernels.traversal.paths import Siblings, deepest
from stree.kernels.traversal.residuals import Residuals

__all__ = ["accept_probs", "hold", "walk"]


def hold(tree: Tree, target_probs: Tensor, draft: DraftProbs | None, max_depth: int) -> Held:
    """Test all nodes; see `stree.kernels.traversal.api`."""
    residuals = Residuals(tree, target_probs, draft)
    probs = accept_probs(tree, residuals, max_depth)
    return Held(probs, residuals.ratio[:, :-1].clamp(max=1), residuals.left)


def accept_probs(tree: Tree, residuals: Residuals, max_depth: int) -> Tensor:
    """Test all children, depth by depth and rank by rank: float[batch, n] acceptance probabilities of the nodes."""
    probs, most = torch.ones_like(residuals.ratio), residuals.siblings.most
    wave = (tree.depths.long() - 1) * most + residuals.siblings.rank
    for nodes, child in residuals.waves(wave, max_depth * most):
        child_prob, parent_prob = residuals.test(nodes, child, probs.index_select(1, nodes))
        # Parents first: in another row of the batch such a node may be one of the children.
        probs.index_copy_(1, nodes, parent_prob)
        probs.scatter_(1, child, child_prob)
    return probs[:, :-1]


def walk(tree: Tree, is_passed: Tensor, max_depth: int) -> Walked:
    """Walk down to the first node in post-order that passes; see `stree.kernels.traversal.api`."""
    is_passed_below = (tree.ancestor_mask & is_passed[:, :, None]).any(1)  # by the node itself or one below it
    return deepest(tree, Siblings.of(tree).first_of(is_passed_below), max_depth)
