"""Calibration of retrieved values: log-odds corrected for temperature and by how often retrieval was right before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stree.tree import TokenTree

__all__ = ["Listed", "RetrievalCalibration"]

# Log-odds that one of the retrieved children is right, fitted on the bundled pair's texts of prompts 33-40 of
# HumanEval, GSM8K and MT-Bench, which the comparison of drafters does not use.  Greedy text repeats itself longer
# than counts say, sampled text less.
GREEDY_SLOPE = 1.5
PER_TEMPERATURE = -0.5
PRIOR_WEIGHT = 2.0  # of the prior offset 0; a test of probability p adds p (1 - p)
MARGIN = 1e-6  # probabilities are kept within [MARGIN, 1 - MARGIN]


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
    """An offset of the log-odds for each sequence, learnt from what was retrieved and what was then emitted.

    The probabilities of a node's children are scaled together: their sum is the probability that one of them is right.
    No sequence learns from another.

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

    def select(self, rows: Sequence[int]) -> RetrievalCalibration:
        """Copy what was learnt of some sequences."""
        other = RetrievalCalibration(0)
        other._level, other._weight = ([held[row] for row in rows] for held in (self._level, self._weight))
        return other

    def rate(self, tree: TokenTree, values: Tensor, temperature: float | Tensor) -> Tensor:
        """Correct the values of retrieved trees.

        Args:
            tree: n nodes.
            values: float[batch, n], never rising along a path; 0 for padding.
            temperature: of the texts, or float[batch].

        Returns:
            float[batch, n], which never rise along a path.
        """
        temperatures = torch.as_tensor(temperature).expand(len(self._level)).tolist()
        self._rated = []
        for row, (level, own) in enumerate(zip(self._level, temperatures, strict=True)):
            listed, slope = Listed.of(tree, values, row), GREEDY_SLOPE if own == 0 else 1.0
            self._rated.append(_corrected(listed, slope, level + PER_TEMPERATURE * own))
        return torch.tensor([row.values for row in self._rated], dtype=values.dtype, device=values.device)

    def learn(self, emitted: Sequence[Sequence[int]]) -> None:
        """Learn from the tokens after the roots rated last, down to the first node without retrieved children."""
        for row, (tokens, parents, values) in enumerate(self._rated):
            children = {(parents[node], tokens[node]): node for node in range(1, len(tokens)) if parents[node] >= 0}
            mass = _below(parents, values)
            node = 0
            for token in emitted[row]:
                if not mass[node]:
                    break
                chance = min(mass[node] / max(values[node], 1e-30), 1 - MARGIN)
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
    """Correct the log-odds that one of a node's children is right, keeping the children's shares of the sum."""
    tokens, parents, values = listed
    sums = _below(parents, values)
    corrected = [1.0] + [0.0] * (len(values) - 1)
    factor: dict[int, float] = {}
    for node in range(1, len(values)):
        above = parents[node]
        if above < 0:
            continue
        if above not in factor:
            chance = min(max(sums[above] / max(values[above], 1e-30), MARGIN), 1 - MARGIN)
            odds = slope * math.log(chance / (1 - chance)) + level
            factor[above] = 1 / (1 + math.exp(-min(max(odds, -30.0), 30.0))) / max(sums[above], 1e-30)
        corrected[node] = corrected[above] * min(values[node] * factor[above], 1.0)
    return Listed(tokens, parents, corrected)
