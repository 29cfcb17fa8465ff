"""How large a tree to draft: the size whose emitted tokens are worth its time, plain decoding among the choices.

Goodput (SmartSpec, arXiv 2406.14066, for trees): expected emitted tokens a step over the step's time.  One step says
what every smaller tree would have emitted and cost (`stree.budget.goodput`), so only larger ones need be tried.

No clock is read, so that the same text leads to the same sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stree.budget.goodput import Experience, Goodput, StepMs
from stree.budget.tree_sizes import PLAIN, Choice

__all__ = ["BudgetController"]

LOOK = 16  # steps of plain decoding between two looks at all choices
OPENING = 16  # steps with drafts that are looked at one by one without experience; later TOGETHER are
TOGETHER = 4
MOST_PATIENCE = 3.0
DEAREST = 2.0  # of plain decoding's time, what the first tree may take
ALLOWANCE = 1.0  # steps of plain decoding that drafts may lose before they are given up
PROMPT = 1.0  # steps of plain decoding that running the prompt through a draft model takes, about
FIRST_MARGIN = 0.15  # share by which by experience a tree must be better than plain decoding to begin with it


class BudgetController:
    """Choose a size for every step of a batch, learning from what was accepted.

    While plain decoding is the best size its steps are only counted, and looked at together now and then: they cost
    the host next to nothing.  Counts are noisy, so drafting begins again only where it promises three times the margin.

    Args:
        choices: the sizes to choose from, plain decoding first.
        step_ms: what steps take.
        experience: what steps on other texts have shown of these choices, or None.
        is_padded: whether a step takes what its size says, however few nodes were found for it.
        behind_ms: milliseconds that a tree takes more after plain decoding.
        memory: steps over which estimates are averaged, about.
        probe_share: share of the time that may be spent on trying other sizes.
        margin: share by which another choice must be better before it is taken.

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
        self._known = Goodput(choices, step_ms, experience, is_padded=is_padded, memory=memory)
        self._behind_ms, self._probe_share, self._margin = behind_ms, probe_share, margin
        self._plain_ms = float(self._known.nominal_ms[0])
        self._current = 0
        self._credit, self._turn = 0.0, 0  # milliseconds saved for trials
        self._wanted = 0.0  # credit that the next trial costs, as last reckoned
        self._patience = 1.0  # times its cost that a trial must have saved: grows while trials change nothing
        self._plain_steps = 0  # observed since the last look at all choices
        self._waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # observed likewise, all of one size
        self._tree_steps = 0
        self._current = self._start()
        if experience is not None and not self._current:
            self._credit = -PROMPT * self._plain_ms

    @property
    def best(self) -> Choice:
        """The best known size."""
        return self.choices[self._current]

    def choose(self) -> Choice:
        """Give the size of the next step: the best known one, or a trial that the time saved for trials can pay."""
        if self._plain_steps >= LOOK:
            self._count_plain()
            self._settle()
        is_off = self._current == 0
        if self._credit < self._wanted or (is_off and self._plain_steps) or not self._known.seen[self._current]:
            return self.choices[self._current]
        trial = self._trial()
        return self.choices[self._current if trial is None else trial]

    def observe_plain(self) -> None:
        """Take note of a step of plain decoding, which teaches nothing."""
        self._plain_steps += 1
        self._credit += self._probe_share * self._plain_ms

    def observe(self, choice: Choice, values: np.ndarray, depths: np.ndarray, is_accepted: np.ndarray) -> None:
        """Take note of a step.

        Args:
            choice: its size, as ``choose`` gave it.
            values: float[batch, n], estimates fixed before the nodes were drawn, never rising along a path; root
                first, 0 for padding.
            depths: int[batch, n].
            is_accepted: bool[batch, n], the accepted paths, roots included; an all-False row stood still.
        """
        ran = self._index[choice]
        is_trial = ran != self._current
        if is_trial:
            self._learn_waiting(self._current)
        else:
            self._credit += self._probe_share * float(self._known.nominal_ms[ran])
        self._waiting.append((values, depths, is_accepted))
        self._tree_steps += 1
        if (
            is_trial
            or (not self._known.is_experienced and self._tree_steps <= OPENING)
            or len(self._waiting) >= TOGETHER
        ):
            self._learn_waiting(ran)
            self._settle()

    def experience(self) -> Experience:
        """Give what was seen so far."""
        self._learn_waiting(self._current)
        return self._known.experience()

    def goodput(self) -> np.ndarray:
        """Estimate tokens a millisecond of every choice, float[choices]."""
        return np.asarray(self._known.tokens(self._current) / self._known.ms(self._current))

    def _count_plain(self) -> None:
        """Let what is known fade by the steps of plain decoding that went by."""
        self._known.count_plain(self._plain_steps)
        self._plain_steps = 0

    def _learn_waiting(self, ran: int) -> None:
        """Learn from the steps that wait, which had one size."""
        self._count_plain()
        if self._waiting:
            values, depths, is_accepted = (_stacked(parts) for parts in zip(*self._waiting, strict=True))
            self._waiting = []
            self._known.learn(ran, values, depths, is_accepted)

    def _settle(self) -> None:
        """Go over to the choice of the greatest goodput if it is better than the present one by the margin."""
        expected, ms = self._known.tokens(self._current), self._known.ms(self._current)
        goodput = np.where(self._known.seen > 0.5, expected / ms, 0.0)
        best = 1 + int(goodput[1:].argmax()) if len(goodput) > 1 else 0
        if self._current:
            if goodput[best] <= (1 + self._margin) * goodput[self._current]:
                best = self._current
            if goodput[best] < (1 + self._margin) * goodput[0]:
                lost = self._tree_steps * float(ms[self._current] - expected[self._current] * ms[0])
                allowance = ALLOWANCE * float(ms[0])
                if lost >= allowance:
                    best, self._credit = 0, min(self._credit, 0.0) - allowance
        elif goodput[best] <= (1 + 3 * self._margin) * goodput[0]:
            best = 0
        if best != self._current:
            self._current, self._patience = best, 1.0

    def _trial(self) -> int | None:
        """Find a size worth trying that the credit pays for.

        While drafting is off the tree that is least behind; else one that was not seen and promises more than the
        present one, or in turn a few more nodes, more depth, a much larger one.
        """
        current = self._known.sizes[self._current]
        nodes, depth = self._known.sizes.T
        expected, ms = self._known.tokens(self._current), self._known.ms(self._current)
        is_off = self._current == 0
        promise = np.where(is_off & (nodes > 1) | (self._known.seen == 0), expected / ms, 0.0)
        if is_off or promise.max() > (1 + self._margin) * expected[self._current] / ms[self._current]:
            trial = int(promise.argmax())
        else:
            more_nodes = (nodes > current[0]) & (depth >= np.minimum(max(current[1], 1), nodes - 1))
            deeper = (depth > current[1]) & (nodes >= current[0])
            much_larger = (nodes > 2 * current[0]) & (depth > 2 * current[1])
            candidates = (more_nodes, deeper, much_larger)[self._turn % 3]
            if not candidates.any():
                self._turn += 1
                return None
            trial = int(np.where(candidates, ms, np.inf).argmin())
        loss = float(ms[trial] - expected[trial] * ms[self._current] / max(expected[self._current], 1e-12))
        if is_off:
            loss = self._patience * (max(loss, 0.0) + self._behind_ms)
        if loss > self._credit:
            self._wanted = self._credit + 0.5 * (loss - self._credit)  # by then counts may have changed
            return None
        self._credit -= max(loss, 0.0)
        self._wanted = 0.0
        self._turn += 1
        if is_off:
            self._patience = min(1.5 * self._patience, MOST_PATIENCE)
        return trial

    def _start(self) -> int:
        """Begin with the tree of the greatest goodput as far as can be said beforehand, or with none if none pays."""
        goodput = self.goodput()
        if self._known.is_experienced:
            best = int(np.where(self._known.seen > 0, goodput, 0.0).argmax())
            return best if goodput[best] > (1 + FIRST_MARGIN) * goodput[0] else 0
        return int(np.where(self._known.nominal_ms <= DEAREST * self._plain_ms, goodput, 0.0).argmax())


def _stacked(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Put [batch, n] arrays, one a step, into [steps, batch, most n], padded with zeros."""
    stacked = np.zeros((len(parts), len(parts[0]), max(part.shape[1] for part in parts)), parts[0].dtype)
    for room, part in zip(stacked, parts, strict=True):
        room[:, : part.shape[1]] = part
    return stacked
