"""Dynamic Depth Decoding (arXiv 2409.00142): stop where a layer's nodes are together too improbable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stree.checks import check_numbers, integers
from stree.growth.acceptance_model import AcceptanceModel
from stree.growth.eagle2 import Eagle2
from stree.growth.stops import Stop, StoppedGrowth, StoppedModel

__all__ = ["DepthStop"]

DEPTH = 11  # of EAGLE-2's trees in the paper


@dataclass(frozen=True)
class DepthStop(StoppedGrowth, Stop):
    """Stop where the summed value of a layer's nodes is too small (Dynamic Depth Decoding, arXiv 2409.00142).

    The paper adds the rule to EAGLE-2 with up to 11 layers, which ``Eagle2()`` has under this rule, and looks at three
    of them.  It compares the logarithm of the sum of the beam's path probabilities with a threshold; here values come
    from the growth's acceptance model, and nodes that can no longer be proposed count as 0.  Below the default
    threshold the next draft call added an accepted token in at most one step of eight (bundled pair, 34 nodes of
    ``Calibrated`` and EAGLE-2 at temperatures 0 and 0.8, layers 4 to 7, 16 prompts of HumanEval and GSM8K).

    Args:
        base: a growth of layers.
        threshold: least log of the sum of a layer's values.
        layers: depths at which the rule looks, from 1; None for all.

    Raises:
        TypeError: ``base`` is not a growth.
        ValueError: a threshold above 0 or NaN, no depth, or a depth below 1.
    """

    threshold: float = -1.5
    layers: Sequence[int] | None = (5, 7, 9)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.base, Eagle2) and self.base.depth is None:
            object.__setattr__(self, "base", replace(self.base, depth=DEPTH))
        check_numbers(threshold=self.threshold)
        if not self.threshold <= 0:
            raise ValueError(f"threshold must be a log-probability, at most 0, got {self.threshold}")
        if self.layers is not None:
            object.__setattr__(self, "layers", integers("layers", self.layers))
            if not self.layers or min(self.layers) < 1:
                raise ValueError(f"layers must be depths of at least 1, got {list(self.layers)}")

    def acceptance_model(self, batch: int, device: torch.device) -> AcceptanceModel:
        """Return the base's acceptance model with this rule."""
        return StoppedModel(self.base.acceptance_model(batch, device), self)

    def goes_on(self, depth: int, values: Tensor) -> Tensor | None:
        """Compare the sum of a layer's values with the threshold: bool[batch]."""
        if self.layers is not None and depth not in self.layers:
            return None
        # In float64 the sum does not depend on how many zeros are among the values.
        return values.sum(1, dtype=torch.float64) >= math.exp(self.threshold)
