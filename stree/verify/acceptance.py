"""`accept`: checks its arguments and runs the verifier that was asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from stree.kernels.checks import checks_values
from stree.kernels.dispatch import is_known_all
from stree.sampling import AnySampling, Random
from stree.tree import TokenTree
from stree.verify.longest import longest
from stree.verify.match import match
from stree.verify.rejection import reject
from stree.verify.traversal import traverse
from stree.verify.values import DELTA, Acceptance, DraftProbs

__all__ = ["LONGEST", "VERIFIERS", "accept"]

VERIFIERS: Final = ("auto", "match", "rejection", "traversal", "block")
LONGEST: Final = "lossy-longest"  # used with the growth ``TargetInit`` only; users cannot choose it


def accept(
    tree: TokenTree,
    target_logits: Tensor,
    sampling: AnySampling,
    rng: Random,
    draft: DraftProbs | None = None,
    verifier: str = "auto",
    max_depth: int | None = None,
) -> Acceptance:
    """Choose the accepted path of each tree and the token after it, so that the text follows the target exactly.

    "match" is lossless for every tree and accepts most where all nodes are DELTA. "rejection" and "traversal" are
    lossless if ``draft`` holds the distributions that the nodes were drawn from. Traversal accepts at least as many
    tokens as rejection; on a chain it is block verification, and "block" is traversal that refuses branches. LONGEST
    (improved MCSD) is not lossless. At temperature 0 all lossless verifiers follow the argmax.

    Args:
        tree: n nodes.
        target_logits: float[batch, n, vocab].
        sampling: temperature, top-k and top-p of the target.
        rng: random numbers of this step, positioned at the roots.
        draft: draft distributions of the nodes; None means that every node is DELTA.
        verifier: "match", "rejection", "traversal", "block", or "auto": match if ``draft`` is None, or on the CPU has
            only DELTA nodes; else traversal.
        max_depth: upper bound of the depths; None reads it from the tree, which synchronises with a device.

    Raises:
        ValueError: shapes disagree, the verifier is unknown, or (checked on the CPU only) logits are NaN, or +inf
            where tokens are sampled, or "block" got a tree with branches.
    """
    target_logits = target_logits.detach()
    if verifier not in (*VERIFIERS, LONGEST):
        raise ValueError(f"verifier must be one of {', '.join(VERIFIERS)}, got {verifier!r}")
    _check_shapes(tree, target_logits, draft)
    if checks_values(target_logits):
        _check_values(tree, target_logits, sampling, is_block=verifier == "block")
    if draft is not None and draft.probs.dtype in (torch.float16, torch.bfloat16):
        draft = replace(draft, probs=draft.probs.float())
    if max_depth is None:
        max_depth = int(tree.depths.max())
    if verifier == LONGEST:
        return longest(tree, target_logits, sampling, rng, draft, max_depth)
    if verifier == "auto":
        verifier = "match" if draft is None or _is_known_delta(tree, draft) else "traversal"
    if sampling.is_greedy or verifier == "match":
        return match(tree, target_logits, sampling, rng, max_depth)
    rule = reject if verifier == "rejection" else traverse
    return rule(tree, sampling.probs(target_logits), rng, draft, max_depth)


def _check_shapes(tree: TokenTree, target_logits: Tensor, draft: DraftProbs | None) -> None:
    batch, n = tree.tokens.shape
    if target_logits.dim() != 3 or target_logits.shape[:2] != (batch, n):
        raise ValueError(f"target_logits must be float[{batch}, {n}, vocab], got {[*target_logits.shape]}")
    if draft is None:
        return
    vocab = target_logits.shape[2]
    shapes = [[*tensor.shape] for tensor in (draft.probs, draft.row, draft.kind)]
    if draft.probs.dim() != 3 or [shapes[0][0], shapes[0][2]] != [batch, vocab] or shapes[1:] != [[batch, n]] * 2:
        raise ValueError(
            f"draft must have probs float[{batch}, rows, {vocab}], row and kind [{batch}, {n}], got {shapes}"
        )


def _check_values(tree: TokenTree, target_logits: Tensor, sampling: AnySampling, *, is_block: bool) -> None:
    if is_block and not bool((tree.depths == tree.num_nodes[:, None] - 1).any(1).all()):
        raise ValueError("block verification takes trees without branches; use traversal for others")
    is_usable = sampling.has_distribution(target_logits) | tree.is_padding
    if not bool(is_usable.all()):
        nodes = (~is_usable).nonzero().tolist()
        kind = "NaN" if bool(target_logits[tuple(nodes[0])].isnan().any()) else "infinite"
        raise ValueError(f"the target's logits are {kind} at (row, node) {nodes[:4]}")


def _is_known_delta(tree: TokenTree, draft: DraftProbs) -> bool:
    """Return whether every drafted node is DELTA, where that can be read without synchronising."""
    return tree.is_checked and is_known_all((draft.kind == DELTA) | (tree.parents < 0))
