"""Improved MCSD's candidates: several chains that begin with tokens of the target's own distribution.  Not lossless."""

from __future__ import annotations

from dataclasses import dataclass

from stree.checks import check_sizes
from stree.growth.fixed import Static
from stree.growth.plan import Bound, Plan

__all__ = ["TargetInit"]


@dataclass(frozen=True)
class TargetInit(Bound):
    """Chains behind several first tokens drawn from the target's own distribution (improved MCSD, arXiv 2409.10644).

    The branch that lasts longest is taken, whatever its first token, so the text does not have the target's
    distribution, at temperature 0 as well: ``generate`` runs it with ``allow_lossy=True`` only.  It is here to be
    compared with.  With one candidate it is a chain behind the ordinary bonus token, and lossless.  The draft's top-k
    and top-p are applied to the candidates' distribution once more.

    Args:
        width: candidates.
        depth: tokens that the draft appends to each.

    Raises:
        TypeError: a size that is no integer.
        ValueError: a size below 1.
    """

    width: int = 2
    depth: int = 5

    def __post_init__(self) -> None:
        check_sizes(width=self.width, depth=self.depth)

    def __str__(self) -> str:
        return f"lossy: TargetInit(width={self.width}, depth={self.depth})"

    def plan(self, budget: int) -> Plan:
        """Lay out the chains; the root is run again, so it is above all candidates."""
        return Static([self.width, *[1] * self.depth]).plan(budget)
