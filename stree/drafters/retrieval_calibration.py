"""How far retrieved continuations are believed: what their values say, corrected by temperature and by what came true.

It knows trees with values and texts, no drafter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stree.tree import TokenTree

__all__ = ["Listed", "RetrievalCalibration"]

# Of log-odds that one of the retrieved children is right: the bundled pair's texts on prompts 33-40 of HumanEval, GSM8K
# and MT-Bench, on which who wins is not measured.  Greedy text repeats itself longer than counts say, sampled less.
GREEDY_SLOPE = 1.5
PER_TEMPERATURE = -0.5
PRIOR_WEIGHT = 2.0  # of the level known beforehand, in units of a test's information
SURE = 1e-6  # nothing is believed beyond 1 - SURE


class Listed(NamedTuple):
    """One row of a tree on the host: tokens, parents and path values of its nodes."""

    tokens: list[int]
    parents: list[int]
    values: list[float]

    @classmethod
    def of(cls, tree: TokenTree, values: Tensor, row: int) -> Listed:
        """List a row of a tree with float[batch, n] values."""
        return cls(tree.tokens[row].tolist(), tree.parents[row].tolist(), values[row].tolist())


class RetrievalCalibration:
    """Levels of log-odds, a sequence each, learnt from what was retrieved and what was then emitted.

    A node's children are believed together: their shares of the path's value sum to the probability that retrieval
    knows what follows.  No sequence learns from another.

    Args:
        batch: sequences.
    """

    def __init__(self, batch: int) -> None:
        self._level = [0.0] * batch
        self._weight = [PRIOR_WEIGHT] * batch
        self._rated: list[Listed] = []

    def forget(self, row: int) -> None:
        """Begin another text."""
        self._level[row], self._weight[row] = 0.0, PRIOR_WEIGHT

    def rate(self, tree: TokenTree, values: Tensor, temperature: float) -> Tensor:
        """Correct the values of retrieved trees.

        Args:
            tree: n nodes.
            values: float[batch, n], never rising along a path; 0 for padding.
            temperature: of the text.

        Returns:
            float[batch, n], which never rise along a path.
        """
        slope = GREEDY_SLOPE if temperature == 0 else 1.0
        self._rated = []
        for row, level in enumerate(self._level):
            listed = Listed.of(tree, values, row)
            self._rated.append(_corrected(listed, slope, level + PER_TEMPERATURE * temperature))
        return torch.tensor([row.values for row in self._rated], dtype=values.dtype, device=values.device)

    def learn(self, emitted: Sequence[Sequence[int]]) -> None:
        """Learn from the tokens that followed the roots rated last, as far as retrieval had anything to say."""
        for row, (tokens, parents, values) in enumerate(self._rated):
            children = {(parents[node], tokens[node]): node for node in range(1, len(tokens)) if parents[node] >= 0}
            believed = _below(parents, values)
            node = 0
            for token in emitted[row]:
                if not believed[node]:
                    break
                chance = min(believed[node] / max(values[node], 1e-30), 1 - SURE)
                node = children.get((node, token), -1)
                self._weight[row] += chance * (1 - chance)
                self._level[row] += ((node >= 0) - chance) / self._weight[row]
                if node < 0:
                    break


def _below(parents: list[int], values: list[float]) -> list[float]:
    """Sum the values of every node's children."""
    sums = [0.0] * len(parents)
    for node in range(1, len(parents)):
        if parents[node] >= 0:
            sums[parents[node]] += values[node]
    return sums


def _corrected(listed: Listed, slope: float, level: float) -> Listed:
    """Change the log-odds that one of a node's children is right, and keep their shares of that."""
    tokens, parents, values = listed
    sums = _below(parents, values)
    found = [1.0] + [0.0] * (len(values) - 1)
    factor: dict[int, float] = {}
    for node in range(1, len(values)):
        above = parents[node]
        if above < 0:
            continue
        if above not in factor:
            chance = min(max(sums[above] / max(values[above], 1e-30), SURE), 1 - SURE)
            odds = slope * math.log(chance / (1 - chance)) + level
            factor[above] = 1 / (1 + math.exp(-min(max(odds, -30.0), 30.0))) / max(sums[above], 1e-30)
        found[node] = found[above] * min(values[node] * factor[above], 1.0)
    return Listed(tokens, parents, found)
