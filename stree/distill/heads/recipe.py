"""How a causal head is trained: the loss of a step, the rows that count, and what is fed to the next step."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from stree.distill.heads.network import divergence_of_rows
from stree.models.heads.refinements import Refinement

__all__ = ["PLAIN", "Recipe"]


class Recipe:
    """The plain recipe: the divergence of all steps, on the head's own output from the second step on.

    Attributes:
        about: a sentence on the difference from this one, for the card.
        refinement: what the head has beside fusion and layers.
    """

    about: ClassVar[str] = ""
    refinement: ClassVar[type[Refinement]] = Refinement

    def loss_of_rows(self, hidden: Tensor, weight: Tensor, target_logits: Tensor) -> Tensor:
        """Sum a step's loss in nats over rows.

        Args:
            hidden: float[rows, hidden], which the output head reads.
            weight: float[vocab, hidden] of the output head.
            target_logits: [rows, vocab].
        """
        return divergence_of_rows(hidden, weight, target_logits)

    def loss_of_feedback(self, feedback: Tensor, features: Tensor) -> Tensor:
        """Mean loss of float[batch, n, hidden] feedback, which takes the place of features of the target."""
        return feedback.new_zeros(())

    @torch.no_grad()
    def next_counted(self, hidden: Tensor, weight: Tensor, token_ids: Tensor, counted: Tensor | None) -> Tensor | None:
        """Return which rows of the next step count, bool[batch, n]; None for all.

        Args:
            hidden: float[batch, n, hidden], which the output head reads in this step.
            weight: float[vocab, hidden] of the output head.
            token_ids: int64[batch, n], the true tokens that follow, which the next step reads.
            counted: what was returned for this step; None for the first.
        """
        return None


PLAIN = Recipe()
