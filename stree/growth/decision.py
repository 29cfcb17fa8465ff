"""A small model that decides, level by level, whether to draft deeper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stree.growth.acceptance_model import Estimate
from stree.growth.stops import Stopped, StoppedGrowth

__all__ = ["DecisionStop", "features"]

NUM_PROBS = 10
# Logistic regression on the bundled pair, 20 prompts of HumanEval, temperatures 0 and 0.8: 12,096 nodes;
# held-out log-loss 0.217, of the share of accepted nodes alone 0.315.
WEIGHTS = (((1.38, 0.92, -0.03, -0.03, 0.09, 0.11, 0.05, 0.0, 0.01, -0.01, 4.87, -4.0),),)

Weights = Sequence[Sequence[Sequence[float]]]


@dataclass(frozen=True)
class DecisionStop(StoppedGrowth):
    """Draw a level only where a small model expects an accepted child (improved MCSD, arXiv 2409.10644).

    The model sees of every live node its ten greatest draft probabilities and its own value; a sequence's tree grows on
    while it scores one of them above the threshold.  The paper trains a network for a pair, 11 -> 44 -> 1;
    the default here is a logistic regression fitted to the bundled pair.

    Args:
        base: a growth of layers.
        threshold: least score; the paper takes 0.4 to 0.5.
        weights: a layer after the other, each with a row an output, each of which holds the weight of every input and
            then the bias; between layers negative numbers become 0, and the last one's single output is log-odds.

    Raises:
        TypeError: a base that is no growth.
        ValueError: a threshold outside [0, 1], or weights whose sizes do not fit.
    """

    threshold: float = 0.4
    weights: Weights = WEIGHTS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be in [0, 1], got {self.threshold}")
        weights = tuple(tuple(tuple(row) for row in layer) for layer in self.weights)
        object.__setattr__(self, "weights", weights)
        inputs = NUM_PROBS + 1
        for layer in weights:
            sizes = sorted({len(row) for row in layer})
            if sizes != [inputs + 1]:
                raise ValueError(f"weights must have rows of {inputs} inputs and a bias here, got rows of {sizes}")
            inputs = len(layer)
        if not weights or inputs != 1:
            raise ValueError(f"weights must end in one output, got {inputs if weights else 'no layer'}")

    def estimate(self, batch: int, device: torch.device) -> Estimate:
        """Begin the other's estimate under this rule."""
        layers = [torch.tensor(layer, dtype=torch.float32, device=device) for layer in self.weights]
        return Stopped(self.base.estimate(batch, device), _Decision(layers, self.threshold))


class _Decision:
    """The model on a device."""

    def __init__(self, layers: list[Tensor], threshold: float) -> None:
        self._layers, self._threshold = layers, threshold

    def goes_on(self, depth: int, values: Tensor) -> None:
        """Say nothing: the next distributions are not known."""

    def draws(self, reach: Tensor, dist: Tensor) -> Tensor:
        """Look for a live node of enough score."""
        x = features(reach, dist)
        for number, layer in enumerate(self._layers):
            x = torch.nn.functional.linear(x.relu() if number else x, layer[:, :-1], layer[:, -1])
        return ((x.squeeze(-1).sigmoid() > self._threshold) & (reach > 0)).any(1)


def features(reach: Tensor, dist: Tensor) -> Tensor:
    """List what the model sees: float32[batch, above, 11] of float[batch, above] values and their distributions."""
    probs = dist.topk(min(NUM_PROBS, dist.shape[-1]), -1).values
    probs = torch.nn.functional.pad(probs, (0, NUM_PROBS - probs.shape[-1]))
    return torch.cat([probs, reach[..., None].to(probs.dtype)], -1).float()
