"""HASS (arXiv 2408.15766): the loss dwells on the tokens that the target is likely to emit.

Its harmonised context, a head that reads its own output with the keys of a draft, is part of the plain recipe here, as
are its 3 steps.  The top-k loss has the size and weight of the public training code.  Choices: it is added to the
divergence, gradients flow through the fed-back output, and later steps count less, as in the plain recipe.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from stree.distill.heads.recipe import Recipe

__all__ = ["Hass"]

TOP_K = 10
WEIGHT = 1.0


class Hass(Recipe):
    """Adds ``-sum(p(x) log q(x))`` over the target's ``TOP_K`` likeliest tokens x, not renormalised."""

    about = f"HASS: the cross entropy over the target's {TOP_K} likeliest tokens is added."

    def loss_of_rows(self, hidden: Tensor, weight: Tensor, target_logits: Tensor) -> Tensor:
        """Sum the divergence and the top-k loss over rows; see ``Recipe``."""
        wanted = target_logits.float().log_softmax(-1)
        found = linear(hidden, weight.to(hidden.dtype)).float().log_softmax(-1)
        top, places = wanted.topk(min(TOP_K, wanted.shape[-1]), -1)
        cross_entropy = -(top.exp() * found.gather(-1, places)).sum()
        return torch.sum(wanted.exp() * (wanted - found)) + WEIGHT * cross_entropy
