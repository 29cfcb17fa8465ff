"""Stop rules: end the growth of a sequence's tree before the next layer is drawn.

They read only what earlier layers show, never the token that would be drawn next, so the method stays lossless.  Where
the host can read tensors without synchronising (the CPU), draft calls end once every sequence of the batch has stopped;
elsewhere a stopped sequence's layers are padding, so that every step has one shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from stree.checks import check_numbers, check_shares
from stree.growth.acceptance_model import AcceptanceModel, Proposal, Slots
from stree.growth.base import Growth
from stree.growth.plan import Plan
from stree.kernels.checks import checks_values
from stree.kernels.tree_growth.operands import Kept
from stree.returned import check_kind, check_returned, wrong_return
from stree.sampling import AnySampling, Random

__all__ = ["STOPS", "Confidence", "Stop", "Stopped", "StoppedGrowth", "StoppedModel", "check_rule"]


class Stop:
    """A rule that ends the growth of a sequence's tree; the base class never does.

    A rule of your own is a frozen dataclass, so that statistics show its parameters.  It overrides one of the methods
    and is attached to a growth by ``Stopped(growth, rule)``, or in names by ``+NAME:NUMBER`` after
    ``stree.growth.STOPS["NAME"] = Rule``.  It decides for a whole text.  To end single branches give their slots the
    priority 0 in ``AcceptanceModel.rate``, by ``slots.dist``.
    """

    def goes_on(self, depth: int, values: Tensor) -> Tensor | None:
        """Decide below a new layer, before its draft call.

        Args:
            depth: of the layer, from 1.
            values: float[batch, width], values of its nodes, 0 where there is none, by the growth's acceptance model:
                path probabilities, or learnt chances with ``Calibrated``.  Only read.

        Returns:
            bool[batch], or None where growth always continues.
        """
        return None

    def draws(self, values: Tensor, dist: Tensor) -> Tensor | None:
        """Decide after a draft call, which is spent, before tokens are drawn from its distributions.

        Args:
            values: float[batch, above], values of the nodes that were run, 0 where there is none.
            dist: float[batch, above, vocab].

        Returns:
            bool[batch], or None where tokens are always drawn.
        """
        return None


class StoppedModel(AcceptanceModel):
    """Another acceptance model with a stop rule; a sequence also stops where the other model's own rule says so.

    What both return is compared with the documentation of their methods.

    Args:
        base: the other model.
        rule: the stop rule.
    """

    def __init__(self, base: AcceptanceModel, rule: Stop) -> None:
        self.base, self._rule, self._depth = base, rule, 0

    def begin(self, plan: Plan, rng: Random) -> None:
        """Prepare for a new tree."""
        self._depth = 0
        self.base.begin(plan, rng)

    def draws(self, values: Tensor, dist: Tensor) -> Tensor | None:
        """Combine the rule with the base's."""
        return _both(_decided(self.base, "draws", values, dist), _decided(self._rule, "draws", values, dist))

    def rate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Return the base's priorities and values."""
        return _rated(self.base, slots)

    def goes_on(self, values: Tensor) -> Tensor | None:
        """Combine the rule with the base's."""
        self._depth += 1
        going = _decided(self.base, "goes_on", values)
        return _both(going, _decided(self._rule, "goes_on", self._depth, values))

    def keep(self, slots: Tensor) -> Kept | None:
        """Return what the base needs of new nodes."""
        return self.base.keep(slots)

    def read_text(self, tokens: Tensor, path: Tensor | None, lengths: Tensor) -> None:
        """Pass new tokens to the base."""
        self.base.read_text(tokens, path, lengths)

    def reset(self, row: int) -> None:
        """Reset what the base learnt of a sequence."""
        self.base.reset(row)

    def select(self, rows: Tensor) -> StoppedModel:
        """Return the base of some sequences with the same rule."""
        base = self.base.select(rows)
        check_kind(self.base, "select", base, AcceptanceModel, "a stree.growth.AcceptanceModel")
        return StoppedModel(base, self._rule)

    def learn(self, proposal: Proposal, ratios: Tensor, is_live: Tensor) -> None:
        """Let the base learn."""
        self.base.learn(proposal, ratios, is_live)


def _rated(model: AcceptanceModel, slots: Slots) -> tuple[Tensor, Tensor]:
    """Call ``rate`` and compare what it returns with its documentation.

    Raises:
        TypeError: no two tensors of floats.
        ValueError: another shape or device, or, where the host can read them, numbers below 0 or infinite ones.
    """
    ratings: Any = model.rate(slots)
    batch, above, ranks = slots.probs.shape
    if not (isinstance(ratings, (tuple, list)) and len(ratings) == 2):
        each = f"each float[batch, above, ranks] = {[batch, above, ranks]}"
        raise wrong_return(model, "rate", f"two tensors, priorities and values, {each}", ratings)
    device = slots.probs.device
    for part, rating in zip(("priorities ", "values "), ratings, strict=True):
        check_returned(model, "rate", rating, "float", device, part=part, batch=batch, above=above, ranks=ranks)
        if checks_values(rating) and not bool(((rating >= 0) & (rating < math.inf)).all()):
            low, high = rating.min(), rating.max()
            name = f"{type(model).__name__}.rate"
            raise ValueError(
                f"{name} must return {part}of at least 0, as probabilities are, got {low:.3g} to {high:.3g}"
            )
    return ratings[0].to(slots.values.dtype), ratings[1].to(slots.values.dtype)


