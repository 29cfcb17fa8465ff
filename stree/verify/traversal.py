"""Traversal verification, from the leaves up; on a chain it is block verification."""

from __future__ import annotations

import torch
from torch import Tensor

from stree.kernels.dispatch import host_can_read, uses_triton
from stree.kernels.traversal import api
from stree.kernels.traversal.operands import DraftRows
from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify.paths import deepest
from stree.verify.rejection import toss
from stree.verify.trials import Trials
from stree.verify.values import DELTA, Acceptance, DraftProbs

__all__ = ["traverse", "traverse_by_kernels"]


def traverse(
    tree: TokenTree, target_probs: Tensor, rng: Random, draft: DraftProbs | None, max_depth: int
) -> Acceptance:
    """Try the leaves first: a node is accepted by its own coin where nothing below it is (arXiv 2505.12398).

    A child is held with the probability of its parent times p / q, at most 1; when all below it has failed, the
    parent's distribution is what the child leaves, and its probability of being held is weighed anew.  The first node
    in post-order whose coin shows is accepted.  Without branches this is block verification (arXiv 2403.10444).
    """
    # A stand-in tosses and draws by itself.
    if uses_triton(target_probs) and target_probs.dtype == torch.float32 and type(rng) is Random:
        return traverse_by_kernels(tree, target_probs, rng, draft, max_depth)
    if host_can_read(target_probs):
        return _traverse_on_host(tree, target_probs, rng, draft, max_depth)
    trials = Trials(tree, target_probs, draft)
    held = _hold_chain(trials, max_depth) if trials.siblings.most == 1 else _hold(tree, trials, max_depth)
    shown = toss(rng, held, trials.siblings.is_drafted)
    is_alive = (tree.ancestor_mask & shown[:, :, None]).any(1)  # it or a node below it shows
    leaf, path, path_lengths = deepest(tree, trials.siblings.eldest_of(is_alive), max_depth)
    depth = tree.depths.gather(1, leaf[:, None]).squeeze(1)
    next_token = rng.choice("target", trials.dist_at(leaf), depth + 1)
    return Acceptance(path, path_lengths, next_token, trials.ratio[:, :-1].clamp(max=1))


def traverse_by_kernels(
    tree: TokenTree, target_probs: Tensor, rng: Random, draft: DraftProbs | None, max_depth: int
) -> Acceptance:
    """Do the same in Triton, in launches whose number depends on sizes alone (`stree.kernels.traversal.api`).

    The numbers are the same; sums are rounded otherwise, and ``target_probs`` is left as it is.
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
    """Do the same compiled; ``target_probs`` is written."""
    from stree.kernels.traversal import cpu  # imports numba

    batch, n = tree.tokens.shape
    dist = target_probs.contiguous()
    if draft is None:
        probs, row = dist.new_zeros(batch, 1, 1), torch.zeros_like(tree.parents)
        kind = torch.full((batch, n), DELTA, dtype=torch.int8)
    else:
        probs, row, kind = draft.probs, draft.row.to(torch.int32), draft.kind
    held, ratios = dist.new_empty(batch, n, dtype=torch.float64), dist.new_empty(batch, n)
    given = (tree.tokens, tree.parents, dist, probs, row, kind, held, ratios)
    cpu.hold(*(part.contiguous().numpy() for part in given))
    shown = toss(rng, held, tree.parents >= 0)
    path = tree.parents.new_empty(batch, min(n, max_depth + 1))
    lengths, leaf = path.new_empty(batch), tree.tokens.new_empty(batch)
    found = (tree.parents, shown, path, lengths, leaf)
    cpu.walk(*(part.contiguous().numpy() for part in found))
    dist = dist[torch.arange(batch), leaf]
    return Acceptance(path, lengths, rng.choice("target", dist, lengths), ratios)


def _hold(tree: TokenTree, trials: Trials, max_depth: int) -> Tensor:
    """Test all children, depth by depth and rank by rank; give each node's coin, float[batch, n]."""
    held, most = torch.ones_like(trials.ratio), trials.siblings.most
    wave = (tree.depths.long() - 1) * most + trials.siblings.rank
    for nodes, child in trials.waves(wave, max_depth * most):
        below, above = trials.test(nodes, child, held.index_select(1, nodes))
        held.index_copy_(1, nodes, above)  # of rows where a node has no such child, too: before what is new
        held.scatter_(1, child, below)
    return held[:, :-1]


def _hold_chain(trials: Trials, max_depth: int) -> Tensor:
    """Test all nodes of a tree without branches at once."""
    ratio, parents = trials.first_ratios(), trials.siblings.parents
    held = torch.ones_like(ratio)
    for _ in range(max_depth):
        held = torch.where(trials.siblings.is_drafted, (held.gather(1, parents) * ratio).clamp(max=1), held)
    for nodes, child in trials.waves(trials.siblings.rank, 1):
        held.index_copy_(1, nodes, trials.test(nodes, child, held.index_select(1, nodes))[1])
    return held
