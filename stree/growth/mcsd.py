"""Improved multi-candidate speculative decoding (arXiv 2409.10644): its decision model and its target initialisation.

Its third part, the sliced topology-aware mask, is how ``stree.drafters.tree_builder`` keeps every growing tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stree.checks import check_shares, check_sizes
from stree.growth.acceptance_model import AcceptanceModel
from stree.growth.base import BaseGrowth
from stree.growth.plan import Plan
from stree.growth.static import Static
from stree.growth.stops import Stop, StoppedGrowth, StoppedModel

__all__ = ["DecisionStop", "TargetInit", "features"]

NUM_PROBS = 10
# Fitted to the bundled pair on 20 prompts of HumanEval, temperatures 0 and 0.8: 12,096 nodes;
# held-out log-loss 0.217; of the share of accepted nodes alone it is 0.315.
WEIGHTS = (((1.38, 0.92, -0.03, -0.03, 0.09, 0.11, 0.05, 0.0, 0.01, -0.01, 4.87, -4.0),),)

Weights = Sequence[Sequence[Sequence[float]]]


@dataclass(frozen=True)
class DecisionStop(StoppedGrowth):
    """Draw a layer only where a small model expects an accepted child (improved MCSD, arXiv 2409.10644).

    For every live node the model reads its ten greatest draft probabilities and its value; a sequence's tree grows
    while the score of one node is above the threshold.  The paper trains a network, 11 -> 44 -> 1, for each pair of
    models.  The default weights are a logistic regression fitted to the bundled pair, for which the network was no
    better; ``benchmarks.studies.decision`` trains both.

    Args:
        base: a growth of layers.
        threshold: least score; the paper takes 0.4 to 0.5.
        weights: linear layers with ReLU between them; each is a list of output rows, and a row holds the weight of
            every input and then the bias.  The last layer has one output, the log-odds.

    Raises:
        TypeError: ``base`` is not a growth.
        ValueError: a threshold outside [0, 1], or weights whose sizes do not fit.
    """

    threshold: float = 0.4
    weights: Weights = WEIGHTS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shares(threshold=self.threshold)
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

    def acceptance_model(self, batch: int, device: torch.device) -> AcceptanceModel:
        """Return the base's acceptance model with this rule."""
        layers = [torch.tensor(layer, dtype=torch.float32, device=device) for layer in self.weights]
        return StoppedModel(self.base.acceptance_model(batch, device), _DecisionModel(layers, self.threshold))


class _DecisionModel(Stop):
    """The decision model on a device."""

    def __init__(self, layers: list[Tensor], threshold: float) -> None:
        self._layers, self._threshold = layers, threshold

    def draws(self, values: Tensor, dist: Tensor) -> Tensor:
        """Return where the score of some live node is above the threshold: bool[batch]."""
        x = features(values, dist)
        for number, layer in enumerate(self._layers):
            x = torch.nn.functional.linear(x.relu() if number else x, layer[:, :-1], layer[:, -1])
        return ((x.squeeze(-1).sigmoid() > self._threshold) & (values > 0)).any(1)


def features(values: Tensor, dist: Tensor) -> Tensor:
    """Return the decision model's inputs: float32[batch, above, 11] of float[batch, above] values and distributions."""
    probs = dist.topk(min(NUM_PROBS, dist.shape[-1]), -1).values
    probs = torch.nn.functional.pad(probs, (0, NUM_PROBS - probs.shape[-1]))
    return torch.cat([probs, values[..., None].to(probs.dtype)], -1).float()


@dataclass(frozen=True)
class TargetInit(BaseGrowth):
    """Chains behind several first tokens drawn from the target's own distribution (improved MCSD, arXiv 2409.10644).

    The branch with most accepted tokens is taken, whatever its first token, so the text does not have the target's
    distribution, at temperature 0 as well: ``generate`` runs this growth with ``allow_lossy=True`` only, for
    comparison.  With one candidate it is a chain behind the ordinary bonus token, lossless without top-p: the draft's
    top-k and top-p are applied to the candidates' distribution once more, and a second top-p cuts deeper.

    Args:
        width: candidates.
        depth: tokens that the draft appends to each.

    Raises:
        TypeError: a size that is no integer.
        ValueError: a size below 1.
    """

    is_lossless = False

    width: int = 2
    depth: int = 5

    def __post_init__(self) -> None:
        check_sizes(width=self.width, depth=self.depth)

    def __str__(self) -> str:
        return f"lossy: TargetInit(width={self.width}, depth={self.depth})"

    def plan(self, budget: int) -> Plan:
        """Return the plan of the chains; the draft model runs the root again, so it is above all candidates."""
        return Static([self.width, *[1] * self.depth]).plan(budget)
