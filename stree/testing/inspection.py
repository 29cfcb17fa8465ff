"""Inspection of drafts in a check: what is no tree below the root, or states no distribution of a node, is refused."""

from __future__ import annotations

import torch
from torch import Tensor

from stree.drafters import Draft
from stree.testing.report import CheckFailed
from stree.verify import DELTA

__all__ = ["Inspection"]

TOLERANCE, ROUNDED = 1e-9, 1e-5  # total variation: of float64 distributions, and of others


class Inspection:
    """Looks at every draft of a check, and refuses what is no tree below the root.

    Args:
        name: of what is checked.
        budget: most nodes.
        vocab: size of the vocabulary.

    Attributes:
        tolerance: rounding of the distributions.
        has_drawn: whether nodes were drawn.
        is_uneven: whether the distribution of one of them is not uniform.
    """

    def __init__(self, name: str, budget: int, vocab: int) -> None:
        self.name, self.budget, self.vocab, self.tolerance = name, budget, vocab, TOLERANCE
        self.has_drawn = self.is_uneven = False

    def __call__(self, draft: Draft, roots: Tensor) -> None:
        """Inspect a draft below int64[batch] roots."""
        tree = draft.tree
        try:
            tree.check()
        except ValueError as error:
            raise CheckFailed(f"{self.name} drafts no tree: {error}") from None
        batch, n = tree.tokens.shape
        wrong = [
            (batch != len(roots), f"a tree for each of {len(roots)} sequences, got {batch}"),
            (n > self.budget, f"at most {self.budget} nodes, got {n}"),
            (batch == len(roots) and bool((tree.tokens[:, 0] != roots).any()), "the pending token as root"),
            (bool((tree.tokens >= self.vocab).any()), f"tokens below {self.vocab}, got {int(tree.tokens.max())}"),
            (int(tree.depths.max()) > draft.max_depth, f"no node deeper than max_depth, {draft.max_depth}"),
        ]
        for is_wrong, expected in wrong:
            if is_wrong:
                raise CheckFailed(f"{self.name} must draft {expected}")
        if draft.probs is not None:
            shapes = [[*part.shape] for part in (draft.probs.row, draft.probs.kind)]
            if [*draft.probs.probs.shape[::2]] != [batch, self.vocab] or shapes != [[batch, n]] * 2:
                raise CheckFailed(
                    f"{self.name} must state probs [{batch}, rows, {self.vocab}], row and kind [{batch}, {n}], "
                    f"got {[*draft.probs.probs.shape]} and {shapes}"
                )
            row, stated = draft.probs.row, draft.probs.probs
            is_drawn = (tree.parents >= 0) & (draft.probs.kind != DELTA)
            if bool((is_drawn & ((row < 0) | (row >= stated.shape[1]))).any()):
                most = f"in [0, {stated.shape[1]}) for {stated.shape[1]} stored distributions"
                raise CheckFailed(f"{self.name} must state probs.row {most}, got {row[is_drawn].unique().tolist()}")
            drawn_from = stated.take_along_dim(row.long().clamp(0, stated.shape[1] - 1)[..., None], 1)[is_drawn]
            self.has_drawn |= bool(is_drawn.any())
            self.is_uneven |= bool((drawn_from.amax(-1) - drawn_from.amin(-1) > ROUNDED).any())
            self.tolerance = TOLERANCE if draft.probs.probs.dtype == torch.float64 else ROUNDED
