"""`accept`: checks its arguments and runs the verifier that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from stree.checks import check_object, integer
from stree.kernels.checks import checks_values
from stree.kernels.dispatch import is_known_all
from stree.kernels.step.texts import unchecked_maxima
from stree.returned import check_kind, check_returned
from stree.sampling import AnySampling, Random, Sampling
from stree.tree import TokenTree
from stree.verify.longest import longest
from stree.verify.match import match
from stree.verify.rejection import reject
from stree.verify.traversal import traverse
from stree.verify.values import DELTA, Acceptance, DraftProbs
from stree.verify.verifier import Verifier

__all__ = ["LONGEST", "VERIFIERS", "accept", "name_of", "verifier_of"]

LONGEST: Final = "lossy-longest"  # used with the growth ``TargetInit`` only; users cannot choose it


class Match(Verifier):
    """Greedy verification and MATCH."""

    def __call__(
        self, tree: TokenTree, target_logits: Tensor, sampling: AnySampling, rng: Random, draft: DraftProbs | None,
        max_depth: int,
    ) -> Acceptance:  # fmt: skip
        """Follow the target's own tokens, which need no draft distributions."""
        return match(tree, target_logits, sampling, rng, max_depth)


@dataclass(frozen=True)
class ByRatios(Match):
    """A rule that tests sampled nodes by the ratio of target and draft probability; greedy texts follow the argmax.

    Args:
        rule: of target probabilities, and the other arguments of a verifier but for the sampling.
        takes_branches: whether trees may have branches.
    """

    rule: Callable[[TokenTree, Tensor, Random, DraftProbs | None, int], Acceptance]
    takes_branches: bool = True

    def __call__(
        self, tree: TokenTree, target_logits: Tensor, sampling: AnySampling, rng: Random, draft: DraftProbs | None,
        max_depth: int,
    ) -> Acceptance:  # fmt: skip
        """Verify by the rule.

        Raises:
            ValueError: a tree with branches that the rule does not take (looked for on the CPU only).
        """
        if not self.takes_branches and checks_values(target_logits) and _has_branches(tree):
            raise ValueError("block verification takes trees without branches; use traversal for others")
        if sampling.is_greedy:
            return super().__call__(tree, target_logits, sampling, rng, draft, max_depth)
        return self.rule(tree, sampling.probs(target_logits), rng, draft, max_depth)


class Auto(ByRatios):
    """MATCH where every node is known to be DELTA, else a rule for sampled nodes."""

    def __call__(
        self, tree: TokenTree, target_logits: Tensor, sampling: AnySampling, rng: Random, draft: DraftProbs | None,
        max_depth: int,
    ) -> Acceptance:  # fmt: skip
        """Choose the rule by the nodes."""
        is_delta = draft is None or _is_known_delta(tree, draft)
        rule = VERIFIERS["match"] if is_delta else super().__call__
        return rule(tree, target_logits, sampling, rng, draft, max_depth)


# The verifiers by name; one of your own may be entered under another name.
VERIFIERS: dict[str, Verifier] = {
    "auto": Auto(traverse),
    "match": Match(),
    "rejection": ByRatios(reject),
    "traversal": ByRatios(traverse),
    "block": ByRatios(traverse, takes_branches=False),
}


def verifier_of(verifier: str | Verifier | Any) -> Verifier:
    """Return the verifier of a name, or an object that is one.

    Raises:
        ValueError: an unknown name.
        TypeError: no verifier.
    """
    if isinstance(verifier, str):
        if verifier not in VERIFIERS:
            raise ValueError(f"verifier must be one of {', '.join(VERIFIERS)}, got {verifier!r}")
        return VERIFIERS[verifier]
    if isinstance(verifier, type) or not (callable(verifier) and hasattr(verifier, "check")):
        raise TypeError(
            f"verifier must be one of {', '.join(VERIFIERS)} or an object derived from stree.verify.Verifier, "
            f"got {verifier!r:.80}"
        )
    return verifier


def name_of(verifier: str | Verifier) -> str:
    """Return a verifier's name, as statistics report it: that of its class where it is an object."""
    return verifier if isinstance(verifier, str) else type(verifier).__name__