def _decided(owner: Any, method: str, *inputs: Any) -> Tensor | None:
    """Call ``draws`` or ``goes_on`` of a model or a stop rule; compare the result with bool[batch] or None.

    Raises:
        TypeError: no tensor of bool.
        ValueError: another shape or device.
    """
    verdict: Tensor | None = getattr(owner, method)(*inputs)
    if verdict is not None:
        last = inputs[-1]
        check_returned(owner, method, verdict, "bool", last.device, batch=len(last))
    return verdict


def _both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return where both rules continue; None always does."""
    return first if second is None else second if first is None else first & second


@dataclass(frozen=True)
class Confidence(Stop):
    """Draw a layer while the draft is confident of the next token of some node.

    It looks at the distribution and not at the drawn token: a tree that drops a drawn token because of its own
    probability is not lossless.  SGLang and llama.cpp stop chains in the same way.

    Args:
        least_prob: least probability of the most probable token.
        most_entropy: greatest entropy of the distribution, in nats.

    Raises:
        ValueError: a probability outside [0, 1], a negative entropy, or neither given.
    """

    least_prob: float = 0.0
    most_entropy: float = math.inf

    def __post_init__(self) -> None:
        check_shares(least_prob=self.least_prob)
        check_numbers(most_entropy=self.most_entropy)
        if not self.most_entropy >= 0:
            raise ValueError(f"most_entropy must not be negative, got {self.most_entropy}")
        if self.least_prob == 0 and self.most_entropy == math.inf:
            raise ValueError("Confidence needs least_prob or most_entropy, got neither")

    def draws(self, values: Tensor, dist: Tensor) -> Tensor:
        """Return where some live node's distribution is sharp enough: bool[batch]."""
        is_sharp = dist.amax(-1) >= self.least_prob
        if self.most_entropy < math.inf:
            is_sharp &= torch.special.entr(dist).sum(-1) <= self.most_entropy
        return (is_sharp & (values > 0)).any(1)


# Rules by name, made from the number behind it; a class of your own may be entered under another name.
STOPS: dict[str, Callable[..., Stop]] = {"sure": Confidence}


@dataclass(frozen=True)
class StoppedGrowth:
    """A growth of layers with a stop rule.

    Args:
        base: the growth.

    Raises:
        TypeError: ``base`` is not a growth.
        ValueError: ``base`` is ``TargetInit``, which runs as it is or not at all.
    """

    base: Growth

    def __post_init__(self) -> None:
        if isinstance(self.base, type) or not hasattr(self.base, "plan"):
            raise TypeError(f"base must be a growth such as Chain(4), got {self.base!r:.80}")
        if not getattr(self.base, "is_lossless", True):
            raise ValueError(f"{type(self.base).__name__} takes no stop rule")

    @property
    def sampling(self) -> AnySampling:
        """Sampling parameters that children are drawn with."""
        return self.base.sampling

    def bind(self, sampling: AnySampling) -> Self:
        """Return this growth for children drawn under ``sampling``."""
        return replace(self, base=self.base.bind(sampling))

    def plan(self, budget: int) -> Plan:
        """Return the base's plan.

        Raises:
            ValueError: a growth without layers.
        """
        plan = self.base.plan(budget)
        if plan.is_heap:
            raise ValueError(f"{type(self).__name__} needs a growth of layers, got {self.base}")
        return plan


@dataclass(frozen=True)
class Stopped(StoppedGrowth):
    """Another growth with a stop rule: ``Stopped(Eagle2(), Confidence(0.4))``.

    Args:
        base: a growth of layers.
        rule: when its trees end.

    Raises:
        TypeError: ``base`` is not a growth, or ``rule`` not a rule.
    """

    rule: Stop

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rule("rule", self.rule)

    def acceptance_model(self, batch: int, device: torch.device) -> AcceptanceModel:
        """Return the base's acceptance model with the rule."""
        return StoppedModel(self.base.acceptance_model(batch, device), self.rule)


def check_rule(name: str, rule: Any) -> None:
    """Refuse what is no stop rule.

    Raises:
        TypeError: another object, a class, or a rule that has neither method.
    """
    if not isinstance(rule, Stop):
        raise TypeError(f"{name} must be a rule such as Confidence(0.4), got {rule!r:.80}")
    if type(rule).draws is Stop.draws and type(rule).goes_on is Stop.goes_on:
        raise TypeError(f"{name} must override draws or goes_on, which {type(rule).__name__} does not")
