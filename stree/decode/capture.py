"""How the device work of steps is launched: operation by operation, or as work that was captured once and is replayed.

A step has three kinds of such work: a whole step, where the drafter is on the device; the target's part, on a tree that
the host has laid out or reads for a grammar, and that is copied to fixed tensors; and the part of a drafter on the host
that is on the device.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stree.decode.cuda_graphs import Graph, Recorder
from stree.decode.step_result import LaunchedStep, Shares, StepTimer
from stree.drafters import Draft, DraftRun
from stree.models.state import recorded
from stree.tree import TokenTree
from stree.verify import DELTA, DraftProbs

__all__ = ["Capture", "GraphCapture", "StepWork"]

WARM_UP = 2  # runs before a capture: one-time compilation and allocation must not be part of it
MOST_GRAPHS = 32
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)  # sizes to which trees that the host lays out are padded

StepWork = Callable[[StepTimer], LaunchedStep]  # launches a step, whose parts the timer is told

logger = logging.getLogger("stree")


class Capture:
    """Launches every operation every time.

    Attributes:
        lock: held by a thread during a step, until what the step made was copied.
        num_replays: of all work.
        num_warm_ups: runs before a capture, and captures: their times are not those of replays.
        is_capturing: whether work is being captured, so that nothing runs.
        launches_drafts: whether work of drafters is launched operation by operation, as the host masks its logits.
    """

    lock: AbstractContextManager[Any] = nullcontext()
    num_replays = num_warm_ups = 0
    is_capturing = launches_drafts = False

    def step(self, run: DraftRun, key: tuple[Any, ...], work: StepWork, timer: StepTimer) -> LaunchedStep:
        """Launch a step, or the target's part of one.

        Args:
            run: drafts.
            key: kind of the step, told by what its parts print; work of one kind always uses the same tensors and host
                numbers.
            work: what to do.
            timer: of the step.
        """
        return work(timer)

    def part(self, run: DraftRun, key: tuple[Any, ...], work: Callable[[], Any]) -> Any:
        """Launch device work of a drafter on the host: see ``DraftRun.launch``."""
        return work()

    def laid_out(self, draft: Draft, most_nodes: int, verifier: object) -> tuple[tuple[str, ...], Callable[[], Draft]]:
        """Lay out the draft of a drafter on the host for ``step``.

        Args:
            draft: as proposed.
            most_nodes: of a tree.
            verifier: see ``stree.accept``.

        Returns:
            The key of its sizes for ``step``, and a function that gives the draft within its work.
        """
        return (), lambda: draft

    def clear(self) -> None:
        """Drop what was captured, since tensors that it uses were replaced."""

    def report(self) -> dict[str, Any]:
        """Return what is captured, JSON-able."""
        return {}


@dataclass(slots=True)
class _Kind:
    """One kind of work: how often it ran, and its graph, if it has one."""

    runs: int = 0
    graph: Graph | None = None
    out: Any = None
    num_bytes: int = 0
    shares: Shares | None = None  # of a replay's time, by part of a step


class GraphCapture(Capture):
    """Captures each kind of work after a few runs, and replays it; keeps the graphs that were used last.

    Args:
        recorder: captures them.

    Attributes:
        problems: why kinds of work cannot be captured; they run without graphs.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self.lock = recorder, recorder.lock
        self._kinds: OrderedDict[str, _Kind] = OrderedDict()
        self._version = 0  # of the drafter's tensors that the graphs read and write
        self._inputs: _DraftInputs | None = None
        self.problems: dict[str, str] = {}

    def step(self, run: DraftRun, key: tuple[Any, ...], work: StepWork, timer: StepTimer) -> LaunchedStep:
        """Replay a step; it is timed as a whole, and divided between parts as the first replay was."""
        kind = self._kind(run, key, lambda: work(StepTimer(timer.device)))
        if kind.graph is None:
            return work(timer)
        step: LaunchedStep = self._replay(kind)
        if kind.shares is None:
            kind.shares = step.timer.shares()
        timer.lap(kind.shares)
        return step

    def part(self, run: DraftRun, key: tuple[Any, ...], work: Callable[[], Any]) -> Any:
        """Replay a drafter's work, whose result is read after the target's part of the step was replayed."""
        if self.launches_drafts:
            return work()
        kind = self._kind(run, key, work, separate_pool=True)
        return work() if kind.graph is None else self._replay(kind)

    def laid_out(self, draft: Draft, most_nodes: int, verifier: object) -> tuple[tuple[str, ...], Callable[[], Draft]]:
        """Copy a draft to fixed tensors of a few sizes."""
        tokens = draft.tree.tokens
        if self._inputs is None:
            self._inputs = _DraftInputs(len(tokens), tokens.device)
        size = min(_bucket(tokens.shape[1]), most_nodes)
        tree, depth, probs = self._inputs.tree(draft.tree, size), size - 1, None
        if draft.probs is not None and verifier != "match":  # which reads no distributions
            if self._inputs.reserve_probs(draft.probs):
                self.clear()
            probs, depth = self._inputs.probs(draft.probs, size), min(_bucket(draft.max_depth), size - 1)
        sizes = f"{size} nodes to depth {depth}, distributions {None if probs is None else probs.probs.dtype}"
        return (sizes,), lambda: Draft(TokenTree.unchecked(tree.tokens, tree.parents), probs, depth)

    def clear(self) -> None:  # noqa: D102
        self._kinds.clear()

    def report(self) -> dict[str, Any]:
        """Graphs, their bytes, replays, and what could not be captured, JSON-able."""
        captured = [kind for kind in self._kinds.values() if kind.graph is not None]
        return {
            "graphs": len(captured),
            "graph_bytes": sum(kind.num_bytes for kind in captured),
            "replays": self.num_replays,
            "not_captured": {**self.problems},
        }

    def _kind(
        self, run: DraftRun, key: tuple[Any, ...], work: Callable[[], Any], *, separate_pool: bool = False
    ) -> _Kind:  # fmt: skip
        """Return a kind of work that is about to be done, captured if it is time."""
        if run.version != self._version:
            self.clear()
            self._version = run.version
        name = ", ".join(part if isinstance(part, str) else repr(part) for part in key)
        kind = self._kinds.setdefault(name, _Kind())
        self._kinds.move_to_end(name)
        kind.runs += 1
        if kind.graph is None and name not in self.problems:
            self.num_warm_ups += 1
            if kind.runs > WARM_UP:
                self._capture(name, kind, partial(self._recorder.capture, work, separate_pool=separate_pool))
        return kind

    def _replay(self, kind: _Kind) -> Any:
        assert kind.graph is not None, "it was captured"
        kind.graph.replay()
        self.num_replays += 1
        return kind.out

    def _capture(self, name: str, kind: _Kind, capture: Callable[[], tuple[Graph, Any]]) -> None:
        """Capture a kind of work; a failure is logged, and the kind is not tried again."""
        captured = [other for other, known in self._kinds.items() if known.graph is not None]
        if len(captured) >= MOST_GRAPHS:
            del self._kinds[captured[0]]
        before = self._recorder.allocated()
        self.is_capturing = True
        try:
            with recorded():
                kind.graph, kind.out = capture()
        except Exception as problem:  # a model's own code may do anything that no graph can hold
            self.problems[name] = f"{type(problem).__name__}: {problem}"[:500]
            logger.warning("a step (%s) runs without a CUDA graph: %s", name, self.problems[name])
            return
        finally:
            self.is_capturing = False
        kind.num_bytes = max(self._recorder.allocated() - before, 0)


