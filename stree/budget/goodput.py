"""What steps of each size of tree emit and take: goodput, by what was accepted.

Trees are nested: that of a smaller budget is the part of a larger one with the greatest values, that of a smaller depth
its top.  So one step says what every smaller tree would have emitted and cost.

It knows no model and no drafter, reads nothing but values fixed before a token was drawn, and no clock: what steps take
is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stree.budget.tree_sizes import Choice

__all__ = ["Experience", "Goodput", "StepMs"]

PRIOR = 50  # observations that the promised values are worth
PRIOR_KEPT = 5.0  # accepted drafts, all of them promised, that a drafter is credited with beforehand
KEPT_STEPS = 50  # steps with drafts over which the share of kept promises is averaged
TRACE = 0.1  # observations below which nothing that was seen fades
REFUSED = np.linspace(0.02, 1.0, 50)  # how often one node alone may be no prefix of the text
TYPICAL = 0.4  # how often it is, before anything was seen
WORTH = 15.0  # observations that experience with other texts is worth

# Milliseconds of steps by int[...] nodes, root included, and int[...] draft calls, which broadcast: float[...].
StepMs = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class Experience:
    """What steps have shown of every choice.

    Attributes:
        seen: float[choices], observations.
        emitted: float[choices], the sum of the tokens that it emitted.
        predicted: float[choices], the sum of what the values promised for it.
        accepted: accepted drafts of all trees.
        promised: what the values promised for them.
    """

    seen: np.ndarray
    emitted: np.ndarray
    predicted: np.ndarray
    accepted: float
    promised: float


class Goodput:
    """Estimates of what a step of every size emits and takes, learnt from what was accepted.

    Args:
        choices: the sizes, plain decoding first.
        step_ms: what steps take.
        experience: what steps on other texts have shown of these choices, or None.
        is_padded: whether a step takes what its size says, however few nodes were found for it.
        memory: steps over which estimates are averaged, about.

    Attributes:
        sizes: int[choices, 2], nodes and depth.
        nominal_ms: float[choices], what a step takes that finds as many nodes as it may.
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
        # Tokens of every choice if a layer of one node is refused so often, the less often the wider it is.
        width = np.maximum((nodes - 1) / np.maximum(depth, 1), 1)
        chance = 1 - REFUSED[:, None] / np.sqrt(width)
        self._curves = np.where(nodes > 1, (1 - chance ** (depth + 1)) / (1 - chance), 1.0)  # [curves, choices]
        # bool[choices, choices]: the second is no larger than the first.
        self._smaller = np.asarray((self.sizes[None] <= self.sizes[:, None]).all(2))
        self.seen = np.zeros(len(choices))
        self._emitted = np.zeros(len(choices))  # decayed sum of the tokens that each choice emitted
        self._predicted = np.zeros(len(choices))  # decayed sum of what the values promised for it
        self._accepted = self._promised = 0.0  # decayed sums over the drafts of all trees
        self.seen[0] = self._emitted[0] = self._predicted[0] = 1.0
        if experience is not None:
            share = min(1.0, WORTH / float(experience.seen.max()))
            self.seen, self._emitted = share * experience.seen, share * experience.emitted
            self._predicted = share * experience.predicted
            self._accepted, self._promised = share * experience.accepted, share * experience.promised
        self._spent_ms = self.seen * self.nominal_ms  # decayed sum of the time that its nodes took
        self._own = np.zeros(len(choices))  # observations of each choice on this text
        self._known: np.ndarray | None = None
        if experience is not None:
            self._known = self.tokens(0)  # that every choice emits by experience alone

    @property
    def is_experienced(self) -> bool:
        """Whether steps on other texts are known."""
        return self._known is not None

    def experience(self) -> Experience:
        """Give what was seen so far."""
        sums = (self.seen.copy(), self._emitted.copy(), self._predicted.copy())
        return Experience(*sums, self._accepted, self._promised)

    def tokens(self, current: int) -> np.ndarray:
        """Estimate the tokens that a step of every choice emits, float[choices].

        Counts are noisy, promised values biased: a choice's own counts are joined by what its values promise, scaled
        by how promises were kept lately, as if that had been seen a fixed number of times.  What was not seen follows
        the acceptance curve that the steps seen so far suggest.

        Args:
            current: the choice that steps have now.
        """
        seen = np.maximum(self.seen, 1e-9)
        promised = self._predicted / seen - 1
        kept = (self._accepted + PRIOR_KEPT) / (self._promised + PRIOR_KEPT)
        expected = (self._emitted + PRIOR * (1 + kept * promised)) / (seen + PRIOR)
        is_seen = self.seen > 0
        most = self._largest_seen(current)
        curve = self._curve(most, expected) if most else np.abs(REFUSED - TYPICAL).argmin()
        beyond = np.maximum(self._curves[curve], (self._smaller * np.where(is_seen, expected, 0.0)).max(1))
        return self._at_this_level(np.where(is_seen, expected, beyond))

    def ms(self, current: int) -> np.ndarray:
        """Estimate the milliseconds of every choice; one that was not seen is as far from what was as its size says.

        Args:
            current: the choice that steps have now.

        Returns:
            float[choices].
        """
        known = self._spent_ms / np.maximum(self.seen, 1e-9)
        most = self._largest_seen(current)
        beyond = self.nominal_ms * float(known[most] / self.nominal_ms[most])
        return np.asarray(np.where(self.seen > 0, known, np.maximum(beyond, self.nominal_ms[0])))

    def count_plain(self, steps: int) -> None:
        """Take note of steps of plain decoding, which teach nothing: what is known fades."""
        if steps:
            self._fade(self._decay**steps)
            for sums in (self.seen, self._emitted, self._predicted):
                sums[0] += steps
            self._spent_ms[0] += steps * self.nominal_ms[0]

    def learn(self, ran: int, values: np.ndarray, depths: np.ndarray, is_accepted: np.ndarray) -> None:
        """Count for the choice that ran and all smaller ones what their trees would have emitted and cost.

        A step costs what its widest and its deepest row need, and one draft call at least.

        Args:
            ran: the choice.
            values: float[steps, batch, n], estimates fixed before the nodes were drawn, never rising along a path;
                root first, 0 for padding.
            depths: int[steps, batch, n].
            is_accepted: bool[steps, batch, n], the accepted paths, roots included; an all-False row stood still.
        """
        self._fade(self._decay ** len(values))
        is_live = is_accepted.max(2)
        if not is_live.any():
            return
        share = (1 - 1 / KEPT_STEPS) ** len(values)
        self._accepted = share * self._accepted + float(is_accepted.sum() - is_live.sum())
        self._promised = share * self._promised + float((values.sum(2) - 1)[is_live].sum())
        order = np.argsort(-values, axis=2, kind="stable")
        rank = np.argsort(order, axis=2, kind="stable")
        known = self._smaller[ran].copy()
        known[0] = True
        sizes = self.sizes[known][:, :, None, None, None]  # [known, 2, 1, 1, 1]
        is_inside = np.logical_and(rank < sizes[:, 0], depths <= sizes[:, 1])  # [known, steps, batch, n]
        is_inside[int(known[:ran].sum())] = True  # others may have put deeper nodes into what ran
        count = is_live.sum(1)  # of each step
        self.seen[known] += count.sum()
        self._own[known] += count.sum()
        self._emitted[known] += (is_inside & is_accepted).sum((1, 2, 3))
        self._predicted[known] += np.where(is_inside & is_live[..., None], values, 0.0).sum((1, 2, 3))
        if self._is_padded:
            self._spent_ms[known] += count.sum() * self.nominal_ms[known]
            return
        is_node = values > 0
        found = np.maximum(is_node.sum(2).max(1), 1)  # [steps]; a smaller tree would have taken as many if it could
        nodes = np.minimum(self.sizes[known, :1], found)  # [known, steps]
        depth = np.minimum(self.sizes[known, 1:], np.maximum((depths * is_node).max((1, 2)), 1))
        self._spent_ms[known] += (count * self._table[nodes - 1, depth]).sum(1)

    def _fade(self, share: float) -> None:
        """Keep a share of all counts; of what was seen at all a trace stays, which says what a trial would bring."""
        kept = np.maximum(share, np.minimum(1.0, TRACE / np.maximum(self.seen, 1e-9)))
        for sums in (self.seen, self._emitted, self._predicted, self._spent_ms):
            sums *= kept

    def _largest_seen(self, current: int) -> int:
        """Name what speaks for larger trees: the present one, or where none is drafted the largest that was seen."""
        if current and self.seen[current] > 0:
            return current
        return int(np.where(self.seen > 0, self.nominal_ms, 0.0).argmax())

    def _at_this_level(self, expected: np.ndarray) -> np.ndarray:
        """Correct what experience says of sizes that this text has not had: it agrees with its drafts more or less.

        A step says nothing of larger trees.  What they emitted elsewhere is worth here what the sizes that ran make of
        the difference, else the largest would always seem the best.

        Args:
            expected: float[choices], tokens a step as all observations together say.

        Returns:
            float[choices].
        """
        most = float(self._own[1:].max(initial=0.0))
        if self._known is None or most <= 0:
            return expected
        ran = int(np.where(self._own >= most, self.nominal_ms, 0.0)[1:].argmax()) + 1
        then, now = self._curve(ran, self._known), self._curve(ran, expected)
        share = np.minimum(self._own / most, 1.0)
        return np.asarray(share * expected + (1 - share) * self._known * self._curves[now] / self._curves[then])

    def _curve(self, choice: int, tokens: np.ndarray) -> int:
        """Return the index of the acceptance curve nearest to the tokens of a choice, of float[choices]."""
        return int(np.abs(self._curves[:, choice] - tokens[choice]).argmin())
