"""Estimates of emitted tokens and step time for every tree size, from the accepted paths of past steps.

Trees are nested: a smaller budget keeps the nodes of the largest values, a smaller depth the top levels. So one step
shows what every smaller tree would have emitted and cost. Only values fixed before drawing are read, and no clock: the
step times are given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stree.budget.tree_sizes import Choice

__all__ = ["Experience", "Goodput", "StepMs"]

PRIOR_STEPS = 50  # weight of the predicted values, in observations
PRIOR_ACCEPTED = 5.0  # prior of the calibration: accepted drafts, all of them predicted
CALIBRATION_STEPS = 50  # steps over which accepted / predicted drafts is averaged
MIN_SEEN = 0.1  # counts do not decay below so many observations
REJECTION_RATES = np.linspace(0.02, 1.0, 50)  # rejection probabilities of a level of one node, one per acceptance curve
DEFAULT_REJECTION = 0.4  # the same before any observation
EXPERIENCE_STEPS = 15.0  # weight of the experience from other texts, in observations

# Step time in milliseconds, float[...], by int[...] nodes (root included) and int[...] draft calls, which broadcast.
StepMs = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class Experience:
    """Statistics of every choice.

    Attributes:
        seen: float[choices], observations.
        emitted: float[choices], sum of the tokens that it emitted.
        predicted: float[choices], sum of the values of its nodes, the expected emitted tokens.
        accepted: accepted drafts of all trees.
        promised: sum of the values of the drafts of all trees.
    """

    seen: np.ndarray
    emitted: np.ndarray
    predicted: np.ndarray
    accepted: float
    promised: float


class Goodput:
    """Estimates of the tokens and the time of a step of every size, learned from accepted paths.

    Args:
        choices: the sizes, plain decoding first.
        step_ms: step times in milliseconds.
        experience: statistics of these choices from other texts, or None.
        is_padded: whether a step always takes the time of its size, even if fewer nodes were drafted.
        memory: approximate number of steps over which estimates are averaged.

    Attributes:
        sizes: int[choices, 2], nodes and depth.
        nominal_ms: float[choices], time of a step that uses its whole budget.
        seen: float[choices], decayed number of observations.

    Raises:
        ValueError: a time that is not positive.
    """

    def __init__(
        self, choices: Sequence[Choice], step_ms: StepMs, experience: Experience | None, *, is_padded: bool, memory: int
    ) -> None:
        self.sizes = np.array([[choice.nodes, choice.depth] for choice in choices])
        most_nodes, most_depth = self.sizes.max(0)
        self._table = np.array(step_ms(np.arange(1, most_nodes + 1)[:, None], np.arange(most_depth + 1)), dtype=float)
        self._table = np.broadcast_to(self._table, (most_nodes, most_depth + 1))
        nodes, depth = self.sizes.T
        self.nominal_ms = self._table[nodes - 1, depth]
        if not (np.isfinite(self.nominal_ms).all() and (self.nominal_ms > 0).all()):
            raise ValueError(f"every time must be positive, got {self.nominal_ms.min()}")
        self._is_padded, self._decay = is_padded, 1 - 1 / memory
        # Expected tokens per tree size when a level of width w is rejected with probability r / sqrt(w).
        width = np.maximum((nodes - 1) / np.maximum(depth, 1), 1)
        chance = 1 - REJECTION_RATES[:, None] / np.sqrt(width)
        self._curves = np.where(nodes > 1, (1 - chance ** (depth + 1)) / (1 - chance), 1.0)  # [curves, choices]
        # bool[choices, choices]: the second is no larger than the first.
        self._smaller = np.asarray((self.sizes[None] <= self.sizes[:, None]).all(2))
        self.seen = np.zeros(len(choices))
        self._emitted = np.zeros(len(choices))  # decayed sum of the tokens that each choice emitted
        self._predicted = np.zeros(len(choices))  # decayed sum of the values of its nodes
        self._accepted = self._promised = 0.0  # decayed sums over the drafts of all trees
        self.seen[0] = self._emitted[0] = self._predicted[0] = 1.0
        if experience is not None:
            share = min(1.0, EXPERIENCE_STEPS / float(experience.seen.max()))
            self.seen, self._emitted = share * experience.seen, share * experience.emitted
            self._predicted = share * experience.predicted
            self._accepted, self._promised = share * experience.accepted, share * experience.promised
        self._spent_ms = self.seen * self.nominal_ms  # decayed sum of the time of its steps
        self._seen_here = np.zeros(len(choices))  # observations of each choice on this text
        self._prior_tokens: np.ndarray | None = None
        if experience is not None:
            self._prior_tokens = self.tokens(0)  # from experience alone

    @property
    def is_experienced(self) -> bool:
        """Whether experience from other texts was given."""
        return self._prior_tokens is not None

    def experience(self) -> Experience:
        """Statistics of all steps so far."""
        sums = (self.seen.copy(), self._emitted.copy(), self._predicted.copy())
        return Experience(*sums, self._accepted, self._promised)

    def tokens(self, current: int) -> np.ndarray:
        """Estimate the tokens that a step of every choice emits, float[choices].

        Counts are noisy and predicted values biased, so the estimate joins a choice's own counts with its predicted
        values, scaled by the recent ratio of accepted to predicted drafts, as a prior of fixed weight. Sizes without
        observations follow the acceptance curve that fits the other sizes.

        Args:
            current: the current choice.
        """
        seen = np.maximum(self.seen, 1e-9)
        promised = self._predicted / seen - 1
        kept = (self._accepted + PRIOR_ACCEPTED) / (self._promised + PRIOR_ACCEPTED)
        expected = (self._emitted + PRIOR_STEPS * (1 + kept * promised)) / (seen + PRIOR_STEPS)
        is_seen = self.seen > 0
        most = self._largest_seen(current)
        curve = self._curve(most, expected) if most else np.abs(REJECTION_RATES - DEFAULT_REJECTION).argmin()
        beyond = np.maximum(self._curves[curve], (self._smaller * np.where(is_seen, expected, 0.0)).max(1))
        return self._corrected(np.where(is_seen, expected, beyond))

    def ms(self, current: int) -> np.ndarray:
        """Estimate the milliseconds of every choice; unseen ones are scaled by their nominal times.

        Args:
            current: the current choice.

        Returns:
            float[choices].
        """
        known = self._spent_ms / np.maximum(self.seen, 1e-9)
        most = self._largest_seen(current)
        beyond = self.nominal_ms * float(known[most] / self.nominal_ms[most])
        return np.asarray(np.where(self.seen > 0, known, np.maximum(beyond, self.nominal_ms[0])))

    def count_plain(self, steps: int) -> None:
        """Decay the counts by steps of plain decoding."""
        if steps:
            self._scale_counts(self._decay**steps)
            for sums in (self.seen, self._emitted, self._predicted):
                sums[0] += steps
            self._spent_ms[0] += steps * self.nominal_ms[0]

    def learn(self, ran: int, values: np.ndarray, depths: np.ndarray, is_accepted: np.ndarray) -> None:
        """Count tokens and time for the choice that ran and for all smaller ones.

        The time of a step is that of its widest and its deepest row, with at least one draft call.

        Args:
            ran: the choice.
            values: float[steps, batch, n], as for ``BudgetController.observe``.
            depths: int[steps, batch, n].
            is_accepted: bool[steps, batch, n], as for ``BudgetController.observe``.
        """
        self._scale_counts(self._decay ** len(values))
        is_live = is_accepted.max(2)
        if not is_live.any():
            return
        share = (1 - 1 / CALIBRATION_STEPS) ** len(values)
        self._accepted = share * self._accepted + float(is_accepted.sum() - is_live.sum())
        self._promised = share * self._promised + float((values.sum(2) - 1)[is_live].sum())
        order = np.argsort(-values, axis=2, kind="stable")
        rank = np.argsort(order, axis=2, kind="stable")
        known = self._smaller[ran].copy()
        known[0] = True
        sizes = self.sizes[known][:, :, None, None, None]  # [known, 2, 1, 1, 1]
        is_inside = np.logical_and(rank < sizes[:, 0], depths <= sizes[:, 1])  # [known, steps, batch, n]
        is_inside[int(known[:ran].sum())] = True  # a second drafter may have added deeper nodes to it
        count = is_live.sum(1)  # of each step
        self.seen[known] += count.sum()
        self._seen_here[known] += count.sum()
        self._emitted[known] += (is_inside & is_accepted).sum((1, 2, 3))
        self._predicted[known] += np.where(is_inside & is_live[..., None], values, 0.0).sum((1, 2, 3))
        if self._is_padded:
            self._spent_ms[known] += count.sum() * self.nominal_ms[known]
            return
        is_node = values > 0
        found = np.maximum(is_node.sum(2).max(1), 1)  # [steps], nodes that were drafted
        nodes = np.minimum(self.sizes[known, :1], found)  # [known, steps]
        depth = np.minimum(self.sizes[known, 1:], np.maximum((depths * is_node).max((1, 2)), 1))
        self._spent_ms[known] += (count * self._table[nodes - 1, depth]).sum(1)

    def _scale_counts(self, share: float) -> None:
        """Multiply all counts by a share, but keep ``MIN_SEEN`` observations of a size that was ever seen."""
        kept = np.maximum(share, np.minimum(1.0, MIN_SEEN / np.maximum(self.seen, 1e-9)))
        for sums in (self.seen, self._emitted, self._predicted, self._spent_ms):
            sums *= kept

    def _largest_seen(self, current: int) -> int:
        """Return the choice to extrapolate from: the current one, or without drafting the largest one that was seen."""
        if current and self.seen[current] > 0:
            return current
        return int(np.where(self.seen > 0, self.nominal_ms, 0.0).argmax())

    def _corrected(self, expected: np.ndarray) -> np.ndarray:
        """Correct the prior of sizes that were not run on this text, whose drafts may be better or worse than usual.

        The correction is the ratio of the acceptance curves that fit the sizes that ran: here, and by experience alone.
        Without it the largest tree would always look best.

        Args:
            expected: float[choices], tokens per step by all observations.

        Returns:
            float[choices].
        """
        most = float(self._seen_here[1:].max(initial=0.0))
        if self._prior_tokens is None or most <= 0:
            return expected
        ran = int(np.where(self._seen_here >= most, self.nominal_ms, 0.0)[1:].argmax()) + 1
        then, now = self._curve(ran, self._prior_tokens), self._curve(ran, expected)
        share = np.minimum(self._seen_here / most, 1.0)
        return np.asarray(share * expected + (1 - share) * self._prior_tokens * self._curves[now] / self._curves[then])

    def _curve(self, choice: int, tokens: np.ndarray) -> int:
        """Return the index of the acceptance curve that fits the tokens of one choice best."""
        return int(np.abs(self._curves[:, choice] - tokens[choice]).argmin())
