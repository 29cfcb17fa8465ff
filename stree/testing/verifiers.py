"""`check_verifier`: a rule emits the target's distribution, by enumeration of every tree and of all that it draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stree.sampling import Random, Sampling
from stree.testing.enumeration import (
    EXACT,
    PLAIN,
    DraftedTrees,
    check_enumeration,
    drafted_trees,
    emitted_and_right,
    total_variation,
)
from stree.testing.report import CheckFailed, Report, compared
from stree.testing.tables import PAIRS, Pair
from stree.tree import TokenTree
from stree.verify import INDEPENDENT, Acceptance, DraftProbs, Verifier, accept, name_of, verifier_of

__all__ = ["check_verifier"]

SHAPES = {"chain": [-1, 0, 1], "siblings": [-1, 0, 0, 0], "binary": [-1, 0, 0, 1, 1], "uneven": [-1, 0, 0, 1, 3]}
SAMPLINGS = (Sampling(0.7), Sampling(1.3, top_k=2), Sampling(1.0, top_p=0.7), Sampling())
# Tokens of nodes that are DELTA, by kind of tree.
DRAWN: dict[str, dict[int, int]] = {"sampled": {}, "first child DELTA": {1: 2}}
ALL_DELTA = {1: 2, 2: 0, 3: 1, 4: 2}


@dataclass(frozen=True, slots=True)
class Case:
    """Trees that a rule verifies.

    Attributes:
        shape: their name in ``SHAPES``.
        kind: how their nodes were drawn.
        models: which models, in words.
        pair: target and draft model.
        sampling: of the target.
    """

    shape: str
    kind: str
    models: str
    pair: Pair
    sampling: Sampling = PLAIN

    def trees(self) -> DraftedTrees:
        """All trees, with their probabilities."""
        parents, draft = SHAPES[self.shape], self.pair[1]
        if self.kind == "drawn with replacement":
            return drafted_trees(draft, parents, PLAIN, kind=INDEPENDENT)
        delta = ALL_DELTA if self.kind == "all DELTA" else DRAWN[self.kind]
        present = {node: token for node, token in delta.items() if node < len(parents)}
        return drafted_trees(draft, parents, PLAIN, present)

    def __str__(self) -> str:
        return f"{self.shape} {SHAPES[self.shape]}, {self.kind}, {self.models}, {self.sampling}"


def check_verifier(verifier: str | Verifier, *, seeds: Sequence[int] = (0, 1), vocab_size: int = 3) -> Report:
    """Check that a verifier is lossless, by enumeration of every tree and of every outcome of what the rule draws.

    Chains and trees of sampled, DELTA and independent nodes are drawn by random and adversarial draft models in
    float64; padding is among them.  What the rule emits, continued by the target, must have the target's distribution.
    Sampling that the rule refuses (``Verifier.check``), and trees with branches for which it raises ValueError, are
    left out.

    Args:
        verifier: a rule, or its name.
        seeds: of the models.
        vocab_size: tokens.

    Raises:
        CheckFailed: the rule is not lossless, or returns no path of the tree; the message says where.
    """
    seeds = check_enumeration(vocab_size, seeds, least=3)
    rule, name = verifier_of(verifier), f"verifier {name_of(verifier)}"
    worst, cases, notes = 0.0, 0, list[str]()
    for case in _cases(seeds, vocab_size):
        try:
            rule.check(case.sampling)
        except ValueError as error:
            notes.append(f"left out, refused: {case.sampling}, {error}")
            continue
        try:
            worst = max(worst, _bias(case, verifier, name))
        except ValueError as error:
            if case.shape == "chain":
                raise CheckFailed(f"{name} fails on a chain ({case}): {error}") from error
            notes.append(f"left out, refused: {case.shape}, {error}")
            continue
        cases += 1
    if not cases:
        raise CheckFailed(f"{name} refuses every sampling: {notes[0]}")
    return Report(name, cases, worst, tuple(dict.fromkeys(notes)))


def _cases(seeds: Sequence[int], vocab: int) -> Iterator[Case]:
    """List the cases: all shapes of sampled trees with all models, and each other kind and sampling with one."""
    models = [(f"{kind} models of seed {seed}", make(vocab, seed)) for kind, make in PAIRS.items() for seed in seeds]
    for number, shape in enumerate(SHAPES):
        for words, pair in models:
            yield Case(shape, "sampled", words, pair)
        for kind in ("first child DELTA", "all DELTA", "drawn with replacement"):
            yield Case(shape, kind, *models[number % len(models)])
    for sampling in SAMPLINGS:
        for shape in ("chain", "uneven"):
            yield Case(shape, "sampled", *models[0], sampling)


def _bias(case: Case, verifier: str | Verifier, name: str) -> float:
    """Return the total variation between what a rule emits and the target's distribution."""
    target, trees = case.pair[0], case.trees()

    def verify(tree: TokenTree, logits: Tensor, rng: Random, draft: DraftProbs | None) -> Acceptance:
        given = None if case.kind == "all DELTA" else draft
        accepted = accept(tree, logits, case.sampling, rng, given, verifier)
        _check_path(tree, accepted, target.vocab, f"{name} ({case})")
        return accepted

    joint, right = emitted_and_right(target, trees, verifier, case.sampling, verify)
    apart = total_variation(joint, right)
    if apart > EXACT:
        description = compared(joint, right, target.vocab, ("emitted", "target"))
        raise CheckFailed(f"{name} is not lossless ({case}): total variation {apart:.2g}\n{description}")
    return apart


def _check_path(tree: TokenTree, accepted: Acceptance, vocab: int, name: str) -> None:
    """Refuse a path that is none of its tree, or no token."""
    path, lengths = accepted.path.long(), accepted.path_lengths.long()
    batch, width = path.shape
    if bool(((lengths < 1) | (lengths > width)).any()):
        raise CheckFailed(f"{name}: path_lengths must be in [1, {width}], got {lengths.tolist()[:8]}")
    if bool(((accepted.next_token < 0) | (accepted.next_token >= vocab)).any()):
        raise CheckFailed(f"{name}: next_token must be in [0, {vocab - 1}], got {accepted.next_token.tolist()[:8]}")
    place = torch.arange(width)
    nodes, above = path.clamp(0, tree.tokens.shape[1] - 1), torch.cat([torch.full((batch, 1), -1), path[:, :-1]], 1)
    is_right = (path == nodes) & (tree.parents.gather(1, nodes) == above)
    is_right[:, 0] = path[:, 0] == 0
    is_right |= place >= lengths[:, None]
    if not bool(is_right.all()):
        row = int((~is_right).any(1).nonzero()[0])
        raise CheckFailed(
            f"{name}: path must lead from the root down, got {path[row, : lengths[row]].tolist()} in a tree of parents "
            f"{tree.parents[row].tolist()} (-1 behind the root is padding)"
        )