def accept(
    tree: TokenTree,
    target_logits: Tensor,
    sampling: AnySampling,
    rng: Random,
    draft: DraftProbs | None = None,
    verifier: str | Verifier = "auto",
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
            only DELTA nodes; else traversal.  Or a rule of your own, see ``stree.verify.Verifier``.
        max_depth: upper bound of the depths; None reads it from the tree, which synchronises with a device.

    Raises:
        TypeError: an argument of another kind.
        ValueError: shapes disagree, the verifier is unknown, or (checked on the CPU only) logits are NaN, or +inf
            where tokens are sampled, ``draft.row`` is beyond the rows of ``draft.probs`` in a tree whose constructor
            has checked it, or "block" got a tree with branches.
    """
    _check_kinds(tree, target_logits, sampling, rng, draft)
    target_logits = target_logits.detach()
    rule = None if isinstance(verifier, str) and verifier == LONGEST else verifier_of(verifier)
    _check_shapes(tree, target_logits, draft)
    if rule is not None and isinstance(sampling, Sampling):
        rule.check(sampling)
    if checks_values(target_logits):
        _check_values(tree, target_logits, sampling, draft)
    if draft is not None and draft.probs.dtype in (torch.float16, torch.bfloat16):
        draft = replace(draft, probs=draft.probs.float())
    max_depth = integer("max_depth", tree.depths.max() if max_depth is None else max_depth)
    if rule is None:
        return longest(tree, target_logits, sampling, rng, draft, max_depth)
    accepted = rule(tree, target_logits, sampling, rng, draft, max_depth)
    if not isinstance(rule, Match):  # of another author
        _check_accepted(accepted, rule, *target_logits.shape)
    return accepted


def _check_kinds(tree: Any, target_logits: Any, sampling: Any, rng: Any, draft: Any) -> None:
    """Refuse arguments of another kind."""
    if not isinstance(tree, TokenTree):
        raise TypeError(f"tree must be a TokenTree, got {tree!r:.80}")
    if not (isinstance(target_logits, Tensor) and target_logits.is_floating_point()):
        raise TypeError(f"target_logits must be a tensor float[batch, n, vocab], got {target_logits!r:.80}")
    check_object("sampling", sampling, "has_distribution", "stree.Sampling(temperature=0.8)")
    check_object("rng", rng, "choice", "stree.Random(seed, sequences, positions)")
    parts = (draft.probs, draft.row, draft.kind) if isinstance(draft, DraftProbs) else (draft,) * (draft is not None)
    if not all(isinstance(part, Tensor) for part in parts) or (parts and not isinstance(draft, DraftProbs)):
        raise TypeError(f"draft must be a DraftProbs of tensors probs, row and kind, got {draft!r:.80}")


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


def _check_accepted(accepted: Any, rule: Verifier, batch: int, n: int, vocab: int) -> None:
    """Refuse what a rule of another author returned: shapes and dtypes, and values where the host can read them."""
    check_kind(rule, "__call__", accepted, Acceptance, "a stree.Acceptance")
    path, lengths, name = accepted.path, accepted.path_lengths, type(rule).__name__
    most = path.shape[-1] if isinstance(path, Tensor) and path.dim() else 1
    check_returned(rule, "__call__", path, "int32", part="path ", batch=batch, m=most)
    check_returned(rule, "__call__", lengths, "int32", part="path_lengths ", batch=batch)
    check_returned(rule, "__call__", accepted.next_token, "int64", part="next_token ", batch=batch)
    if accepted.ratios is not None:
        check_returned(rule, "__call__", accepted.ratios, "float", part="ratios ", batch=batch, n=n)
    if checks_values(path):
        if bool(((lengths < 1) | (lengths > path.shape[1])).any()):
            raise ValueError(f"{name} must return path_lengths in [1, {path.shape[1]}], got {lengths.tolist()}")
        is_missing = (path < 0) & (torch.arange(path.shape[1], device=path.device) < lengths[:, None])
        if bool(((path >= n) | is_missing).any()):
            raise ValueError(f"{name}: path must lead from the root down, got {path.tolist()!s:.80} of {n} nodes")
        if bool(((accepted.next_token < 0) | (accepted.next_token >= vocab)).any()):
            found = accepted.next_token.tolist()
            raise ValueError(f"{name} must return next_token in [0, {vocab}), got {found!s:.80}")


def _has_branches(tree: TokenTree) -> bool:
    return not bool((tree.depths == tree.num_nodes[:, None] - 1).any(1).all())


def _check_values(tree: TokenTree, target_logits: Tensor, sampling: AnySampling, draft: DraftProbs | None) -> None:
    is_usable = sampling.has_distribution(target_logits)
    if not is_usable.all() and not (is_usable := is_usable | tree.is_padding).all():
        nodes = (~is_usable).nonzero().tolist()
        kind = "NaN" if bool(target_logits[tuple(nodes[0])].isnan().any()) else "infinite"
        raise ValueError(f"the target's logits are {kind} at (row, node) {nodes[:4]}")
    if draft is not None and tree.is_checked:  # of another author: trees of this package are made unchecked
        rows, is_drawn = draft.probs.shape[1], (tree.parents >= 0) & (draft.kind != DELTA)
        is_wrong = ((draft.row < 0) | (draft.row >= rows)) & is_drawn
        if bool(is_wrong.any()):
            nodes, found = is_wrong.nonzero().tolist()[:4], draft.row[is_wrong].tolist()[:4]
            raise ValueError(
                f"draft.row must be in [0, {rows}) for {rows} rows of probs, got {found} at (row, node) {nodes}"
            )


def mask_invalid_logits(
    tree: TokenTree, target_logits: Tensor, sampling: AnySampling, *, masks: bool
) -> tuple[Tensor, Tensor | None]:
    """Let ``accept`` run on logits of which some are NaN, or +inf where tokens are sampled; say which they are.

    Args:
        tree: n nodes.
        target_logits: float[batch, n, vocab].
        sampling: of the target.
        masks: whether invalid logits are replaced where the host reads them; if not, ``accept`` refuses them there.

    Returns:
        logits: float[batch, n, vocab], 0 at invalid nodes if they were replaced.
        highest: float[batch, n], as ``emit`` takes it: the greatest logit of each node; where logits were replaced, NaN
            at those nodes and all below them, else 0.  None where all are valid, or ``accept`` checks them.
    """
    highest = unchecked_maxima(target_logits)
    if highest is not None or not masks:
        return target_logits, highest
    is_invalid = ~(sampling.has_distribution(target_logits) | tree.is_padding)
    if not bool(is_invalid.any()):
        return target_logits, None
    logits, parents = target_logits.masked_fill(is_invalid[..., None], 0), tree.parents.clamp(min=0).long()
    for _ in range(int(tree.depths.max())):
        is_invalid |= is_invalid.gather(1, parents)
    return logits, torch.zeros(is_invalid.shape).masked_fill_(is_invalid, torch.nan)


def _is_known_delta(tree: TokenTree, draft: DraftProbs) -> bool:
    """Return whether every drafted node is DELTA, where that can be read without synchronising."""
    return tree.is_checked and is_known_all((draft.kind == DELTA) | (tree.parents < 0))
