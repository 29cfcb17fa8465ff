"""Milliseconds of a step by its tree size, interpolated between sizes that were timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stree.budget.goodput import Experience

__all__ = ["GUESS", "StepTimes", "TimedStep", "interpolated"]

TimedStep = tuple[float, int, int]  # milliseconds, nodes, draft calls


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
    """Milliseconds of a step: of plain decoding, and of a tree by its nodes and draft calls.

    Attributes:
        plain_ms: of plain decoding.
        nodes: float[points], rising.
        tree_ms: float[points], of trees of so many nodes without their draft calls; never falling.
        call_ms: of a draft call.
        behind_ms: additional time of a tree after plain decoding.
        experience: acceptance in the timed steps; None without a draft model.
    """

    plain_ms: float
    nodes: np.ndarray
    tree_ms: np.ndarray
    call_ms: float = 0.0
    behind_ms: float = 0.0
    experience: Experience | None = None

    def __call__(self, nodes: np.ndarray, calls: np.ndarray) -> np.ndarray:
        """float[...] milliseconds of int[...] nodes, root included, and int[...] draft calls."""
        nodes, calls = np.broadcast_arrays(nodes, calls)
        tree = np.interp(nodes, self.nodes, self.tree_ms) + self.call_ms * calls
        return np.where((nodes == 1) & (calls == 0), self.plain_ms, np.maximum(tree, self.plain_ms))


# Where profiling failed: a draft call takes a quarter of a step, and 64 nodes take twice as long as one.
GUESS = StepTimes(1.0, np.array([1.0, 64.0]), np.array([1.0, 2.0]), 0.25)


def interpolated(
    plain_ms: float, trees: Sequence[TimedStep], behind_ms: float, experience: Experience | None, *, has_calls: bool
) -> StepTimes:
    """Interpolate between timed trees, smallest first; their draft calls are separated where they matter."""
    call_ms = _call_ms(trees) if has_calls else 0.0
    points = [(float(nodes), ms - call_ms * calls) for ms, nodes, calls in trees]
    if len(trees) > 1:  # below the smallest tree the first slope goes on; without draft calls a root is plain decoding
        points.append((1.0, _at_one_node(points, plain_ms) if has_calls else plain_ms))
    nodes = sorted({count for count, _ in points})
    tree_ms = [float(np.mean([ms for count, ms in points if count == known])) for known in nodes]
    return StepTimes(plain_ms, np.array(nodes), np.maximum.accumulate(tree_ms), call_ms, behind_ms, experience)


def _call_ms(trees: Sequence[TimedStep]) -> float:
    """Time of a draft call, from trees with different numbers of calls, corrected for their numbers of nodes."""
    pairs = [(before, after) for before, after in zip(trees, trees[1:], strict=False)]
    wider = [(m1 - m0) / (n1 - n0) for (m0, n0, c0), (m1, n1, c1) in pairs if n1 > n0 and c1 == c0]
    node_ms = max(wider[-1], 0.0) if wider else 0.0
    deeper = [(n1 - n0, (m1 - m0 - node_ms * (n1 - n0)) / (c1 - c0)) for (m0, n0, c0), (m1, n1, c1) in pairs if c1 > c0]
    return max(min(deeper, key=lambda pair: pair[0])[1], 0.0) if deeper else 0.0


def _at_one_node(points: Sequence[tuple[float, float]], plain_ms: float) -> float:
    """Extrapolate the first slope to one node."""
    (nodes, ms), (more, later) = points[:2]
    slope = max((later - ms) / (more - nodes), 0.0) if more > nodes else 0.0
    return max(ms - slope * (nodes - 1), min(plain_ms, ms))
