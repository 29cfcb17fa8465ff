"""The interface of a growth, and the class that growths inherit from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch

from stree.growth.acceptance_model import AcceptanceModel, DraftProbability, PathProbability
from stree.growth.plan import Plan
from stree.sampling import AnySampling, Sampling

__all__ = ["BaseGrowth", "Growth", "learns_alike"]


class Growth(Protocol):
    """A policy that decides which slots of a draft tree become nodes."""

    @property
    def sampling(self) -> AnySampling:
        """Sampling parameters that children are drawn with."""
        ...

    def bind(self, sampling: AnySampling) -> Growth:
        """Return this growth for children drawn under ``sampling``.

        At temperature 0 children are the most probable tokens, kind DELTA.
        """
        ...

    def plan(self, budget: int) -> Plan:
        """Return the plan of a tree of at most ``budget`` nodes, root included.

        Raises:
            ValueError: a fixed shape larger than the budget.
        """
        ...

    def acceptance_model(self, batch: int, device: torch.device) -> AcceptanceModel:
        """Return a new acceptance model for ``batch`` sequences; what it learns is not shared with other runs."""
        ...


@dataclass(frozen=True)
class BaseGrowth:
    """A growth whose acceptance model is the draft's own probability.

    Args:
        sampling: sampling parameters that children are drawn with; ``bind`` sets those of each batch, so ``repr`` has
            none.
    """

    sampling: AnySampling = field(default=Sampling(), kw_only=True, repr=False)

    def bind(self, sampling: AnySampling) -> Self:
        """Return this growth for children drawn under ``sampling``.

        Raises:
            TypeError: a class that is no dataclass.
        """
        try:
            return replace(self, sampling=sampling)
        except TypeError as error:
            name = type(self).__name__
            raise TypeError(
                f"{name} must be a frozen dataclass (@dataclass(frozen=True)) whose fields are its parameters: {error}"
            ) from error

    def acceptance_model(self, batch: int, device: torch.device) -> AcceptanceModel:
        """Return the draft's own probabilities as the acceptance model."""
        return PathProbability() if self.sampling.is_greedy else DraftProbability()


def learns_alike(first: Growth, second: Growth) -> bool:
    """Whether two growths may share an acceptance model: they differ at most in the parameters of drawn children."""
    return repr(first) == repr(second) and first.sampling.is_greedy == second.sampling.is_greedy
