"""One step of the loop as device work: draft, verify, accept, commit, and what of it the host is to hear.

Nothing here reads the device.  What a step leaves for the next one stands in tensors that are written in place, stop
tokens and lengths are looked after on the device, and the host reads a step's tokens when it pleases.  So a step can be
captured once and replayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stree.decode.cuda_graphs import Graphs
from stree.decode.timing import Clock, Clocks, ReplayClock, StepClock
from stree.drafters import (
    Capturable,
    Composed,
    Draft,
    Drafter,
    DraftRun,
    NoDrafter,
    Restartable,
    Slotted,
    padded_prompts,
)
from stree.growth import Growth
from stree.kernels.dispatch import host_can_read
from stree.kernels.step.bookkeeping import Texts, emit
from stree.models.state import DecodeState
from stree.models.tree_lm import TreeLM
from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify import DELTA, Acceptance, DraftProbs, accept

__all__ = ["DecodeStep", "StepResult"]

logger = logging.getLogger("stree")

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)  # nodes of trees that are brought to a captured verification


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """One step that was launched.

    Attributes:
        draft: what was proposed.
        acceptance: what was accepted; path length 0 where a sequence stood still.
        logits: float[batch, n, vocab], of the tree's nodes.  On a device the tensors of a replayed step hold until the
            next one, but for what a program that is watched brings to the host.
        report: int64[batch, m + 2] on the host: up to m emitted tokens, their number, and the nodes committed.
        arrival: event after which ``report`` may be read, or None where it may be at once.
        clock: when its parts ended.
    """

    draft: Draft
    acceptance: Acceptance
    logits: Tensor
    report: Tensor
    arrival: Any
    clock: Clock

    def emitted(self) -> tuple[list[list[int]], list[int]]:
        """Wait for the report; give each sequence's new tokens, and the nodes that it committed."""
        if self.arrival is not None:
            self.arrival.synchronize()
        rows = self.report.tolist()
        return [row[: row[-2]] for row in rows], [row[-1] for row in rows]


@dataclass(frozen=True, slots=True, eq=False)
class _Done:
    """A step's work, launched: what becomes a ``StepResult`` once its report is on its way."""

    draft: Draft
    found: Acceptance
    logits: Tensor
    report: Tensor
    clock: Clock


