"""Decode steps that are captured as CUDA graphs and replayed.

Three cases: a drafter that runs on the device alone is captured with the whole step; a tree that the host lays out is
copied to fixed tensors, and the target's part is captured; and such a drafter may capture the part of its own work that
runs on the device (``DraftRun.capture``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stree.decode.cuda_graphs import Graphs
from stree.decode.step import DecodeStep
from stree.decode.step_result import LaunchedStep, StepResult, Wanted
from stree.decode.timing import Shares, StepTimer
from stree.drafters import Draft, DraftRun
from stree.growth import Growth
from stree.models.state import DecodeState
from stree.models.tree_lm import TreeLM
from stree.tree import TokenTree
from stree.verify import DELTA, DraftProbs

__all__ = ["CapturedStep"]

LOGITS = ", with logits of the path"  # of the key of steps whose logits are read
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)  # sizes to which trees that the host lays out are padded


class CapturedStep(DecodeStep):
    """A decode step whose device work is captured; arguments as for ``DecodeStep``, and the graphs."""

    graphs: Graphs

    def __init__(self, lm: TreeLM, state: DecodeState, *, graphs: Graphs, **options: Any) -> None:
        super().__init__(lm, state, **options)
        self.graphs = graphs
        self._inputs = _DraftInputs(len(state.lengths), state.lengths.device)
        self._shares: dict[Hashable, Shares] = {}  # of a replay's time, by kind of work
        self._version: tuple[DraftRun, int] | None = None  # of the tensors that the present graphs read and write

    def __call__(self, growth: Growth | None, budget: int, wanted: Wanted = Wanted()) -> StepResult:  # noqa: B008
        """As ``DecodeStep``, one thread at a time: a replay overwrites what another one's has not copied yet."""
        with self.graphs.lock:
            return super().__call__(growth, budget, wanted)

    def _launch(self, growth: Growth | None, budget: int, *, needs_logits: bool) -> LaunchedStep:
        timer, before = StepTimer(self.state.lengths.device), self.graphs.num_warm_ups
        if self.run.is_capturable:
            step = self._launch_whole(growth, budget, timer, needs_logits=needs_logits)
        else:
            self.run.capture = self._capture_part  # not longer, as it refers to this object
            draft = self._propose(growth, budget)
            self.run.capture = None
            timer.lap("draft_s")
            step = self._launch_target(draft, timer, needs_logits=needs_logits)
        return replace(step, is_steady=self.graphs.num_warm_ups == before)

    def _launch_whole(
        self, growth: Growth | None, budget: int, timer: StepTimer, *, needs_logits: bool
    ) -> LaunchedStep:
        """Replay a step, drafting included."""
        num_calls = self._settle(budget)
        timer.lap("draft_s")
        self._drop_outdated(self.run)
        launch = partial(super()._launch, growth, budget, needs_logits=needs_logits)

        def work() -> LaunchedStep:
            step = launch()
            return step if self._is_debug else replace(step, draft=replace(step.draft, probs=None, grown=None))

        key = f"budget {budget}, {growth!r}{self._processing.key}{LOGITS * needs_logits}"
        result, is_replayed = self._replay(key, work, timer)
        if is_replayed:
            self.run.replayed(budget)
        draft = replace(result.draft, num_calls=result.draft.num_calls + num_calls)
        return replace(result, draft=draft, timer=timer)

    def _launch_target(self, draft: Draft, timer: StepTimer, *, needs_logits: bool) -> LaunchedStep:
        """Replay the target's part for a tree that was laid out on the host."""
        size = min(_bucket(draft.tree.tokens.shape[1]), self.state.max_nodes)
        tree = self._inputs.tree(draft.tree, size)
        probs, depth, key = None, size - 1, f"{size} nodes"
        if draft.probs is not None and self.verifier != "match":  # MATCH reads no distributions
            if self._inputs.reserve_probs(draft.probs):
                self.graphs.clear()
            probs = self._inputs.probs(draft.probs, size)
            depth = min(_bucket(draft.max_depth), size - 1)
            key = f"{size} nodes to depth {depth}, distributions {probs.probs.dtype}"

        def work() -> LaunchedStep:
            padded = TokenTree.unchecked(tree.tokens, tree.parents)
            own = StepTimer(self.state.lengths.device)
            step = self._verify(Draft(padded, probs, depth), own, needs_logits=needs_logits)
            return step if self._is_debug else replace(step, draft=replace(step.draft, probs=None))

        result, _ = self._replay(key + self._processing.key + LOGITS * needs_logits, work, timer)
        self._observe(result.acceptance)
        timer.lap("draft_s")
        return replace(result, draft=draft, timer=timer)

    def _replay(self, key: str, work: Callable[[], LaunchedStep], timer: StepTimer) -> tuple[LaunchedStep, bool]:
        """Do captured work.  A replay is timed as a whole and divided between parts as the first one was."""
        result, is_replayed = self.graphs.run(key, work, self._capture_failed)
        if not is_replayed:
            timer.include(result.timer)
            return result, False
        if key not in self._shares:
            self._shares[key] = result.timer.shares()
        timer.lap_shared(self._shares[key])
        return result, True

    def _capture_part(self, run: DraftRun, key: str, work: Callable[[], Any]) -> tuple[Any, bool]:
        """Do device work of a run, or of a part of it; see ``DraftRun.capture``."""
        self._drop_outdated(run)
        # The target's part is replayed before the run observes the proposal, which must not be overwritten by then.
        return self.graphs.run(key + self._processing.key, work, run.give_up, separate_pool=True)

    def _settle(self, budget: int) -> int:
        """Do what only this step needs of the drafter; return the draft calls it took."""
        self.seen.update(self.texts)
        try:
            return self.run.settle(self.seen.pending, budget)
        except Exception as problem:
            self._decode_without_drafter(problem)
            return 0

    def _drop_outdated(self, run: DraftRun) -> None:
        """Drop the graphs where the run, or tensors that it works on, were replaced."""
        version = run, run.version
        if version != self._version:
            self.graphs.clear()
            self._version = version

    def _decode_without_drafter(self, problem: Exception) -> None:
        if self.graphs.is_capturing:  # it is the capture that failed
            raise problem
        super()._decode_without_drafter(problem)
        self.graphs.clear()

    def _capture_failed(self) -> None:
        """Undo host-side changes of a capture that failed: nothing of it has run."""
        self.state.is_inconsistent = False
        self.run.give_up()


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
