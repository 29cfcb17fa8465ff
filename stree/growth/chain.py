"""Chains: speculative decoding without branches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stree.checks import check_sizes
from stree.growth.acceptance_model import AcceptanceModel
from stree.growth.base import BaseGrowth
from stree.growth.plan import Plan
from stree.growth.static import Static
from stree.growth.stops import Stop, StoppedModel, check_rule

__all__ = ["Chain"]


@dataclass(frozen=True)
class Chain(BaseGrowth):
    """A tree without branches that drafts ``depth`` tokens (speculative decoding, arXiv 2211.17192).

    Args:
        depth: most tokens.
        stop: a rule such as ``Confidence``, which ends the chain, or None.

    Raises:
        TypeError: a depth that is no integer, or a stop that is no rule.
        ValueError: a depth below 1.
    """

    depth: int
    stop: Stop | None = None

    def __post_init__(self) -> None:
        check_sizes(depth=self.depth)
        if self.stop is not None:
            check_rule("stop", self.stop)

    def plan(self, budget: int) -> Plan:
        """Return the plan of the chain."""
        return Static([1] * self.depth).plan(budget)

    def acceptance_model(self, batch: int, device: torch.device) -> AcceptanceModel:
        """Return the draft's own probabilities, with the stop rule if there is one."""
        model = super().acceptance_model(batch, device)
        return model if self.stop is None else StoppedModel(model, self.stop)
