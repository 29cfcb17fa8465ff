"""Inspection of drafts in a check: what is no tree below the root, or states no distribution of a node, is refused."""

from __future__ import annotations

import torch
from torch import Tensor

from stree.drafters import Draft, DraftRun
from stree.drafters.checked import check_draft
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
        has_nodes: whether anything was drafted.
        has_drawn: whether nodes were drawn.
        is_uneven: whether the distribution of one of them is not uniform.
    """

    def __init__(self, name: str, budget: int, vocab: int) -> None:
        self.name, self.budget, self.vocab, self.tolerance = name, budget, vocab, TOLERANCE
        self.has_nodes = self.has_drawn = self.is_uneven = False

    def __call__(self, run: DraftRun, draft: Draft, roots: Tensor) -> None:
        """Inspect a draft of a run below int64[batch] roots."""
        try:
            check_draft(run, draft, self.vocab, roots, self.budget)
            draft.tree.check()
        except (TypeError, ValueError) as error:
            raise CheckFailed(f"{self.name}: {error}") from None
        is_node = draft.tree.parents >= 0
        self.has_nodes |= bool(is_node.any())
        if draft.probs is not None:
            row, stated = draft.probs.row, draft.probs.probs
            is_drawn = is_node & (draft.probs.kind != DELTA)
            drawn_from = stated.take_along_dim(row.long().clamp(0, stated.shape[1] - 1)[..., None], 1)[is_drawn]
            self.has_drawn |= bool(is_drawn.any())
            self.is_uneven |= bool((drawn_from.amax(-1) - drawn_from.amin(-1) > ROUNDED).any())
            self.tolerance = TOLERANCE if draft.probs.probs.dtype == torch.float64 else ROUNDED