class DecodeStep:
    """The steps of a batch of sequences, from one to the next on the device.

    Args:
        lm: the target.
        state: its state, empty.
        rng: random numbers; its sequences are written, its positions are not used.
        sampling: how the target's tokens are drawn.
        verifier: see ``stree.accept``.
        stop_token_ids: tokens that end a sequence.
        graphs: captures steps and replays them, or None to launch every operation of every step.

    Attributes:
        run: the drafter's run for the same sequences, from ``fill`` on.
        pending: int64[batch], emitted tokens that were not yet run.
        num_new: int64[batch], tokens emitted.
        limit: int64[batch], most new tokens.
        is_finished: bool[batch], sequences that stand still.
        problem: why the drafter was given up in mid-text, or None.
        is_watched: whether a step's draft and accepted paths are brought to the host with its report.
    """

    run: DraftRun
    is_watched: bool = False
    problem: Exception | None = None

    def __init__(
        self,
        lm: TreeLM,
        state: DecodeState,
        rng: Random,
        *,
        sampling: Sampling,
        verifier: str,
        stop_token_ids: Iterable[int],
        graphs: Graphs | None = None,
    ) -> None:
        self.lm, self.state, self.rng = lm, state, rng
        self.sampling, self.verifier, self.graphs = sampling, verifier, graphs
        self.pending = torch.zeros_like(rng.sequences)
        self.num_new = torch.zeros_like(rng.sequences)
        self.limit = torch.zeros_like(rng.sequences)
        self.is_finished = torch.ones_like(rng.sequences, dtype=torch.bool)
        self._stop = torch.tensor(sorted(stop_token_ids), dtype=torch.long, device=rng.sequences.device)
        self._trees: dict[int, TokenTree] = {}  # by nodes, what captured verifications read
        self._probs_rows: dict[int, tuple[Tensor, Tensor]] = {}  # likewise, which distribution is whose, and its kind
        self._probs_rooms: dict[torch.dtype, Tensor] = {}  # the distributions
        self._shares: dict[Hashable, Sequence[tuple[str, float]]] = {}
        self._version: tuple[Capturable, int] | None = None  # the run that steps were captured of, and of its tensors
        self._is_used = False  # whether the state holds texts

    def fill(self, drafter: Drafter, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Tensor:
        """Begin as many texts as there are rows, whatever these held.

        Args:
            drafter: the same one every time.
            prompts: token lists.
            max_new_tokens: most new tokens a sequence.
            seed: of the random numbers.

        Returns:
            float[batch, vocab] logits of their first tokens.
        """
        input_ids, lengths = padded_prompts(prompts)
        if not self._is_used:
            logits = self.lm.prefill(self.state, input_ids, lengths)
        else:
            filled = self.lm.new_state(len(prompts), input_ids.shape[1], self.state.max_nodes)
            logits = self.lm.prefill(filled, input_ids, lengths)
            self.state.overwrite(filled)
        self._is_used = True
        if isinstance(self.rng.seed, Tensor):
            self.rng.seed.fill_((seed + (1 << 63)) % (1 << 64) - (1 << 63))
        self.rng.sequences.copy_(torch.arange(len(prompts)))
        self.limit.fill_(max_new_tokens)
        if isinstance(getattr(self, "run", None), Restartable):
            self.run.restart(prompts)  # type: ignore[attr-defined]
        else:
            self.run = drafter.start(self.lm.vocab_size, prompts, self.rng.at(lengths.to(self.pending.device)))
            if self.graphs is not None and isinstance(self.run, Composed):
                self.run.replay = partial(self._replayed_part, self.graphs)
        return logits

    def __call__(self, growth: Growth | None, budget: int) -> StepResult:
        """Launch a step of at most ``budget`` nodes a sequence."""
        done = self._launch(growth, budget)
        if self.is_watched:
            done = replace(done, draft=_on_host(done.draft), found=_found_on_host(done.found))
        report = _to_host(done.report)  # behind the last mark, which has a time once it has arrived
        arrival = None
        if done.report.device.type == "cuda":
            arrival = torch.cuda.Event()
            arrival.record(torch.cuda.current_stream(done.report.device))
        return StepResult(done.draft, done.found, done.logits, report, arrival, done.clock)

    def begin(self, row: int, token: int, *, is_finished: bool) -> None:
        """Start a sequence whose prompt was run and whose first token was emitted."""
        self.pending[row] = token
        self.num_new[row] = 1
        self.is_finished[row] = is_finished

    def finish(self, row: int) -> None:
        """End a sequence: it stands still from the next step on."""
        self.is_finished[row] = True

    def admit(self, row: int, sequence: int, prompt: list[int]) -> tuple[Tensor, Random]:
        """Run the prompt of another sequence into a row whose own has finished.

        Returns:
            float[1, vocab] logits of its first token, and the random numbers of that.
        """
        assert isinstance(self.run, Slotted), "the session looked"
        try:
            self.run.admit(row, prompt)
        except Exception as problem:
            self._retire(problem)
        length = torch.tensor([len(prompt)], device=self.pending.device)
        logits = self.lm.prefill_row(self.state, row, torch.tensor([prompt]))
        self.rng.sequences[row] = sequence  # in place: the drafter's numbers are keyed by the same tensor
        return logits, Random(self.rng.seed, self.rng.sequences[row : row + 1], length)

    def _launch(self, growth: Growth | None, budget: int) -> _Done:
        """Replay the step where it can be captured, the part behind the draft where only that can, else launch all."""
        graphs = self.graphs
        if graphs is None:
            return self._whole(growth, budget)
        clock = StepClock(self.pending.device)
        if isinstance(self.run, Capturable):
            num_calls = self._settle(budget)
            clock.lap("draft_s")
            return self._launch_whole(graphs, growth, budget, num_calls, clock)
        draft = self._propose(growth, budget)
        clock.lap("draft_s")
        return self._launch_target(graphs, draft, clock)

    def _settle(self, budget: int) -> int:
        """Let the drafter do what only this step needs; give the draft calls it took."""
        assert isinstance(self.run, Capturable), "the caller looked"
        try:
            return self.run.settle(budget)
        except Exception as problem:
            self._retire(problem)
            return 0

    def _launch_whole(
        self, graphs: Graphs, growth: Growth | None, budget: int, num_calls: int, clock: StepClock
    ) -> _Done:
        """Replay a step, drafting included."""
        run = self.run
        assert isinstance(run, Capturable), "the caller looked"
        self._forget_replaced(graphs, run)
        work = partial(self._whole, growth, budget)
        done, is_replayed = self._replayed(graphs, f"budget {budget}, {growth!r}", work)
        if is_replayed:
            run.replayed(budget)
        draft = replace(done.draft, num_calls=done.draft.num_calls + num_calls)
        return replace(done, draft=draft, clock=Clocks([clock, done.clock]))

    def _forget_replaced(self, graphs: Graphs, run: Capturable) -> None:
        """Drop the graphs where a run's tensors were replaced, or the run itself was."""
        version = run, run.version
        if version != self._version:
            graphs.clear()
            self._version = version

    def _replayed_part(self, graphs: Graphs, part: Capturable, key: str, work: Callable[[], Any]) -> tuple[Any, bool]:
        """Do what a part of the run does on the device; see `stree.drafters.Composed`."""
        self._forget_replaced(graphs, part)
        return graphs.run(key, work, part.give_up, lasts=True)  # it is observed after the target's part

    def _whole(self, growth: Growth | None, budget: int) -> _Done:
        """Draft and do what follows."""
        clock = StepClock(self.pending.device)
        draft = self._propose(growth, budget)
        clock.lap("draft_s")
        return self._after(draft, clock)

    def _propose(self, growth: Growth | None, budget: int) -> Draft:
        """Let the drafter propose; one that fails is replaced by none, and the text goes on."""
        try:
            return self.run.propose(self.pending, growth, budget)
        except Exception as problem:
            self._retire(problem)
            return self.run.propose(self.pending, None, 1)

    def _observe(self, found: Acceptance) -> None:
        """Tell the drafter, likewise."""
        try:
            self.run.observe(found)
        except Exception as problem:
            self._retire(problem)

    def _retire(self, problem: Exception) -> None:
        """Go on without the drafter; in a capture it is the capture that failed."""
        if self.graphs is not None and self.graphs.is_capturing:
            raise problem
        logger.warning("the drafter failed, decoding goes on without it: %s: %s", type(problem).__name__, problem)
        self.problem = problem
        if self.graphs is not None:
            self.graphs.clear()
        self.run = NoDrafter().start(self.lm.vocab_size, [], self.rng)

    def _after(self, draft: Draft, clock: StepClock) -> _Done:
        """Verify a draft, commit what is accepted and tell the drafter."""
        done = self._target(draft, clock)
        report = self._emit(draft.tree, done.found)
        clock.lap("accept_s")
        self._observe(done.found)
        clock.lap("draft_s")
        return replace(done, report=report)

    def _target(self, draft: Draft, clock: StepClock) -> _Done:
        """Do the target's part: verify, accept, commit."""
        logits = self.lm.verify(self.state, draft.tree)
        clock.lap("verify_s")
        rng = self.rng.at(self.state.lengths)
        found = accept(draft.tree, logits, self.sampling, rng, draft.probs, self.verifier, draft.max_depth)
        found = replace(found, path_lengths=found.path_lengths.masked_fill(self.is_finished, 0))
        clock.lap("accept_s")
        self.lm.commit(self.state, found.path, found.path_lengths)
        clock.lap("commit_s")
        return _Done(draft, found, logits, found.path, clock)

    def _launch_target(self, graphs: Graphs, draft: Draft, clock: StepClock) -> _Done:
        """Bring a tree that the host has made to a captured verification."""
        n = draft.tree.tokens.shape[1]
        size = min(_bucket(n), self.state.max_nodes)
        tree = self._tree(size)
        tree.tokens.zero_()[:, :n] = draft.tree.tokens
        tree.parents.fill_(-1)[:, :n] = draft.tree.parents
        dists, depth, key = None, size - 1, f"{size} nodes"
        if draft.probs is not None and self.verifier != "match":  # which asks for none
            dists, depth = self._brought(graphs, draft.probs, size), min(_bucket(draft.max_depth), size - 1)
            key = f"{size} nodes to depth {depth}, distributions {dists.probs.dtype}"
        done, _ = self._replayed(graphs, key, partial(self._verified, size, dists, depth))
        told = StepClock(self.pending.device)
        self._observe(done.found)
        told.lap("draft_s")
        return replace(done, draft=draft, clock=Clocks([clock, done.clock, told]))

    def _verified(self, size: int, dists: DraftProbs | None, max_depth: int) -> _Done:
        """Do the target's part for a tree that was brought."""
        known = self._tree(size)
        clock = StepClock(self.pending.device)
        draft = Draft(TokenTree.unchecked(known.tokens, known.parents), dists, max_depth)
        done = self._target(draft, clock)
        report = self._emit(draft.tree, done.found)
        clock.lap("accept_s")
        return replace(done, report=report)

    def _replayed(self, graphs: Graphs, key: str, work: Callable[[], _Done]) -> tuple[_Done, bool]:
        """Do captured work, timed as a whole; its parts are timed the first time only."""
        clock = StepClock(self.pending.device)
        done, is_replayed = graphs.run(key, work, self._give_up)
        if not is_replayed:
            return done, False
        clock.lap("")
        if key not in self._shares:
            if self.pending.device.type == "cuda":
                torch.cuda.synchronize(self.pending.device)
            parts = done.clock.seconds()
            whole = max(sum(time_s for _, time_s in parts), 1e-12)
            self._shares[key] = [(part, time_s / whole) for part, time_s in parts]
        return replace(done, clock=ReplayClock(clock, self._shares[key])), True

    def _give_up(self) -> None:
        """Forget a capture that failed: nothing of it has run."""
        self.state.is_inconsistent = False
        if isinstance(self.run, Capturable):
            self.run.give_up()

    def _emit(self, tree: TokenTree, found: Acceptance) -> Tensor:
        """Write down what the step emits: see `stree.kernels.step.bookkeeping.emit`."""
        texts = Texts(self.pending, self.num_new, self.limit, self.is_finished, self._stop)
        return emit(tree.tokens, found.path, found.path_lengths, found.next_token, texts)

    def _tree(self, size: int) -> TokenTree:
        """Give the tokens and parents that captured verifications of so many nodes read, made once."""
        if size not in self._trees:
            tokens = self.pending.new_zeros(len(self.pending), size)
            self._trees[size] = TokenTree.unchecked(tokens, torch.full_like(tokens, -1, dtype=torch.int32))
        return self._trees[size]

    def _brought(self, graphs: Graphs, dists: DraftProbs, size: int) -> DraftProbs:
        """Bring distributions to where captured verifications of so many nodes read them.

        All sizes share the room of the distributions themselves.  It is made for as many as there ever were; whatever
        was captured with a smaller one is captured anew.
        """
        (batch, rows, vocab), n, dtype = dists.probs.shape, dists.row.shape[1], dists.probs.dtype
        room = self._probs_rooms.get(dtype)
        if room is None or rows > room.shape[1]:
            room = self._probs_rooms[dtype] = dists.probs.new_zeros(batch, _bucket(rows), vocab)
            graphs.clear()
        if size not in self._probs_rows:
            row = torch.zeros(batch, size, dtype=torch.int32, device=dists.row.device)
            self._probs_rows[size] = row, torch.zeros_like(row, dtype=torch.int8)
        row, kind = self._probs_rows[size]
        room[:, :rows] = dists.probs
        row.zero_()[:, :n] = dists.row
        kind.fill_(DELTA)[:, :n] = dists.kind
        return DraftProbs(room, row, kind)


def _bucket(count: int) -> int:
    """StepResult a count up, so that few sizes serve all."""
    return next((size for size in BUCKETS if size >= count), count)


def _to_host(tensor: Tensor) -> Tensor:
    """Start to bring a tensor to the host; it is there once what was launched before has ended."""
    if host_can_read(tensor):
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def _on_host(draft: Draft) -> Draft:
    """Bring what a controller asks of a draft to the host: its shape and values."""
    tree = draft.tree
    if host_can_read(tree.tokens):
        return draft
    tensors = [_to_host(tensor) for tensor in (tree.tokens, tree.parents, tree.depths, tree.ancestor_mask)]
    values = None if draft.values is None else _to_host(draft.values)
    return replace(draft, tree=TokenTree.unchecked(*tensors), values=values)


def _found_on_host(found: Acceptance) -> Acceptance:
    """Bring the accepted paths to the host."""
    return replace(found, path=_to_host(found.path), path_lengths=_to_host(found.path_lengths))
