"""A tree size for each request of a batch, by goodput: SmartSpec (arXiv 2406.14066), with trees in place of chains.

Goodput of a step is the tokens that all requests together are expected to emit over the seconds that it is expected to
take.  Tokens come from each request's own acceptance, seconds from a model fitted to the steps (`latency`).  All that
is known comes from the steps themselves: no separate profiling run.  Nothing here knows a loop, a drafter or a model.

A batch is padded to its widest tree, so a step costs rows times width whatever each row's own size is.  The width is
therefore what is chosen by goodput; a request gets the smallest size that expects nearly as many tokens as the width, 1
(plain decoding) where its drafts are hardly ever accepted.

**Lossless**: sizes are computed before a step draws anything, from the lengths of earlier accepted paths, from times
and lengths of texts.  Given the past they are constants.  A step emits the target's distribution for any constant
sizes, because rows are cut to their first nodes in draw order (`drafters.merge.keep_first`), which is a tree of a
smaller constant budget; by induction over steps so does the text.  A size that depended on a token of the same step
would not be allowed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from stree.budget.latency import StepLatency

__all__ = ["SIZES", "START", "ActiveRequest", "RequestSizes", "StepHistory"]

SIZES = (1, 8, 16, 32, 64)  # nodes a step, root included; 1 is plain decoding
START = 16  # size of the first steps of a single sequence, while nothing is known
# Accepted nodes of a tree over those of a tree of START nodes on the same text: the bundled pair, from
# benchmarks/results/who-wins.
GAIN = {1: 0.0, 8: 0.85, 16: 1.0, 32: 1.3, 64: 1.43}
LEVEL = 2.0  # acceptance level that the first requests begin with; one that is too low would end drafting too early
# The numbers below were set by hand, on simulated steps (benchmarks/studies/smartspec.py).
LEAST = 0.02  # expected tokens that a request gives up for a smaller tree
MARGIN = 0.04  # share by which another width must be better before it is taken; below it noise decides
PRIOR_STEPS = 2.0  # weight of the mean level of all requests in that of a new one
MEMORY_STEPS = 40.0  # steps over which a request's level is averaged
EARLIER_STEPS = 200.0  # likewise the mean of all requests
PROBE_EVERY, PROBE_STEPS = 24, 2  # steps before another width is tried, and steps of such a try
PROBE_SHARE = 0.01  # of all time that tries may lose
WORTH = 0.85  # of the present goodput that is expected of a width before its time is measured by a try


class ActiveRequest(NamedTuple):
    """A request in a step: what names it, the tokens of its text, and the most nodes that it allows, or None."""

    name: Hashable
    length: int
    most_nodes: int | None = None


@dataclass(slots=True)
class Level:
    """A mean acceptance level: accepted nodes of a step over what a tree of START nodes accepts relative to others.

    Attributes:
        mean: the level.
        weight: steps that it counts.
    """

    mean: float = LEVEL
    weight: float = PRIOR_STEPS

    def add(self, level: float, most: float) -> None:
        """Count a step, beside at most so many."""
        self.weight = min(self.weight + 1, most)
        self.mean += (level - self.mean) / self.weight


@dataclass(slots=True)
class StepHistory:
    """What steps of one kind (models, growth, sampling) have shown, for batches of any size; kept with the target.

    Attributes:
        latency: predicts a step's time.
        everyone: acceptance level of all requests so far.
        each: of every request that runs.
        total_s: seconds of all steps.
        lost_s: what tries of other widths took beyond what the best known one takes for the tokens expected of them.
    """

    latency: StepLatency = field(default_factory=StepLatency)
    everyone: Level = field(default_factory=Level)
    each: WeakKeyDictionary[Hashable, Level] = field(default_factory=WeakKeyDictionary)
    total_s: float = 0.0
    lost_s: float = 0.0


class RequestSizes:
    """Chooses the tree size of every request of each step; requests may join and leave between steps.

    Args:
        sizes: candidate sizes, ascending, 1 (plain decoding) first.
        history: of this kind of steps; updated.
        start: width of the first steps while nothing is known, or the nearest one that drafts.

    Raises:
        ValueError: sizes that are not ascending or do not begin with 1.
    """

    def __init__(self, sizes: Sequence[int], history: StepHistory, start: int = START) -> None:
        if not sizes or sizes[0] != 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"sizes must ascend from 1, plain decoding, got {list(sizes)}")
        self._sizes, self._history = list(sizes), history
        self._start = self._width = min(sizes[1:] or sizes, key=lambda size: abs(size - start))
        self._since_try = self._probe_left = 0
        self._rows = 1  # of the batch
        self._candidate: int | None = None

    def choose(self, requests: Sequence[ActiveRequest], rows: int | None = None) -> list[int]:
        """Return the sizes of the next step, one for each active request.

        Args:
            requests: those that have not ended.
            rows: of the batch, which cost time whether they are free or not; None for as many as requests.
        """
        self._rows = len(requests) if rows is None else rows
        for request in requests:
            if request.name not in self._history.each:
                self._history.each[request.name] = Level(self._history.everyone.mean)
        levels = [self._history.each[request.name].mean for request in requests]
        context = sum(request.length for request in requests)
        self._width = self._best(levels, context)
        width = self._tried(levels, context) or self._width
        sizes = [self._size(level, width) for level in levels]
        return [
            size if request.most_nodes is None else min(size, request.most_nodes)
            for request, size in zip(requests, sizes, strict=True)
        ]

    def observe(
        self, requests: Sequence[ActiveRequest], sizes: Sequence[int], emitted: Sequence[int], seconds: float | None,
        rows: int | None = None,
    ) -> None:  # fmt: skip
        """Record a step.

        Args:
            requests: as given to `choose`.
            sizes: as it returned them.
            emitted: tokens of every request; 0 for one that had ended.
            seconds: of the step; None where it had costs that do not recur, such as a capture.
            rows: as given to `choose`.
        """
        width, history = max(sizes, default=1), self._history
        self._rows = len(requests) if rows is None else rows
        if seconds is not None and sizes:
            self._time(requests, width, seconds)
        for request, size, count in zip(requests, sizes, emitted, strict=True):
            if size > 1 and count:  # plain decoding shows nothing of acceptance
                level = (count - 1) / GAIN.get(size, 1.0)
                history.each.setdefault(request.name, Level()).add(level, MEMORY_STEPS)
                history.everyone.add(level, EARLIER_STEPS)

    def is_plain(self, rows: int) -> bool:
        """Whether a step of so many new requests would decode plainly."""
        self._rows = rows
        return self._best([self._history.everyone.mean] * rows, 0) == 1

    def _best(self, levels: Sequence[float], context: int) -> int:
        """Return the width of the greatest goodput; the last one unless another is better by a margin."""
        for width in (self._start, 1):  # each once, before any is chosen
            if not self._history.latency.has_timed(drafts=width > 1):
                return width
        goodput = {width: self._goodput(width, levels, context) for width in self._sizes}
        best = max(goodput, key=lambda width: goodput[width])
        return best if goodput[best] > (1 + MARGIN) * goodput[self._width] else self._width

    def _goodput(self, width: int, levels: Sequence[float], context: int) -> float:
        """Return expected tokens a second; 0 for what is not known."""
        seconds = self._history.latency.seconds(self._rows, width, context)
        return _tokens(width, levels) / seconds if seconds else 0.0

    def _tried(self, levels: Sequence[float], context: int) -> int | None:
        """Return a width next to the present one, to be tried now; None most of the time.

        That is one whose time is not known and may be nearly as good, or after plain decoding, which shows nothing of
        acceptance, the smallest.
        """
        history, place = self._history, self._sizes.index(self._width)
        self._since_try += 1
        if self._since_try >= PROBE_EVERY and history.lost_s <= PROBE_SHARE * history.total_s:
            near = [size for size in self._sizes[max(place - 1, 0) : place + 2] if size > 1 and size != self._width]
            least = WORTH * self._goodput(self._width, levels, context)
            unknown = [
                size
                for size in near
                if not history.latency.is_measured(self._rows, size) and self._goodput(size, levels, context) > least
            ]
            self._candidate = next(iter(unknown or near * (self._width == 1)), None)
            self._since_try, self._probe_left = 0, PROBE_STEPS
        if not self._probe_left:
            return None
        self._probe_left -= 1
        return self._candidate

    def _time(self, requests: Sequence[ActiveRequest], width: int, seconds: float) -> None:
        """Record the time of a step, and what it lost if it tried another width than the best known."""
        history, context = self._history, sum(request.length for request in requests)
        history.latency.observe(self._rows, width, context, seconds)
        levels = [history.each.get(request.name, history.everyone).mean for request in requests]
        goodput = self._goodput(self._width, levels, context)
        history.total_s += seconds
        if width != self._width and goodput:
            history.lost_s = max(history.lost_s + seconds - _tokens(width, levels) / goodput, 0.0)

    def _size(self, level: float, width: int) -> int:
        """Return the smallest size of a request that expects nearly as many tokens as the width."""
        return next(size for size in self._sizes if level * (_gain(width) - _gain(size)) <= LEAST)


def _gain(width: int) -> float:
    """Return accepted nodes relative to a tree of START nodes; 1 for a fixed shape of another size."""
    return GAIN.get(width, 1.0)


def _tokens(width: int, levels: Sequence[float]) -> float:
    """Return the tokens that requests are expected to emit."""
    return sum(1 + level * _gain(width) for level in levels)
