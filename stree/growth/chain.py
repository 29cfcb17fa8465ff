"""Chains: speculative decoding without branches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stree.checks import check_sizes
from stree.growth.acceptance_model import AcceptanceModel
from stree.growth.base import BaseGrowth
from stree.growth.plan import Plan
from stree.growth.static import Static
from stree.growth.stops import Confidence, StoppedModel

__all__ = ["Chain"]


@dataclass(frozen=True)
class Chain(BaseGrowth):
    """A tree without branches that drafts ``depth`` tokens (speculative decoding, arXiv 2211.17192).

    Args:
        depth: most tokens.
        stop: looks before each draw whether the draft is confident enough, or None.

    Raises:
        TypeError: a depth that is no integer, or a stop that is no rule.
        ValueError: a depth below 1.
    """

    depth: int
    stop: Confidence | None = None

    def __post_init__(self) -> None:
        check_sizes(depth=self.depth)
        if self.stop is not None and (isinstance(self.stop, type) or not hasattr(self.stop, "draws")):
            raise TypeError(f"stop must be a rule such as Confidence(0.4), got {self.stop!r:.80}")

    def plan(self, budget: int) -> Plan:
        """Return the plan of the chain."""
        return Static([1] * self.depth).plan(budget)

    def acceptance_model(self, batch: int, device: torch.device) -> AcceptanceModel:
        """Return the draft's own probabilities, with the stop rule if there is one."""
        model = super().acceptance_model(batch, device)
        return model if self.stop is None else StoppedModel(model, self.stop)