class _DraftInputs:
    """Fixed tensors that trees of the host are copied to, padded to a few sizes, for captured verifications to read."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self._batch, self._device = batch, device
        self._trees: dict[int, TokenTree] = {}  # by nodes
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}  # by nodes: each node's distribution, and its kind
        self._probs: dict[torch.dtype, Tensor] = {}  # the distributions, which all sizes share

    def tree(self, tree: TokenTree, size: int) -> TokenTree:
        """Copy a tree's tokens and parents."""
        if size not in self._trees:
            tokens = torch.zeros(self._batch, size, dtype=torch.long, device=self._device)
            self._trees[size] = TokenTree.unchecked(tokens, torch.full_like(tokens, -1, dtype=torch.int32))
        n, fixed = tree.tokens.shape[1], self._trees[size]
        fixed.tokens.zero_()[:, :n] = tree.tokens
        fixed.parents.fill_(-1)[:, :n] = tree.parents
        return fixed

    def reserve_probs(self, probs: DraftProbs) -> bool:
        """Allocate memory for as many distributions as there ever were; return whether older memory was replaced."""
        batch, rows, vocab = probs.probs.shape
        fixed = self._probs.get(probs.probs.dtype)
        if fixed is not None and rows <= fixed.shape[1]:
            return False
        self._probs[probs.probs.dtype] = probs.probs.new_zeros(batch, _bucket(rows), vocab)
        return True

    def probs(self, probs: DraftProbs, size: int) -> DraftProbs:
        """Copy the distributions of a tree's nodes."""
        if size not in self._rows:
            row = torch.zeros(self._batch, size, dtype=torch.int32, device=self._device)
            self._rows[size] = row, torch.zeros_like(row, dtype=torch.int8)
        (row, kind), fixed, n = self._rows[size], self._probs[probs.probs.dtype], probs.row.shape[1]
        fixed[:, : probs.probs.shape[1]] = probs.probs
        row.zero_()[:, :n] = probs.row
        kind.fill_(DELTA)[:, :n] = probs.kind
        return DraftProbs(fixed, row, kind)


def _bucket(count: int) -> int:
    """Round a count up to one of a few sizes."""
    return next((size for size in BUCKETS if size >= count), count)
