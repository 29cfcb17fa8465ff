"""The front door of acceptance: looks at what comes and picks the rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from stree.kernels.dispatch import host_can_read
from stree.sampling import Random, Sampling
from stree.tree import TokenTree, checks_everywhere
from stree.verify.longest import longest
from stree.verify.match import match
from stree.verify.rejection import reject
from stree.verify.traversal import traverse
from stree.verify.values import DELTA, Acceptance, DraftProbs

__all__ = ["LONGEST", "VERIFIERS", "accept"]

VERIFIERS: Final = ("auto", "match", "rejection", "traversal", "block")
LONGEST: Final = "lossy-longest"  # no verifier to choose: what ``TargetInit`` runs with


def accept(
    tree: TokenTree,
    target_logits: Tensor,
    sampling: Sampling,
    rng: Random,
    draft: DraftProbs | None = None,
    verifier: str = "auto",
    max_depth: int | None = None,
) -> Acceptance:
    """Choose the accepted path of each tree so that the emitted text follows the target's distribution exactly.

    "match" is lossless for every tree, and the best there is for DELTA nodes.  "rejection" and "traversal" need the
    distribution that each child was really drawn from after its elder siblings; a DELTA child's is one-hot.
    Traversal accepts at least as much as rejection; without branches it is known as block verification, and "block"
    insists on that. LONGEST, improved MCSD's rule for ``TargetInit``, is not lossless.

    Args:
        tree: n nodes.
        target_logits: float[batch, n, vocab].
        sampling: temperature, top-k, top-p of the target.
        rng: numbers of this step, positioned at the roots.
        draft: distributions of the children; None means that all are DELTA.
        verifier: "match", "rejection", "traversal", "block", or "auto": traversal where distributions are given, else
            match, which is taken too where a checked tree on the CPU has no node but DELTA ones; LONGEST is for
            ``TargetInit`` alone.
        max_depth: bound of the depths known to the host; None reads it, which waits for a device.

    Raises:
        ValueError: shapes disagree, an unknown verifier, or (looked for on the CPU) logits that are NaN, or +inf where
            tokens are drawn, or branches for "block".
    """
    batch, n = tree.tokens.shape
    target_logits = target_logits.detach()
    if target_logits.dim() != 3 or target_logits.shape[:2] != (batch, n):
        raise ValueError(f"target_logits must be float[{batch}, {n}, vocab], got {[*target_logits.shape]}")
    if draft is not None:
        vocab = target_logits.shape[2]
        shapes = [[*tensor.shape] for tensor in (draft.probs, draft.row, draft.kind)]
        if draft.probs.dim() != 3 or [shapes[0][0], shapes[0][2]] != [batch, vocab] or shapes[1:] != [[batch, n]] * 2:
            raise ValueError(
                f"draft must have probs float[{batch}, rows, {vocab}], row and kind [{batch}, {n}], got {shapes}"
            )
        if draft.probs.dtype in (torch.float16, torch.bfloat16):
            draft = replace(draft, probs=draft.probs.float())
    if verifier not in (*VERIFIERS, LONGEST):
        raise ValueError(f"verifier must be one of {', '.join(VERIFIERS)}, got {verifier!r}")
    is_looked_at = host_can_read(target_logits) or checks_everywhere()
    if verifier == "block" and is_looked_at and not bool((tree.depths == tree.num_nodes[:, None] - 1).any(1).all()):
        raise ValueError("block verification takes trees without branches; use traversal for others")
    if is_looked_at and not bool((has_distribution := sampling.has_distribution(target_logits)).all()):
        nodes = (~has_distribution & ~tree.is_padding).nonzero().tolist()
        if nodes:
            kind = "NaN" if bool(target_logits[tuple(nodes[0])].isnan().any()) else "infinite"
            raise ValueError(f"the target's logits are {kind} at (row, node) {nodes[:4]}")
    if verifier == "auto" and draft is not None and tree.is_checked and host_can_read(draft.kind):
        draft = None if bool(((draft.kind == DELTA) | (tree.parents < 0)).all()) else draft
    if max_depth is None:
        max_depth = int(tree.depths.max())
    if verifier == LONGEST:
        return longest(tree, target_logits, sampling, rng, draft, max_depth)
    if sampling.is_greedy or verifier == "match" or (verifier == "auto" and draft is None):
        return match(tree, target_logits, sampling, rng, max_depth)
    rule = reject if verifier == "rejection" else traverse
    return rule(tree, sampling.probs(target_logits), rng, draft, max_depth)
