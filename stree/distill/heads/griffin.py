"""GRIFFIN (arXiv 2502.11018): steps that a draft would not reach do not count, and the token guides the fusion.

A row counts in a step where the true tokens of all steps before it were among the head's own ``TOP_K`` likeliest (3 in
the published training code).  Choices: the loss of the rows that count is the plain divergence; the regression on the
target's features is left out, as from the plain recipe, and so are the two outputs of the published layer, one for
logits and one that is fed back; both kinds of head are trained in one stage.  With EAGLE-3, which does not fuse by a
matrix, the token guides the features themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from stree.distill.heads.recipe import Recipe
from stree.distill.training import LOGITS_AT_ONCE
from stree.models.heads.refinements import TokenGuidedFusion

__all__ = ["Griffin"]

TOP_K = 3


class Griffin(Recipe):
    """Counts the rows whose tokens so far were aligned."""

    about = f"GRIFFIN: a step counts where the tokens before it were among the head's {TOP_K} likeliest."
    refinement = TokenGuidedFusion

    @torch.no_grad()
    def next_counted(self, hidden: Tensor, weight: Tensor, token_ids: Tensor, counted: Tensor | None) -> Tensor:
        """Return the rows that counted and whose next token is among the likeliest; see ``Recipe``."""
        size = max(1, LOGITS_AT_ONCE // len(weight))
        parts = zip(hidden.flatten(0, 1).split(size), token_ids.flatten().split(size), strict=True)
        found = [
            (linear(rows, weight.to(rows.dtype)).topk(min(TOP_K, len(weight)), -1).indices == tokens[:, None]).any(-1)
            for rows, tokens in parts
        ]
        aligned = torch.cat(found).view_as(token_ids)
        return aligned if counted is None else aligned & counted[:, : aligned.shape[1]]
