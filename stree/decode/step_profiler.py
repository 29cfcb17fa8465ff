"""Which steps are taken to profile their latency, and in which order."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from stree.budget.policy import AutoBudget, TreeSizes
from stree.budget.tree_sizes import PLAIN, Choice
from stree.decode.cuda_graphs import WARM_UP
from stree.decode.step_times import GUESS, StepTimes, TimedStep, interpolated
from stree.drafters import Draft
from stree.growth import Growth
from stree.verify import Acceptance

__all__ = ["StepProfiler"]

ROUNDS = 10  # of each size the first time is a warm-up, of the others the median is taken
LONGEST_S = 2.0  # of timed rounds, after which no other begins
SMALL, MIDDLE, LARGE = 4, 16, 64  # nodes of the trees that are timed; sizes in between are interpolated
SHALLOW, DEEP = 2, 4  # and their draft calls


class StepProfiler(AutoBudget):
    """A budget policy that takes steps of all sizes in rounds, so that disturbances of the machine affect all sizes.

    A controller learns from the steps, and its time is part of theirs.  Every round is a text of its own, which
    continues another piece of the prompt, since acceptance differs from text to text.

    Args:
        sizes: of which a few are timed.
        has_model: whether a model drafts, so that acceptance in these steps predicts that of others.
        on_device: whether steps are captured and pipelined: the second of two equal ones is timed.
    """

    def __init__(self, sizes: TreeSizes, *, has_model: bool, on_device: bool) -> None:
        super().__init__(sizes, GUESS)
        self._has_model, self._calls_matter = has_model, has_model and sizes.is_cut
        # Trees of a round.  The deepest one is not timed: its layers are narrow, so its draft calls are faster.
        self._trees = [(choice, "timed") for choice in _timed_choices(sizes)[:-1]]
        self._trees += [(choice, "") for choice in _deeper_choices(sizes)]
        self._on_device = on_device
        self._script = _script(self._trees, on_device, is_first=True)
        self._round, self._num_rounds = 0, ROUNDS
        self._deadline = math.inf  # known when the first step is timed
        self.most_tokens = sum(choice.depth + 1 for choice, _ in self._script) + 1
        self._num_launched = self._num_observed = 0  # steps of this round
        self._is_first, self._last = True, 0.0
        # Milliseconds by size, and the nodes and draft calls that it had.
        self._steps: dict[Choice, list[TimedStep]] = {}
        self._behind: list[float] = []

    @property
    def num_left(self) -> int:
        """Steps not yet observed, if all remaining rounds are as long as this one."""
        return (self._num_rounds - self._round) * len(self._script) - self._num_observed

    @property
    def is_paused(self) -> bool:
        """Whether all steps of this round were observed."""
        return self._num_observed == len(self._script)

    @property
    def is_done(self) -> bool:
        """Whether all steps were observed."""
        return self.num_left == 0

    @property
    def is_off(self) -> bool:
        """False: trees will be drafted."""
        return False

    def begin(self) -> float:
        """Begin a text for the rest of a round, whose first step is not timed; return its share of the prompt."""
        if self.is_paused:
            self._round, self._num_observed = self._round + 1, 0
            self._trees.reverse()  # in every other round the larger ones first: acceptance grows along a text
            self._script = _script(self._trees, self._on_device, is_first=False)
        self._num_launched, self._is_first = self._num_observed, True
        self._launched.clear()
        return 1 - self._round / self._num_rounds

    def next(self) -> tuple[Growth | None, int]:
        """Return the next size; plain decoding after the last one of a round."""
        choice = self._script[self._num_launched][0] if self._num_launched < len(self._script) else PLAIN
        self._num_launched += 1
        return self._launch(choice)

    def observe(self, draft: Draft, acceptance: Acceptance) -> None:
        """Record the time since the last step was observed."""
        super().observe(draft, acceptance)
        now = time.perf_counter()
        ms, self._last = 1e3 * (now - self._last), now
        if self.is_paused:
            return
        choice, timing = self._script[self._num_observed]
        self._num_observed += 1
        if timing:
            self._deadline = min(self._deadline, now - 1e-3 * ms + LONGEST_S)
        if self._is_first:
            self._is_first = False
        elif timing == "timed":
            self._steps.setdefault(choice, []).append((ms, draft.tree.tokens.shape[1], draft.num_calls))
        elif timing == "behind":
            self._behind.append(ms)
        if self.is_paused and now > self._deadline:
            self._num_rounds = self._round + 1

    def times(self) -> StepTimes:
        """Interpolate between what was timed."""
        medians = {choice: _median(steps) for choice, steps in self._steps.items()}
        plain_ms = medians.pop(PLAIN)[0]
        trees = [medians[choice] for choice in sorted(medians, key=lambda choice: (choice.nodes, choice.depth))]
        behind_ms = max(float(np.median(self._behind)) - trees[0][0], 0.0) if self._behind else 0.0
        experience = self.controller.experience() if self._has_model else None
        return interpolated(plain_ms, trees, behind_ms, experience, has_calls=self._calls_matter)


def _timed_choices(sizes: TreeSizes) -> list[Choice]:
    """Choose the sizes that are timed, smallest first, plain decoding last."""
    if len(sizes.choices) <= 3:
        return [*sizes.choices[1:], PLAIN]
    if not sizes.is_cut:
        return [*(Choice(nodes, nodes - 1) for nodes in (SMALL, MIDDLE, LARGE)), PLAIN]
    depths = sorted({choice.depth for choice in sizes.choices[1:]})
    deep = max(depth for depth in depths if depth <= DEEP)
    shallow = max((depth for depth in depths if depth <= min(SHALLOW, deep - 1)), default=deep)
    pairs = ((SMALL, shallow), (MIDDLE, shallow), (MIDDLE, deep), (LARGE, deep))
    return [*dict.fromkeys(Choice(nodes, depth) for nodes, depth in pairs), PLAIN]


def _deeper_choices(sizes: TreeSizes) -> list[Choice]:
    """The largest and deepest tree, where no timed one is as deep: the acceptance in it is learned from."""
    deepest = max(choice.depth for choice in sizes.choices)
    return [Choice(LARGE, deepest)] if sizes.is_cut and len(sizes.choices) > 3 and deepest > DEEP else []


def _script(trees: Sequence[tuple[Choice, str]], on_device: bool, *, is_first: bool) -> list[tuple[Choice, str]]:
    """List the steps of a round, each "timed", "behind" plain decoding, or neither."""
    if not on_device:
        small = min((choice for choice, _ in trees), key=lambda choice: choice.nodes)
        return [(small, ""), *trees, (PLAIN, ""), (PLAIN, "timed"), (PLAIN, "timed"), (small, "behind")]
    sizes = [*trees, (PLAIN, "timed")]
    pairs = [(choice, each) for choice, timing in sizes for each in ("", timing)]
    if not is_first:
        return pairs
    first = [(choice, "") for choice, _ in sizes]  # allocates memory, so that no later graph is dropped
    return [*first, *[(choice, "") for choice, _ in sizes for _ in range(WARM_UP + 1)], *pairs]


def _median(steps: Sequence[TimedStep]) -> TimedStep:
    """Median of the times of a size, the first one left out."""
    warm = sorted(steps[1:] or steps)
    return warm[(len(warm) - 1) // 2]
