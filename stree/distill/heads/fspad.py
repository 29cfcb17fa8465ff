"""FSPAD (arXiv 2408.15562): the token picks among the features, and a part of the output is aligned with them.

Feature sampling is a gate of the token's embedding on the features in a wider space (see ``FeatureSampling``); nothing
is random.  Partial alignment distillation ties what is fed back, and not what the output head reads, to the target's
features.  Only the abstract could be consulted, so these are choices: sizes and gate; the alignment is a linear
projection of the head's output with the smooth L1 loss of EAGLE, of weight 1 beside the divergence; with EAGLE-3 the
features are the projected hidden states, which get no gradient from the alignment.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from stree.distill.heads.recipe import Recipe
from stree.models.heads.refinements import FeatureSampling

__all__ = ["Fspad"]

WEIGHT = 1.0


class Fspad(Recipe):
    """Adds the smooth L1 distance of the feedback from the target's features."""

    about = "FSPAD: the token picks among the features, and what is fed back is aligned with the target's features."
    refinement = FeatureSampling

    def loss_of_feedback(self, feedback: Tensor, features: Tensor) -> Tensor:
        """Mean smooth L1 distance of float[batch, n, hidden]; see ``Recipe``."""
        return WEIGHT * smooth_l1_loss(feedback, features.detach())
