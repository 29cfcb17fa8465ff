"""Traversal verification, which is block verification on a chain: in torch, on the CPU in numba, on a GPU in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from stree.kernels.dispatch import host_can_read, uses_triton
from stree.kernels.traversal import api
from stree.kernels.traversal.operands import DraftRows
from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify.paths import deepest
from stree.verify.rejection import draw_tests
from stree.verify.residuals import Residuals
from stree.verify.values import DELTA, Acceptance, DraftProbs

__all__ = ["traverse", "traverse_by_kernels"]


def traverse(
    tree: TokenTree, target_probs: Tensor, rng: Random, draft: DraftProbs | None, max_depth: int
) -> Acceptance:
    """Test nodes from the leaves up (traversal verification, arXiv 2505.12398).

    A child's acceptance probability is that of its parent times p / q, at most 1. When all nodes below it have been
    rejected, the parent's distribution becomes the residual and its acceptance probability is computed anew. Each node
    draws one random number; the first node in post-order that passes is accepted with its path. On a chain this is
    block verification (arXiv 2403.10444). ``target_probs`` is overwritten on the CPU.
    """
    # A subclass of Random draws its own numbers, which kernels cannot.
    if uses_triton(target_probs) and target_probs.dtype == torch.float32 and type(rng) is Random:
        return traverse_by_kernels(tree, target_probs, rng, draft, max_depth)
    if host_can_read(target_probs):
        return _traverse_on_host(tree, target_probs, rng, draft, max_depth)
    residuals = Residuals(tree, target_probs, draft)
    siblings = residuals.siblings
    accept_probs = _accept_probs(tree, residuals, max_depth)
    is_passed = draw_tests(rng, accept_probs, siblings.is_drafted)
    is_passed_below = (tree.ancestor_mask & is_passed[:, :, None]).any(1)  # by the node itself or one below it
    leaf, path, path_lengths = deepest(tree, siblings.first_of(is_passed_below), max_depth)
    depth = tree.depths.gather(1, leaf[:, None]).squeeze(1)
    next_token = rng.choice("target", residuals.at(leaf), depth + 1)
    return Acceptance(path, path_lengths, next_token, residuals.ratio[:, :-1].clamp(max=1))


def traverse_by_kernels(
    tree: TokenTree, target_probs: Tensor, rng: Random, draft: DraftProbs | None, max_depth: int
) -> Acceptance:
    """Run traversal verification in Triton, without synchronising (`stree.kernels.traversal.api`).

    The random numbers are the same as in torch, the rounding of sums is not. ``target_probs`` is not written.
    """
    rows = None if draft is None else DraftRows(draft.probs, draft.row, draft.kind)
    found = api.traverse(
        tree.tokens, tree.parents, tree.ancestor_mask, tree.depths, target_probs, rows, max_depth=max_depth,
        max_children=None if draft is None else draft.max_children,
        seed=rng.seed, sequences=rng.sequences.long(), positions=rng.positions.long(),
    )  # fmt: skip
    return Acceptance(found.path, found.path_lengths, found.next_token, found.ratios)


def _traverse_on_host(
    tree: TokenTree, target_probs: Tensor, rng: Random, draft: DraftProbs | None, max_depth: int
) -> Acceptance:
    """Run traversal verification in numba; ``target_probs`` is overwritten by the residual distributions."""
    from stree.kernels.traversal import cpu  # imports numba

    batch, n = tree.tokens.shape
    residual = target_probs.contiguous()
    if draft is None:
        probs, row = residual.new_zeros(batch, 1, 1), torch.zeros_like(tree.parents)
        kind = torch.full((batch, n), DELTA, dtype=torch.int8)
    else:
        probs, row, kind = draft.probs, draft.row.to(torch.int32), draft.kind
    accept_probs, ratios = residual.new_empty(batch, n, dtype=torch.float64), residual.new_empty(batch, n)
    given = (tree.tokens, tree.parents, residual, probs, row, kind, accept_probs, ratios)
    cpu.hold(*(part.contiguous().numpy() for part in given))
    is_passed = draw_tests(rng, accept_probs, tree.parents >= 0)
    path = tree.parents.new_empty(batch, min(n, max_depth + 1))
    lengths, leaf = path.new_empty(batch), tree.tokens.new_empty(batch)
    found = (tree.parents, is_passed, path, lengths, leaf)
    cpu.walk(*(part.contiguous().numpy() for part in found))
    residual = residual[torch.arange(batch), leaf]
    return Acceptance(path, lengths, rng.choice("target", residual, lengths), ratios)


def _accept_probs(tree: TokenTree, residuals: Residuals, max_depth: int) -> Tensor:
    """Test all children, depth by depth and rank by rank: float[batch, n] acceptance probabilities of the nodes."""
    accept_probs, most = torch.ones_like(residuals.ratio), residuals.siblings.most
    wave = (tree.depths.long() - 1) * most + residuals.siblings.rank
    for nodes, child in residuals.waves(wave, max_depth * most):
        child_prob, parent_prob = residuals.test(nodes, child, accept_probs.index_select(1, nodes))
        # Parents first: in another row of the batch such a node may be one of the children.
        accept_probs.index_copy_(1, nodes, parent_prob)
        accept_probs.scatter_(1, child, child_prob)
    return accept_probs[:, :-1]
