"""SpecInfer's expansion trees (arXiv 2305.09781): children drawn with replacement."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stree.growth.acceptance_model import AcceptanceModel, DraftProbability, PathProbability, Slots
from stree.growth.plan import Plan
from stree.growth.rsd import RSDC

__all__ = ["SpecInfer"]


@dataclass(frozen=True)
class SpecInfer(RSDC):
    """The same number of children for every node of a depth, drawn with replacement (SpecInfer, arXiv 2305.09781).

    Siblings may carry the same token; each is a node and has its own test, as multi-step speculative sampling requires.
    A baseline: drawn without replacement (``RSDC``), as many nodes accept more.

    Args:
        widths: children of a node, by depth (the paper's expansion configuration).

    Raises:
        TypeError: a width that is no integer.
        ValueError: no width, or one below 1.
    """

    def plan(self, budget: int) -> Plan:
        """Return the plan of the tree, whose nodes are ordered by depth."""
        return replace(super().plan(budget), drawing="independent")

    def acceptance_model(self, batch: int, device: torch.device) -> AcceptanceModel:
        """Return the draft's own probabilities."""
        return PathProbability() if self.sampling.is_greedy else _IndependentDraws()


class _IndependentDraws(DraftProbability):
    """Children drawn with replacement: earlier siblings leave the distribution as it was."""

    def rate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Return the parent's value as the priority of every slot, and path probabilities as values."""
        values, probs = slots.values[..., None], slots.probs
        return values * (probs > 0), values * probs
