"""Rules that end growth before a level is drawn; they read only earlier levels, so the method stays lossless.

A sequence that has stopped gets padding where its tree would go on; where reading waits for nothing, draft calls end
when every sequence of the batch has stopped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from stree.growth.acceptance_model import Estimate, Proposal, Slots
from stree.growth.plan import Plan, Wrapped
from stree.kernels.tree_growth.operands import Kept
from stree.sampling import Random

__all__ = ["Confidence", "DepthStop", "Stop", "Stopped", "StoppedGrowth"]


class Stop(Protocol):
    """When a sequence's tree has grown enough."""

    def goes_on(self, depth: int, values: Tensor) -> Tensor | None:
        """Decide below a new layer, before its draft call.

        Args:
            depth: of the layer, from 1.
            values: float[batch, width], values of its nodes, 0 where there is none.

        Returns:
            bool[batch], or None where it goes on anyway.
        """
        ...

    def draws(self, reach: Tensor, probs: Tensor) -> Tensor | None:
        """Decide after a draft call, before tokens are drawn from its distributions.

        Args:
            reach: float[batch, above], values of the nodes that were run, 0 where there is none.
            probs: float[batch, above, vocab].

        Returns:
            bool[batch], or None where it draws anyway.
        """
        ...


class Stopped:
    """An estimate that draws nothing more once a rule has stopped a sequence.

    Args:
        base: the estimate.
        rule: the rule.
    """

    def __init__(self, base: Estimate, rule: Stop) -> None:
        self._base, self._rule, self._depth = base, rule, 0

    def begin(self, plan: Plan, rng: Random) -> None:
        """Begin at the root."""
        self._depth = 0
        self._base.begin(plan, rng)

    def draws(self, reach: Tensor, probs: Tensor) -> Tensor | None:
        """Ask the rule, and another one that the base may have."""
        base, own = self._base.draws(reach, probs), self._rule.draws(reach, probs)
        return base if own is None else own if base is None else base & own

    def rate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Rate slots as the base does."""
        return self._base.rate(slots)

    def goes_on(self, values: Tensor) -> Tensor | None:
        """Ask both."""
        self._depth += 1
        base, own = self._base.goes_on(values), self._rule.goes_on(self._depth, values)
        return base if own is None else own if base is None else base & own

    def note(self, slots: Tensor) -> Kept | None:
        """Note what the base does."""
        return self._base.note(slots)

    def remember(self, tokens: Tensor, path: Tensor | None, lengths: Tensor) -> None:
        """Tell the base."""
        self._base.remember(tokens, path, lengths)

    def forget(self, row: int) -> None:
        """Tell the base."""
        self._base.forget(row)

    def learn(self, proposal: Proposal, ratios: Tensor, is_live: Tensor) -> None:
        """Tell the base."""
        self._base.learn(proposal, ratios, is_live)


@dataclass(frozen=True)
class Confidence:
    """Draw on while the draft is sure of some node's next token; for ``Chain(depth, stop=...)``.

    The token itself is not looked at: a chain cut at the drawn token's own probability is not lossless unless the token
    is kept.

    Args:
        least_prob: least probability of the most probable token.
        most_entropy: most entropy of the distribution, nats.

    Raises:
        ValueError: a probability outside [0, 1], a negative entropy, or neither given.
    """

    least_prob: float = 0.0
    most_entropy: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.least_prob <= 1:
            raise ValueError(f"least_prob must be in [0, 1], got {self.least_prob}")
        if not self.most_entropy >= 0:
            raise ValueError(f"most_entropy must not be negative, got {self.most_entropy}")
        if self.least_prob == 0 and self.most_entropy == math.inf:
            raise ValueError("Confidence needs least_prob or most_entropy, got neither")

    def goes_on(self, depth: int, values: Tensor) -> None:
        """Say nothing: the next distributions are not known."""

    def draws(self, reach: Tensor, probs: Tensor) -> Tensor:
        """Look for a live node whose distribution is sharp."""
        is_sure = probs.amax(-1) >= self.least_prob
        if self.most_entropy < math.inf:
            is_sure &= torch.special.entr(probs).sum(-1) <= self.most_entropy
        return (is_sure & (reach > 0)).any(1)


@dataclass(frozen=True)
class StoppedGrowth(Wrapped):
    """Another growth with a stop rule."""

    @property
    def depth(self) -> int:
        """Most layers, where the other growth has such a number."""
        base: Any = self.base
        return base.depth  # type: ignore[no-any-return]

    def plan(self, budget: int) -> Plan:
        """Lay out the other's tree.

        Raises:
            ValueError: a growth without layers.
        """
        plan = self.base.plan(budget)
        if plan.is_heap:
            raise ValueError(f"{type(self).__name__} needs a growth of layers, got {self.base}")
        return plan


@dataclass(frozen=True)
class DepthStop(StoppedGrowth):
    """Stop where a layer's nodes are together too improbable (Dynamic Depth Decoding, arXiv 2409.00142).

    The paper adds it to EAGLE-2 with up to 11 layers, looking at three of them.  It compares the logarithm of the sum
    of the beam's path probabilities with a threshold; here values are what the growth's estimate gives, and nodes that
    can no longer be proposed count nothing.  Below the default the next call brought an accepted token in at most one
    step of eight (bundled pair, 34 nodes of ``Calibrated`` and EAGLE-2 at temperatures 0 and 0.8, layers 4 to 7, 16
    prompts of HumanEval and GSM8K); a call is worth about 0.2 tokens there.

    Args:
        base: a growth of layers.
        threshold: least log of the sum of a layer's values.
        layers: depths at which it looks, from 1; None for all.

    Raises:
        TypeError: a base that is no growth.
        ValueError: a threshold that is no number below 0, or no depth, or one below 1.
    """

    threshold: float = -1.5
    layers: Sequence[int] | None = (5, 7, 9)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.threshold <= 0:
            raise ValueError(f"threshold must be a log-probability, at most 0, got {self.threshold}")
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(self.layers))
            if not self.layers or min(self.layers) < 1:
                raise ValueError(f"layers must be depths of at least 1, got {list(self.layers)}")

    def estimate(self, batch: int, device: torch.device) -> Estimate:
        """Begin the other's estimate under this rule."""
        return Stopped(self.base.estimate(batch, device), self)

    def goes_on(self, depth: int, values: Tensor) -> Tensor | None:
        """Compare the sum of a layer's values."""
        if self.layers is not None and depth not in self.layers:
            return None
        # In float64 the sum does not depend on how many zeros are among the values.
        return values.sum(1, dtype=torch.float64) >= math.exp(self.threshold)

    def draws(self, reach: Tensor, probs: Tensor) -> None:
        """Say nothing: the draft call is made."""
