"""The tree size of each step, chosen by goodput: expected emitted tokens over measured seconds.

Goodput is SmartSpec's criterion (arXiv 2406.14066), here over sizes of trees with plain decoding among them.  All
that is known comes from the steps themselves: no separate profiling run.  The controller knows no loop, drafter or
model; the loop reports what each step emitted and how long it took.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low

__all__ = ["SIZES", "START", "AcceptanceLevel", "BudgetController", "StepHistory"]

SIZES = (1, 8, 16, 32, 64)  # nodes a step, root included; 1 is plain decoding
START = 16  # size of the first steps of a single sequence, while nothing is known
# Accepted nodes of a tree over those of a tree of START nodes on the same text: the bundled pair, from
# benchmarks/results/who-wins.
GAIN = {1: 0.0, 8: 0.85, 16: 1.0, 32: 1.3, 64: 1.43}
TIMES = 25  # steps of a size whose median is its time: robust against single slow steps
TIMED = 2  # timed steps that the start and every smaller size need before one is chosen
# Acceptance level that a first generation assumes if it starts with trees; set on four prompts of HumanEval.  One that
# is too low ends drafting after a few rejections, and plain decoding does not correct it.
LEVEL = 3.0
# The numbers below were set by hand on the first five prompts of HumanEval, GSM8K and MT-Bench, and on simulated load.
MARGIN = 0.08  # share by which another size must be better before it is taken; below it noise decides
PRIOR_STEPS = 12.0  # weight of earlier generations, or of LEVEL, in a new one's acceptance level: steps of a sequence
MEMORY_STEPS = 80.0  # steps over which a sequence's acceptance level is averaged
OLDEST_STEPS = 4.0  # weight of an acceptance level that has aged during plain decoding
FIRST_PROBE, PROBE_EVERY = 8, 12  # least steps before the first try of another size, and between two of them
PROBE_STEPS = 3  # timed steps of a try; after plain decoding a draft model reads the missed text before the first
MOST_PROBE_STEPS = 12  # steps of a try where some of them are not timed: those before a capture, and the capture
PROBE_SHARE = 0.01  # of the time that tries of other sizes may lose
LOSS_STEPS = 2000.0  # steps over which that share is kept
EARLIER_STEPS = 50.0  # steps over which the level that is handed on to later generations is averaged


@dataclass(slots=True)
class AcceptanceLevel:
    """Accepted nodes of a step of START nodes, averaged over the last steps.

    Attributes:
        value: the average.
        weight: steps of a sequence that it counts; 0 while nothing is known.
    """

    value: float = 0.0
    weight: float = 0.0

    def count(self, value: float, steps: int, most: float) -> None:
        """Average over more steps, at most ``most`` in all."""
        self.weight = min(self.weight + steps, most)
        self.value += steps / self.weight * (value - self.value)


@dataclass(slots=True)
class StepHistory:
    """What steps of one kind (models, batch size, sampling) have shown; kept with the target between generations.

    Attributes:
        seconds: the last steady step times of each size but the first, which also allocates.
        level: acceptance level over earlier generations.
        total_s: seconds of about the last LOSS_STEPS steps.
        lost_s: of them, what tries of other sizes took beyond what the best known size takes for as many tokens as are
            expected of them: also the prompts and tokens that a draft model has to run first after plain decoding.
    """

    seconds: dict[int, deque[float]] = field(default_factory=dict)
    level: AcceptanceLevel = field(default_factory=AcceptanceLevel)
    total_s: float = 0.0
    lost_s: float = 0.0

    def time(self, size: int) -> float | None:
        """Return the lower median of the seconds of a step, or None for a size that has not been timed."""
        times = self.seconds.get(size)
        return median_low(times) if times else None


class BudgetController:
    """Chooses the size of each step of one generation, or of a server's texts while they are as many.

    One number, the acceptance level of the texts, predicts the tokens of every size: 1 + level * GAIN[size].  It is
    an average over the steps of all sizes, so that every step informs every choice.  A first generation times the start
    and every smaller size, largest first, before it chooses.

    Args:
        sizes: candidate sizes, ascending, 1 (plain decoding) first.
        history: of this kind of steps; updated.
        start: size of the first steps while nothing is known, or the nearest candidate.
        level: of the texts; controllers that decode the same texts share one.  None: begin with the history's.

    Attributes:
        current: the size that is used when no other is tried.

    Raises:
        ValueError: sizes that are not ascending or do not begin with 1.
    """

    def __init__(
        self, sizes: Sequence[int], history: StepHistory, start: int = START, level: AcceptanceLevel | None = None
    ) -> None:
        if not sizes or sizes[0] != 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"sizes must ascend from 1, plain decoding, got {list(sizes)}")
        self._sizes, self._history = list(sizes), history
        self._step, self._next_probe, self._probe_end = 0, FIRST_PROBE, 0
        self._probe_left = 0  # timed steps that the present try still needs
        self.current = min(sizes, key=lambda size: abs(size - start))
        if not history.level.weight and self.current > 1:
            history.level = AcceptanceLevel(LEVEL, PRIOR_STEPS)
        self._level = AcceptanceLevel() if level is None else level
        if not self._level.weight:
            self._level.value, self._level.weight = history.level.value, min(history.level.weight, PRIOR_STEPS)
        self._first = [size for size in reversed(sizes) if size <= self.current]
        self.current = self._probed = self._best()

    def choose(self) -> int:
        """Return the size of the next step."""
        self._step += 1
        untimed = self._untimed_first()
        if untimed is not None:
            return untimed
        best = self._best()
        if best != self.current:
            self.current, self._next_probe, self._probe_left = best, self._step + PROBE_EVERY, 0
        elif self._step >= self._next_probe and self._history.lost_s <= PROBE_SHARE * self._history.total_s:
            self._probed, self._probe_left = self._probe(), PROBE_STEPS
            self._next_probe, self._probe_end = self._step + PROBE_EVERY, self._step + MOST_PROBE_STEPS
        return self._probed if self._probe_left and self._step < self._probe_end else self.current

    def observe(self, size: int, num_emitted: Sequence[int], seconds: float | None) -> None:
        """Record a step.

        Args:
            size: as `choose` returned it.
            num_emitted: tokens of every active sequence, at least 1 each.
            seconds: duration of the step; None where it had costs that do not recur, such as a capture: it then counts
                neither as a time of its size nor as time that a try lost.
        """
        if seconds is not None:
            self._time(size, seconds)
        if not num_emitted:
            return
        rows = len(num_emitted)
        if seconds is not None and self._untimed_first() is None:
            self._count_loss(size, seconds)
        if size == 1:  # plain decoding tells nothing of acceptance, and what is known ages
            weight = self._level.weight
            self._level.weight = max(weight * (1 - 1 / MEMORY_STEPS), min(weight, OLDEST_STEPS * rows))
            return
        accepted = sum(count - 1 for count in num_emitted) / rows / self._gain(size)
        self._level.count(accepted, rows, MEMORY_STEPS * rows)
        self._history.level.count(accepted, rows, EARLIER_STEPS * rows)

    def _time(self, size: int, seconds: float) -> None:
        """Record the time of a step."""
        if size in self._history.seconds:
            self._history.seconds[size].append(seconds)
        else:
            self._history.seconds[size] = deque(maxlen=TIMES)
        self._probe_left -= bool(self._probe_left) and size == self._probed

    def _gain(self, size: int) -> float:
        """Return accepted nodes relative to a tree of START nodes; 1 for a fixed shape of another size."""
        return GAIN.get(size, 1.0)

    def _tokens(self, size: int) -> float:
        """Return the expected tokens of a step."""
        return 1 + self._level.value * self._gain(size) * (size > 1)

    def _untimed_first(self) -> int | None:
        """Return the size to time next before any is chosen, or None once all are timed."""
        times = self._history.seconds
        return next((size for size in self._first if len(times.get(size, ())) < TIMED), None)

    def _goodput(self, size: int) -> float:
        """Return expected tokens a second; 0 for a size that has not been timed."""
        seconds = self._history.time(size)
        return self._tokens(size) / seconds if seconds else 0.0

    def _best(self) -> int:
        """Return the size of the greatest goodput; the current one unless another is better by MARGIN."""
        best = max(self._sizes, key=self._goodput)
        current = self._goodput(self.current)
        return best if self._level.weight and current and self._goodput(best) > (1 + MARGIN) * current else self.current

    def _count_loss(self, size: int, seconds: float) -> None:
        """Count the time of a step, and what it lost if it tried another size than the best known."""
        history, goodput = self._history, self._goodput(self.current)
        history.total_s += seconds - history.total_s / LOSS_STEPS
        history.lost_s -= history.lost_s / LOSS_STEPS
        if size != self.current and goodput:
            history.lost_s = max(history.lost_s + seconds - self._tokens(size) / goodput, 0.0)

    def _probe(self) -> int:
        """Return another size to try: a neighbour that has not been timed, else the next best."""
        place = self._sizes.index(self.current)
        near = self._sizes[max(place - 1, 0) : place] + self._sizes[place + 1 : place + 2]
        untimed = [size for size in near if self._history.time(size) is None]
        others = [size for size in self._sizes if size != self.current]
        return untimed[0] if untimed else max(others, key=self._goodput, default=self.current)
