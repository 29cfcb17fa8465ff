"""Calls of drafters, and comparison of what those of other authors return with their documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Integral

from torch import Tensor

from stree.drafters.base import Draft, Drafter, DraftRun
from stree.growth import Growth
from stree.kernels.checks import checks_everywhere, checks_values
from stree.returned import check_kind, check_returned, is_ours
from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify import DELTA, INDEPENDENT, SAMPLED, DraftProbs

__all__ = ["check_draft", "proposed", "selected", "started"]


def started(drafter: Drafter, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> DraftRun:
    """Call ``start``.

    Raises:
        TypeError: it returns no run, or one whose flags name methods that it does not have.
    """
    run = drafter.start(vocab_size, prompts, rng)
    check_kind(drafter, "start", run, DraftRun, "a stree.drafters.DraftRun")
    for flag, method in (("can_begin", "begin"), ("can_select", "select")):
        if getattr(run, flag) and getattr(getattr(run, method), "__func__", None) is getattr(DraftRun, method):
            raise TypeError(f"{type(run).__name__} must implement {method}, as its {flag} is True")
    return run


def selected(run: DraftRun, rows: Tensor, rng: Random) -> DraftRun:
    """Call ``select``.

    Raises:
        TypeError: it returns no run.
    """
    other = run.select(rows, rng)
    check_kind(run, "select", other, DraftRun, "a stree.drafters.DraftRun")
    return other


def proposed(
    run: DraftRun, vocab_size: int, pending: Tensor, growth: Growth | None, budget: int, *, has_root: bool = True
) -> Draft:
    """Call ``propose``; compare what a run of another author returns: see ``check_draft``."""
    draft = run.propose(pending, growth, budget)
    if not is_ours(run):
        check_draft(run, draft, vocab_size, pending, budget, has_root=has_root)
    return draft


def check_draft(
    run: DraftRun, draft: Draft, vocab_size: int, pending: Tensor, budget: int, *, has_root: bool = True
) -> None:
    """Compare what ``propose`` has returned with the documentation of ``Draft``.

    Values of the tree are compared where the host can read them, those of the distributions under STREE_DEBUG=1.

    Args:
        run: which proposed it.
        draft: what it returned.
        vocab_size: of the target.
        pending: int64[batch].
        budget: most nodes.
        has_root: whether the roots are read; a tree of which they are not is cut to the budget afterwards.

    Raises:
        TypeError: a part of another kind or dtype.
        ValueError: another shape, or values that no draft may have.
    """
    check_kind(run, "propose", draft, Draft, "a stree.drafters.Draft")
    tree, probs, batch = draft.tree, draft.probs, len(pending)
    check_kind(run, "propose", tree, TokenTree, "a Draft whose tree is a stree.TokenTree")
    check_kind(run, "propose", probs, (DraftProbs, type(None)), "a Draft whose probs are a stree.DraftProbs or None")
    check_kind(run, "propose", draft.max_depth, Integral, "a Draft whose max_depth is an integer")
    n = tree.tokens.shape[-1]
    parts = [("tree.tokens ", tree.tokens, "int64"), ("tree.parents ", tree.parents, "int32")]
    if probs is not None:
        rows = probs.probs.shape[1] if probs.probs.dim() == 3 else 1
        check_returned(
            run, "propose", probs.probs, "float", part="probs.probs ", batch=batch, rows=rows, vocab=vocab_size
        )
        parts += [("probs.row ", probs.row, "integers"), ("probs.kind ", probs.kind, "integers")]
    parts += [("values ", draft.values, "float")] if draft.values is not None else []
    parts += [("column ", draft.column, "int64")] if draft.column is not None else []
    for part, tensor, kind in parts:
        check_returned(run, "propose", tensor, kind, part=part, batch=batch, n=n)
    if checks_values(tree.tokens):
        wanted = next(_differences(draft, vocab_size, pending if has_root else None, budget), None)
        if wanted is not None:
            raise ValueError(f"{type(run).__name__}.propose must return {wanted}")


def _differences(draft: Draft, vocab_size: int, pending: Tensor | None, budget: int) -> Iterator[str]:
    """Yield what values of a draft should be, where they are not."""
    tree, probs, n = draft.tree, draft.probs, draft.tree.tokens.shape[1]
    tokens = tree.tokens[tree.parents >= 0]
    if n > budget and pending is not None:
        yield f"trees of at most {budget} nodes, got {n}"
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        yield f"tokens in [0, {vocab_size}), got {int(tokens.min())} to {int(tokens.max())}"
    if pending is not None and (roots := tree.tokens[:, 0].tolist()) != (wanted := pending.tolist()):
        yield f"trees whose roots are the pending tokens {wanted}, got {roots}"
    if (deepest := int(tree.depths.max())) > draft.max_depth:
        yield f"trees no deeper than max_depth, {draft.max_depth}, got a node at depth {deepest}"
    if probs is not None:
        is_drawn, rows = (tree.parents >= 0) & (probs.kind != DELTA), probs.probs.shape[1]
        if bool((is_drawn & (probs.kind != SAMPLED) & (probs.kind != INDEPENDENT)).any()):
            yield f"probs.kind SAMPLED, DELTA or INDEPENDENT, got {probs.kind.unique().tolist()}"
        if bool((is_drawn & ((probs.row < 0) | (probs.row >= rows))).any()):
            yield f"probs.row in [0, {rows}) for {rows} distributions, got {probs.row.unique().tolist()}"
        elif checks_everywhere():  # rows of no node may hold anything
            used = probs.probs.take_along_dim(probs.row.long().clamp(0, rows - 1)[..., None], 1)[is_drawn]
            if not bool(((used >= 0) & used.isfinite()).all()):
                yield f"probs.probs of at least 0, got {float(used.min()):.3g}"
