"""How large a tree to draft: the size whose emitted tokens are worth its time, plain decoding among the choices.

Goodput (SmartSpec, arXiv 2406.14066, for trees): expected emitted tokens a step over the step's measured time.  Trees
are nested: that of a smaller budget is the part of a larger one with the greatest values, that of a smaller depth its
top.  So one step says what every smaller tree would have emitted, and only larger ones need be tried.

It knows no model and no drafter, and reads nothing but values fixed before a token was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["BudgetController", "Choice", "flat_choices", "layered_choices"]

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
PRIOR = 50  # observations that the promised values are worth
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
COARSE_NODES, COARSE_DEPTHS = (4, 8, 16, 32, 64, 128), (2, 4, 8, 16)
PRIOR_KEPT = 5.0  # accepted drafts, all of them promised, that a drafter is credited with beforehand
KEPT_STEPS = 50  # steps with drafts over which the share of kept promises is averaged
LOOK = 16  # steps of plain decoding between two looks at all choices
FIRST = 8  # steps with drafts before they may be given up
OPENING = 16  # steps with drafts that are looked at one by one; later TOGETHER are
TOGETHER = 4
TRACE = 0.1  # observations below which nothing that was seen fades
MOST_PATIENCE = 3.0
RIVAL = 1.3  # goodput over plain decoding's above which that is not timed again
SETTLED = 20  # steps after which the time of a size is known, and changes of it are the machine's


@dataclass(frozen=True, slots=True)
class Choice:
    """A size of tree.

    Attributes:
        nodes: most nodes, root included; 1 is plain decoding.
        depth: most draft calls of a model that grows layer by layer; 0 for plain decoding.
    """

    nodes: int
    depth: int


PLAIN = Choice(1, 0)


def layered_choices(max_nodes: int, max_depth: int, *, is_coarse: bool = False) -> list[Choice]:
    """List sizes for a draft model whose tree grows a layer a call, plain decoding first.

    Args:
        max_nodes: most nodes, root included.
        max_depth: most draft calls.
        is_coarse: whether to list a few sizes only, for where each one is captured before it is fast.

    Raises:
        ValueError: a size below 1.
    """
    if max_nodes < 1 or max_depth < 1:
        raise ValueError(f"max_nodes and max_depth must be at least 1, got {max_nodes} and {max_depth}")
    depths = [depth for depth in (COARSE_DEPTHS if is_coarse else DEPTHS) if depth < max_depth] + [max_depth]
    sizes = _sizes(max_nodes, COARSE_NODES if is_coarse else NODES)
    return [PLAIN, *(Choice(nodes, depth) for nodes in sizes for depth in depths if depth < nodes)]


def flat_choices(max_nodes: int) -> list[Choice]:
    """List sizes for trees whose depth costs nothing, such as retrieved ones, plain decoding first.

    Raises:
        ValueError: a size below 1.
    """
    if max_nodes < 1:
        raise ValueError(f"max_nodes must be at least 1, got {max_nodes}")
    return [Choice(nodes, nodes - 1) for nodes in (1, *_sizes(max_nodes, NODES))]


def _sizes(max_nodes: int, sizes: Sequence[int]) -> list[int]:
    """List numbers of nodes above 1: those of ``sizes`` that are smaller, and the largest."""
    return [nodes for nodes in sizes if 1 < nodes < max_nodes] + [max_nodes] * (max_nodes > 1)


class BudgetController:
    """Choose a size for every step of a batch, learning from what was accepted and how long it took.

    While plain decoding is the best size its steps are only counted, and looked at together now and then: they cost
    the host next to nothing.  Counts are noisy, so drafting begins again only where it promises three times the margin.

    Args:
        choices: the sizes to choose from, plain decoding first.
        step_ms: predicted milliseconds of a step of a given size, from a measured cost table; corrected by what steps
            turn out to take.
        memory: steps over which estimates are averaged, about.
        probe_share: share of the time that may be spent on trying other sizes.
        margin: share by which another choice must be better before it is taken.

    Raises:
        ValueError: a number out of its range, or a time that is not positive.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        step_ms: Callable[[Choice], float],
        *,
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
        self._sizes = np.array([[choice.nodes, choice.depth] for choice in self.choices])
        self._predicted_ms = np.array([step_ms(choice) for choice in self.choices], dtype=float)
        if not (np.isfinite(self._predicted_ms).all() and (self._predicted_ms > 0).all()):
            raise ValueError(f"every predicted time must be positive, got {self._predicted_ms.min()}")
        self._pace = np.ones(len(self.choices))  # measured over predicted time; 1 where nothing ran
        self._drift = 1.0  # of the whole machine since then
        self._timed = np.zeros(len(self.choices), dtype=int)  # steps of each choice that were timed
        self._decay, self._probe_share, self._margin = 1 - 1 / memory, probe_share, margin
        self._seen = np.zeros(len(self.choices))  # decayed number of observations of each choice
        self._emitted = np.zeros(len(self.choices))  # decayed sum of the tokens that it emitted
        self._predicted = np.zeros(len(self.choices))  # decayed sum of what the values promised for it
        self._seen[0] = self._emitted[0] = self._predicted[0] = 1.0
        self._accepted = self._promised = 0.0  # decayed sums over the drafts of all trees
        self._current = self._start()
        # Both are timed before one is preferred; trees first and together, so that no model has to catch up.
        self._opening = [0, 0, self._current, self._current]
        self._credit, self._turn = 0.0, 0  # milliseconds saved for trials
        self._wanted = 0.0  # credit that the next trial costs, as last reckoned
        self._patience = 1.0  # times its cost that a trial must have saved: grows while trials change nothing
        self._plain_steps = 0  # observed since the last look at all choices
        self._waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # observed likewise, all of one size
        self._tree_steps = 0
        self._is_behind = False  # whether the last step drafted nothing, so that a draft model has to catch up
        # bool[choices, choices]: the second is no larger than the first.
        self._smaller = np.asarray((self._sizes[None] <= self._sizes[:, None]).all(2))

    @property
    def best(self) -> Choice:
        """The best known size; the first one drafts where nothing is known yet."""
        return self.choices[self._opening[-1] if self._opening else self._current]

    def choose(self) -> Choice:
        """Give the size of the next step: the best known one, or a trial that the time saved for trials can pay."""
        if self._opening:
            return self.choices[self._opening.pop()]
        if self._plain_steps >= LOOK:
            self._count_plain()
            self._settle()
        is_off = self._current == 0
        if self._credit < self._wanted or (is_off and self._plain_steps):
            return self.choices[self._current]
        trial = self._trial(self._ms)
        return self.choices[self._current if trial is None else trial]

    def observe_plain(self, ms: float | None = None) -> None:
        """Take note of a step of plain decoding, which teaches nothing but its time; ``ms`` as for ``observe``."""
        self._plain_steps += 1
        self._is_behind = True
        if ms is not None and ms > 0:
            self._time(0, ms)
        self._credit += self._probe_share * float(self._predicted_ms[0] * self._pace[0]) * self._drift

    def observe(
        self, choice: Choice, values: np.ndarray, depths: np.ndarray, is_accepted: np.ndarray, ms: float | None = None
    ) -> None:
        """Take note of a step.

        Args:
            choice: its size, as ``choose`` gave it.
            values: float[batch, n], estimates fixed before the nodes were drawn, never rising along a path; root
                first, 0 for padding.
            depths: int[batch, n].
            is_accepted: bool[batch, n], the accepted paths, roots included; an all-False row stood still.
            ms: what the step took, milliseconds; None keeps the prediction.
        """
        ran = self._index[choice]
        known = self._ms_of(ran)
        took = known if ms is None or ms <= 0 else ms
        is_trial = ran != self._current
        if is_trial:
            self._credit -= self._patience * max(took - known, 0.0)  # what it took beyond its price
        else:
            self._credit += self._probe_share * known
        if ms is not None and ms > 0 and not (self._is_behind and self._timed[ran] and ms > known):
            self._time(ran, ms)
        self._is_behind = False
        if is_trial:
            self._learn_waiting()
        self._waiting.append((values, depths, is_accepted))
        self._tree_steps += 1
        if is_trial or self._tree_steps <= OPENING or len(self._waiting) >= TOGETHER:
            self._learn_waiting(ran)
            self._settle()

    def goodput(self) -> np.ndarray:
        """Estimate tokens a millisecond of every choice, float[choices]; 0 where nothing is known."""
        return np.asarray(self._expected() / self._ms)

    @property
    def _ms(self) -> np.ndarray:
        """Estimate the milliseconds of every choice: a tree that did not run yet keeps pace with those that did."""
        has_run = self._timed > 0
        known = has_run[1:] if has_run[1:].any() else has_run
        pace = self._pace[-len(known) :][known].mean() if known.any() else 1.0
        return np.asarray(self._predicted_ms * np.where(has_run, self._pace, pace)) * self._drift

    def _ms_of(self, choice: int) -> float:
        """Estimate the milliseconds of one choice."""
        if self._timed[choice]:
            return float(self._predicted_ms[choice] * self._pace[choice]) * self._drift
        return float(self._ms[choice])

    def _time(self, ran: int, ms: float) -> None:
        """Average what a choice takes; one slow step (a page fault, another process) weighs little."""
        pace, known = ms / float(self._predicted_ms[ran] * self._drift), float(self._pace[ran])
        count = int(self._timed[ran])
        self._timed[ran] = count + 1
        if count == 0:
            self._pace[ran] = pace
        elif count == 1:  # the first step of a kind may have compiled or loaded something
            self._pace[ran] = min(pace, known)
        elif count < SETTLED or ran != self._current:
            self._pace[ran] = known + max(0.05, 1 / (count + 1)) * (min(pace, 3 * known) - known)
        else:
            self._drift *= 1 + 0.05 * (min(pace / known, 3.0) - 1)

    def _count_plain(self) -> None:
        """Let what is known fade by the steps of plain decoding that went by."""
        if self._plain_steps:
            self._fade(self._decay**self._plain_steps)
            for sums in (self._seen, self._emitted, self._predicted):
                sums[0] += self._plain_steps
            self._plain_steps = 0

    def _fade(self, share: float) -> None:
        """Keep a share of all counts; of what was seen at all a trace stays, which says what a trial would bring."""
        kept = np.maximum(share, np.minimum(1.0, TRACE / np.maximum(self._seen, 1e-9)))
        for sums in (self._seen, self._emitted, self._predicted):
            sums *= kept

    def _learn_waiting(self, ran: int | None = None) -> None:
        """Learn from the steps that wait, which had one size: the present one if not given."""
        self._count_plain()
        if not self._waiting:
            return
        ran = self._current if ran is None else ran
        size = max(values.shape[1] for values, _, _ in self._waiting)
        values, depths, is_accepted = (
            np.concatenate([np.pad(part, ((0, 0), (0, size - part.shape[1]))) for part in parts])
            for parts in zip(*self._waiting, strict=True)
        )
        self._fade(self._decay ** len(self._waiting))
        share = (1 - 1 / KEPT_STEPS) ** len(self._waiting)
        self._waiting = []
        is_live = is_accepted.any(1)
        if is_live.any():
            values, depths, is_accepted = values[is_live], depths[is_live], is_accepted[is_live]
            self._accepted = share * self._accepted + float(is_accepted.sum() - len(values))
            self._promised = share * self._promised + float(values.sum() - len(values))
            self._learn(ran, values, depths, is_accepted)

    def _learn(self, ran: int, values: np.ndarray, depths: np.ndarray, is_accepted: np.ndarray) -> None:
        """Count for the choice that ran and all smaller ones what their trees would have emitted."""
        order = np.argsort(-values, axis=1, kind="stable")
        rank = np.argsort(order, axis=1, kind="stable")
        known = self._smaller[ran].copy()
        known[0] = True
        sizes = self._sizes[known][:, :, None, None]  # [known, 2, 1, 1]
        is_inside = (rank < sizes[:, 0]) & (depths <= sizes[:, 1])  # [known, batch, n]
        self._seen[known] += len(values)
        self._emitted[known] += (is_inside & is_accepted).sum((1, 2))
        self._predicted[known] += np.where(is_inside, values, 0.0).sum((1, 2))

    def _expected(self) -> np.ndarray:
        """Estimate the tokens that a step of every choice emits; where none ran, at least what a smaller one does.

        Counts are noisy, promised values biased: a choice's own counts are joined by what its values promise, scaled
        by how promises were kept lately, as if that had been seen a fixed number of times.
        """
        seen = np.maximum(self._seen, 1e-9)
        promised = self._predicted / seen - 1
        kept = (self._accepted + PRIOR_KEPT) / (self._promised + PRIOR_KEPT)
        expected = (self._emitted + PRIOR * (1 + kept * promised)) / (seen + PRIOR)
        is_seen = self._seen > 0
        expected = np.where(is_seen, expected, 0.0)
        return np.where(is_seen, expected, (self._smaller * expected).max(1))

    def _settle(self) -> None:
        """Go over to the choice of the greatest goodput if it is better than the present one by the margin."""
        goodput = np.where(self._seen > 0.5, self.goodput(), 0.0)
        best = 1 + int(goodput[1:].argmax()) if len(goodput) > 1 else 0
        if self._current:
            if goodput[best] <= (1 + self._margin) * goodput[self._current]:
                best = self._current
            if goodput[best] < (1 + self._margin) * goodput[0] and self._tree_steps >= FIRST:
                best = 0
        elif goodput[best] <= (1 + 3 * self._margin) * goodput[0]:
            best = 0
        if best != self._current:
            self._current, self._patience = best, 1.0

    def _trial(self, ms: np.ndarray) -> int | None:
        """Find a size worth trying that the credit pays for.

        In turn: a few more nodes, more depth, a much larger one, a smaller one whose time was never measured, and plain
        decoding where it is not far behind, since its time may have changed.
        """
        current = self._sizes[self._current]
        nodes, depth = self._sizes.T
        more_nodes = (nodes > current[0]) & (depth >= np.minimum(max(current[1], 1), nodes - 1))
        deeper = (depth > current[1]) & (nodes >= current[0])
        much_larger = (nodes > 2 * current[0]) & (depth > 2 * current[1])
        expected = self._expected()
        untimed = (nodes < current[0]) & (depth <= current[1]) & (self._timed == 0)
        here = float(expected[self._current] / ms[self._current])
        plain = (nodes == 1) & (self._current > 0) & (here < RIVAL * float(1 / ms[0]))
        kinds = ((more_nodes, ms), (deeper, ms), (much_larger, ms), (untimed, -expected / nodes), (plain, ms))
        candidates, cost = kinds[self._turn % len(kinds)]
        if not candidates.any():
            self._turn += 1
            return None
        trial = int(np.where(candidates, cost, np.inf).argmin())
        loss = float(ms[trial] - expected[trial] * ms[self._current] / max(expected[self._current], 1e-12))
        loss *= self._patience
        if loss > self._credit:
            self._wanted = self._credit + 0.5 * (loss - self._credit)  # by then times and counts may have changed
            return None
        self._credit -= max(loss, 0.0)
        self._wanted = 0.0
        self._turn += 1
        if self._current == 0:
            self._patience = min(1.5 * self._patience, MOST_PATIENCE)
        return trial

    def _start(self) -> int:
        """Begin with the largest tree that costs at most a half more than plain decoding, else with the smallest."""
        if len(self.choices) == 1:
            return 0
        affordable = np.flatnonzero(self._predicted_ms <= 1.5 * self._predicted_ms[0])
        trees = affordable[affordable > 0]
        return int(trees[self._sizes[trees].prod(1).argmax()]) if len(trees) else 1
