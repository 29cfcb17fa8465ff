"""The time of a decode step as a function of its batch, tree size and context, fitted to the steps themselves.

SmartSpec (arXiv 2406.14066) predicts a step by a linear model that is profiled beforehand; here every step is a sample.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

__all__ = ["StepLatency"]

Array = NDArray[np.float64]

FORGETTING = 1 - 1 / 500  # of a sample's weight at every later one
SWEEPS = 4  # of coordinate descent for a sample, from the last coefficients
RIDGE = 1e-3  # keeps what no sample tells apart small
FARTHEST = 2  # times as many tokens as a step has verified so far are predicted, no more
TIMED = 2  # steps of a kind after which it counts as measured
# Terms in the order in which they are fitted: the first ones explain what no sample tells apart, which is cautious.
ORDER = (2, 4, 1, 3, 0, 5)


class StepLatency:
    """Predicts seconds of a step: a sum of non-negative terms, by least squares of relative errors.

    The terms are a constant (weights are read once), sequences, tokens verified (sequences times nodes), draft calls,
    draft calls times sequences, and tokens of context.  A tree of one node is plain decoding and has no draft calls.
    """

    def __init__(self) -> None:
        self._products, self._targets = np.zeros((6, 6)), np.zeros(6)
        self._weights = np.zeros(6)
        self._timed: Counter[tuple[int, int]] = Counter()
        self._most = 0  # tokens verified in a step so far

    def observe(self, rows: int, nodes: int, context: int, seconds: float) -> None:
        """Record a step of ``rows`` sequences with ``nodes`` columns and ``context`` tokens in all of them."""
        self._timed[rows, nodes] += 1
        self._most = max(self._most, rows * nodes)
        terms = _terms(rows, nodes, context) / max(seconds, 1e-9)  # a long step counts no more than a short one
        self._products = FORGETTING * self._products + np.outer(terms, terms)
        self._targets = FORGETTING * self._targets + terms
        diagonal = self._products.diagonal() * (1 + RIDGE) + 1e-12
        for _ in range(SWEEPS):
            for term in ORDER:
                rest = self._targets[term] - self._products[term] @ self._weights
                rest += self._products[term, term] * self._weights[term]
                self._weights[term] = max(rest / diagonal[term], 0.0)

    def seconds(self, rows: int, nodes: int, context: int) -> float | None:
        """Predict a step; None for one that is far larger than all that were timed."""
        if rows * nodes > FARTHEST * self._most:
            return None
        return float(_terms(rows, nodes, context) @ self._weights) or None

    def has_timed(self, *, drafts: bool) -> bool:
        """Whether a step with drafts, or a plain one, was timed."""
        return any((nodes > 1) == drafts for _, nodes in self._timed)

    def is_measured(self, rows: int, nodes: int) -> bool:
        """Whether a kind of step was timed at least twice."""
        return self._timed[rows, nodes] >= TIMED


def _terms(rows: int, nodes: int, context: int) -> Array:
    """Return the terms, each about one at the largest usual size."""
    drafts = float(nodes > 1)
    return np.array([1.0, rows / 8, rows * nodes / 128, drafts, drafts * rows / 8, context / 16384])
