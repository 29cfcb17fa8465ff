"""Budget controller: chooses the tree size of each step by goodput, with plain decoding as one of the choices.

Goodput (SmartSpec, arXiv 2406.14066, here for trees) is the expected number of emitted tokens of a step over its time.
One step also shows what every smaller tree would have emitted and cost (`stree.budget.goodput`), so only larger trees
need trials. No clock is read, so that the same text always leads to the same sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stree.budget.goodput import Experience, Goodput, StepMs
from stree.budget.tree_sizes import PLAIN, Choice

__all__ = ["BudgetController"]

REVIEW_STEPS = 16  # steps of plain decoding between two reviews of all choices
EARLY_STEPS = 16  # without experience, the first steps with drafts update the estimates one by one
STEPS_PER_UPDATE = 4  # later steps update them in groups of this size
MAX_BACKOFF = 3.0  # largest factor on the cost of a trial while drafting is off
MAX_FIRST_COST = 2.0  # largest time of the first tree, in steps of plain decoding
MAX_LOSS = 1.0  # largest loss before drafting is switched off, in steps of plain decoding
PROMPT_COST = 1.0  # estimated time of the draft model's prefill, in steps of plain decoding
FIRST_MARGIN = 0.15  # share by which a tree must beat plain decoding, by experience, to be the first choice


class BudgetController:
    """Chooses a tree size for every step of a batch and learns from the accepted paths.

    While plain decoding is the best choice, its steps are only counted and reviewed in groups, which costs the host
    almost nothing. Counts are noisy, so drafting is switched on again only for a gain of three times the margin.

    Args:
        choices: the sizes to choose from, plain decoding first.
        step_ms: step times in milliseconds.
        experience: statistics of these choices from other texts, or None.
        is_padded: whether a step always takes the time of its size, even if fewer nodes were drafted.
        behind_ms: extra milliseconds of the first tree after plain decoding, because the draft model has to catch up.
        memory: approximate number of steps over which estimates are averaged.
        probe_share: share of the time that may be spent on trials of other sizes.
        margin: share by which another choice must be better to switch to it.

    Raises:
        ValueError: a number out of its range, or a time that is not positive.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        step_ms: StepMs,
        *,
        experience: Experience | None = None,
        is_padded: bool = False,
        behind_ms: float = 0.0,
        memory: int = 200,
        probe_share: float = 0.01,
        margin: float = 0.01,
    ) -> None:
        if not choices or choices[0] != PLAIN or len(set(choices)) != len(choices):
            raise ValueError(f"choices must differ and begin with plain decoding, got {list(choices)[:3]}")
        if memory < 1:
            raise ValueError(f"memory must be at least 1 step, got {memory}")
        if not (0 <= probe_share < 1 and 0 <= margin < 1):
            raise ValueError(f"probe_share and margin must be in [0, 1), got {probe_share} and {margin}")
        self.choices = list(choices)
        self._index = {choice: index for index, choice in enumerate(self.choices)}
        self._estimates = Goodput(choices, step_ms, experience, is_padded=is_padded, memory=memory)
        self._behind_ms, self._probe_share, self._margin = behind_ms, probe_share, margin
        self._plain_ms = float(self._estimates.nominal_ms[0])
        self._current = 0
        self._trial_ms, self._num_trials = 0.0, 0  # milliseconds that trials may lose
        self._next_trial_ms = 0.0  # needed before the next trial, by the last estimate
        self._backoff = 1.0  # factor on a trial's cost; grows while trials change nothing
        self._plain_steps = 0  # since the last review
        self._pending: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # steps of one size, not learned from
        self._tree_steps = 0
        self._current = self._first_choice()
        if experience is not None and not self._current:
            self._trial_ms = -PROMPT_COST * self._plain_ms

    @property
    def best(self) -> Choice:
        """The best known size."""
        return self.choices[self._current]

    def choose(self) -> Choice:
        """Choose the size of the next step: the best known one, or a trial if its expected loss is affordable."""
        if self._plain_steps >= REVIEW_STEPS:
            self._count_plain()
            self._switch()
        is_off, is_seen = self._current == 0, self._estimates.seen[self._current] > 0
        if self._trial_ms < self._next_trial_ms or (is_off and self._plain_steps) or not is_seen:
            return self.choices[self._current]
        trial = self._trial()
        return self.choices[self._current if trial is None else trial]

    def observe_plain(self) -> None:
        """Record a step of plain decoding."""
        self._plain_steps += 1
        self._trial_ms += self._probe_share * self._plain_ms

    def observe(self, choice: Choice, values: np.ndarray, depths: np.ndarray, is_accepted: np.ndarray) -> None:
        """Record a step.

        Args:
            choice: its size, as ``choose`` gave it.
            values: float[batch, n], acceptance probability of each node's path as estimated before drawing; not
                increasing along a path, 1 for the root, 0 for padding.
            depths: int[batch, n].
            is_accepted: bool[batch, n], the accepted paths, roots included; an all-False row is an inactive sequence.
        """
        ran = self._index[choice]
        is_trial = ran != self._current
        if is_trial:
            self._learn_pending(self._current)
        else:
            self._trial_ms += self._probe_share * float(self._estimates.nominal_ms[ran])
        self._pending.append((values, depths, is_accepted))
        self._tree_steps += 1
        if (
            is_trial
            or (not self._estimates.is_experienced and self._tree_steps <= EARLY_STEPS)
            or len(self._pending) >= STEPS_PER_UPDATE
        ):
            self._learn_pending(ran)
            self._switch()

    def experience(self) -> Experience:
        """Statistics of all steps so far."""
        self._learn_pending(self._current)
        return self._estimates.experience()

    def goodput(self) -> np.ndarray:
        """Estimate tokens a millisecond of every choice, float[choices]."""
        return np.asarray(self._estimates.tokens(self._current) / self._estimates.ms(self._current))

    def _count_plain(self) -> None:
        """Decay the estimates by the recorded steps of plain decoding."""
        self._estimates.count_plain(self._plain_steps)
        self._plain_steps = 0

    def _learn_pending(self, ran: int) -> None:
        """Learn from the pending steps, which had one size."""
        self._count_plain()
        if self._pending:
            values, depths, is_accepted = (_stacked(parts) for parts in zip(*self._pending, strict=True))
            self._pending = []
            self._estimates.learn(ran, values, depths, is_accepted)

    def _switch(self) -> None:
        """Switch to the choice of the greatest goodput if it beats the current one by the margin."""
        expected, ms = self._estimates.tokens(self._current), self._estimates.ms(self._current)
        goodput = np.where(self._estimates.seen > 0.5, expected / ms, 0.0)
        best = 1 + int(goodput[1:].argmax()) if len(goodput) > 1 else 0
        if self._current:
            if goodput[best] <= (1 + self._margin) * goodput[self._current]:
                best = self._current
            if goodput[best] < (1 + self._margin) * goodput[0]:
                lost = self._tree_steps * float(ms[self._current] - expected[self._current] * ms[0])
                allowance = MAX_LOSS * float(ms[0])
                if lost >= allowance:
                    best, self._trial_ms = 0, min(self._trial_ms, 0.0) - allowance
        elif goodput[best] <= (1 + 3 * self._margin) * goodput[0]:
            best = 0
        if best != self._current:
            self._current, self._backoff = best, 1.0

    def _trial(self) -> int | None:
        """Find a size to try whose expected loss is affordable.

        While drafting is off this is the best tree; else an unseen size that promises more than the current one, or in
        turn one with more nodes, with more depth, or a much larger one.
        """
        current = self._estimates.sizes[self._current]
        nodes, depth = self._estimates.sizes.T
        expected, ms = self._estimates.tokens(self._current), self._estimates.ms(self._current)
        is_off = self._current == 0
        promise = np.where(is_off & (nodes > 1) | (self._estimates.seen == 0), expected / ms, 0.0)
        if is_off or promise.max() > (1 + self._margin) * expected[self._current] / ms[self._current]:
            trial = int(promise.argmax())
        else:
            more_nodes = (nodes > current[0]) & (depth >= np.minimum(max(current[1], 1), nodes - 1))
            deeper = (depth > current[1]) & (nodes >= current[0])
            much_larger = (nodes > 2 * current[0]) & (depth > 2 * current[1])
            candidates = (more_nodes, deeper, much_larger)[self._num_trials % 3]
            if not candidates.any():
                self._num_trials += 1
                return None
            trial = int(np.where(candidates, ms, np.inf).argmin())
        loss = float(ms[trial] - expected[trial] * ms[self._current] / max(expected[self._current], 1e-12))
        if is_off:
            loss = self._backoff * (max(loss, 0.0) + self._behind_ms)
        if loss > self._trial_ms:
            # Try again at half the missing amount, because the estimates may have changed by then.
            self._next_trial_ms = self._trial_ms + 0.5 * (loss - self._trial_ms)
            return None
        self._trial_ms -= max(loss, 0.0)
        self._next_trial_ms = 0.0
        self._num_trials += 1
        if is_off:
            self._backoff = min(1.5 * self._backoff, MAX_BACKOFF)
        return trial

    def _first_choice(self) -> int:
        """Choose the first size by predicted goodput; plain decoding if no tree is expected to pay."""
        goodput = self.goodput()
        if self._estimates.is_experienced:
            best = int(np.where(self._estimates.seen > 0, goodput, 0.0).argmax())
            return best if goodput[best] > (1 + FIRST_MARGIN) * goodput[0] else 0
        return int(np.where(self._estimates.nominal_ms <= MAX_FIRST_COST * self._plain_ms, goodput, 0.0).argmax())


def _stacked(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Stack [batch, n] arrays, one per step, into [steps, batch, largest n], padded with zeros."""
    stacked = np.zeros((len(parts), len(parts[0]), max(part.shape[1] for part in parts)), parts[0].dtype)
    for room, part in zip(stacked, parts, strict=True):
        room[:, : part.shape[1]] = part
    return stacked
