"""Traversal verification, which is block verification on a chain."""

from __future__ import annotations

import torch
from torch import Tensor

from stree.kernels.dispatch import draws_in_kernels
from stree.kernels.traversal import api
from stree.kernels.traversal.api import hold, walk
from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify.rejection import draw_tests
from stree.verify.values import Acceptance, DraftProbs

__all__ = ["traverse", "traverse_by_kernels"]


def traverse(
    tree: TokenTree, target_probs: Tensor, rng: Random, draft: DraftProbs | None, max_depth: int
) -> Acceptance:
    """Test nodes from the leaves up (traversal verification, arXiv 2505.12398).

    A child's acceptance probability is that of its parent times p / q, at most 1. When all nodes below it have been
    rejected, the parent's distribution becomes the residual and its acceptance probability is computed anew. Each node
    draws one random number; the first node in post-order that passes is accepted with its path. On a chain this is
    block verification (arXiv 2403.10444). ``target_probs`` is overwritten where no Triton kernel runs.
    """
    if type(rng) is Random and draws_in_kernels(target_probs):  # a subclass draws its own numbers
        return traverse_by_kernels(tree, target_probs, rng, draft, max_depth)
    held = hold(tree, target_probs, draft, max_depth)
    is_passed = draw_tests(rng, held.accept_probs, tree.parents >= 0)
    path, path_lengths, leaf = walk(tree, is_passed, max_depth)
    left = held.left[torch.arange(len(leaf), device=leaf.device), leaf]
    return Acceptance(path, path_lengths, rng.choice("target", left, path_lengths), held.ratios)


def traverse_by_kernels(
    tree: TokenTree, target_probs: Tensor, rng: Random, draft: DraftProbs | None, max_depth: int
) -> Acceptance:
    """Run traversal verification in Triton, without synchronising (`stree.kernels.traversal.api`).

    The random numbers are the same as in torch, the rounding of sums is not. ``target_probs`` is not written.
    """
    found = api.traverse(
        tree, target_probs, draft, max_depth=max_depth, seed=rng.seed, sequences=rng.sequences.long(),
        positions=rng.positions.long(),
    )  # fmt: skip
    return Acceptance(found.path, found.path_lengths, found.next_token, found.ratios)
