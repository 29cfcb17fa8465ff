"""EAGLE-2 (arXiv 2406.16858): beams of the most probable paths, the best of all candidates kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stree.checks import check_sizes
from stree.growth.acceptance_model import AcceptanceModel, PathProbability
from stree.growth.base import BaseGrowth
from stree.growth.plan import Layer, Plan

__all__ = ["Eagle2"]

DEPTH = 6  # where none is given


@dataclass(frozen=True)
class Eagle2(BaseGrowth):
    """Beams of the most probable paths, then the best of all candidates (EAGLE-2, arXiv 2406.16858).

    Every draft call runs a beam.  Each of its nodes has as many candidate children as the beam is wide, the best of
    which are the next beam; the best nodes of all layers become the tree.  A parent never has a smaller value than its
    child and comes before it, so ties keep no child without its parent.  Children are the most probable tokens at every
    temperature, so MATCH verifies them.

    Args:
        depth: most draft calls; None for 6, and for the 11 of Dynamic Depth Decoding under its rule, ``DepthStop``.
        beam: most nodes of a draft call, and most children of a node.

    Raises:
        TypeError: a size that is no integer.
        ValueError: a size below 1.
    """

    depth: int | None = None
    beam: int = 10

    def __post_init__(self) -> None:
        check_sizes(depth=self.depth, beam=self.beam)

    def plan(self, budget: int) -> Plan:
        """Return the plan of the beams; candidates outside the next beam are leaves."""
        nodes = budget - 1
        layers: list[Layer] = []
        above = 1
        for _ in range((self.depth or DEPTH) if nodes else 0):
            candidates = min(nodes, above * self.beam)  # more are never among the best
            above = min(self.beam, candidates)
            layers.append(Layer(above, self.beam, leaves=candidates - above))
        if layers:  # nothing is run below the last layer
            layers[-1] = Layer(layers[-1].width + layers[-1].leaves, self.beam)
        return Plan(tuple(layers), nodes, is_pruned=True, drawing="top")

    def acceptance_model(self, batch: int, device: torch.device) -> AcceptanceModel:
        """Return the path probabilities."""
        return PathProbability()
