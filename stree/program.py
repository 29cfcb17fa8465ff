"""One step of the loop as device work: draft, verify, accept, commit, and what of it the host is to hear.

Nothing here reads the device.  What a step leaves for the next one stands in tensors that are written in place, stop
tokens and lengths are looked after on the device, and the host reads a step's tokens when it pleases.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stree.drafters import Draft, DraftRun, Slotted
from stree.growth import Growth
from stree.models.state import DecodeState
from stree.models.tree_lm import TreeLM
from stree.sampling import Random, Sampling
from stree.verify import Acceptance, accept

__all__ = ["Program", "Round", "StepClock"]


class StepClock:
    """When the parts of one step ended; on a device the marks are events, so that nobody waits to make one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any]] = []
        self.lap("")

    def lap(self, part: str) -> None:
        """Charge the time since the last mark to a part."""
        if self._device.type != "cuda":
            self._marks.append((part, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((part, event))

    def seconds(self) -> list[tuple[str, float]]:
        """List parts and their times, seconds; on a device, of a step that has ended."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._device.type == "cuda":
            return [(part, 1e-3 * before.elapsed_time(after)) for (_, before), (part, after) in pairs]
        return [(part, after - before) for (_, before), (part, after) in pairs]


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One step that was launched.

    Attributes:
        draft: what was proposed.
        acceptance: what was accepted; path length 0 where a sequence stood still.
        logits: float[batch, n, vocab], of the tree's nodes.
        report: int64[batch, m + 2] on the host: up to m emitted tokens, their number, and the nodes committed.
        arrival: event after which ``report`` may be read, or None where it may be at once.
        clock: when its parts ended.
    """

    draft: Draft
    acceptance: Acceptance
    logits: Tensor
    report: Tensor
    arrival: Any
    clock: StepClock

    def emitted(self) -> tuple[list[list[int]], list[int]]:
        """Wait for the report; give each sequence's new tokens, and the nodes that it committed."""
        if self.arrival is not None:
            self.arrival.synchronize()
        rows = self.report.tolist()
        return [row[: row[-2]] for row in rows], [row[-1] for row in rows]


class Program:
    """The steps of a batch of sequences, from one to the next on the device.

    Args:
        lm: the target.
        state: its state, prefilled.
        run: the drafter's run for the same sequences.
        rng: random numbers; its positions are not used.
        sampling: how the target's tokens are drawn.
        verifier: see ``stree.accept``.
        stop_token_ids: tokens that end a sequence.
        max_new_tokens: most new tokens a sequence.

    Attributes:
        pending: int64[batch], emitted tokens that were not yet run.
        num_new: int64[batch], tokens emitted.
        is_finished: bool[batch], sequences that stand still.
    """

    def __init__(
        self,
        lm: TreeLM,
        state: DecodeState,
        run: DraftRun,
        rng: Random,
        *,
        sampling: Sampling,
        verifier: str,
        stop_token_ids: Iterable[int],
        max_new_tokens: int,
    ) -> None:
        self.lm, self.state, self.run, self.rng = lm, state, run, rng
        self.sampling, self.verifier, self.max_new_tokens = sampling, verifier, max_new_tokens
        self.pending = torch.zeros_like(rng.sequences)
        self.num_new = torch.zeros_like(rng.sequences)
        self.is_finished = torch.zeros_like(rng.sequences, dtype=torch.bool)
        self._stop = torch.tensor(sorted(stop_token_ids), dtype=torch.long, device=rng.sequences.device)
        self._places: dict[int, Tensor] = {}

    def step(self, growth: Growth | None, budget: int) -> Round:
        """Launch a step of at most ``budget`` nodes a sequence."""
        clock = StepClock(self.pending.device)
        draft = self.run.propose(self.pending, growth, budget)
        clock.lap("draft_s")
        logits = self.lm.verify(self.state, draft.tree)
        clock.lap("verify_s")
        rng = self.rng.at(self.state.lengths.long())
        found = accept(draft.tree, logits, self.sampling, rng, draft.laws, self.verifier, draft.max_depth)
        found = replace(found, path_lengths=found.path_lengths.masked_fill(self.is_finished, 0))
        clock.lap("accept_s")
        self.lm.commit(self.state, found.path, found.path_lengths)
        clock.lap("commit_s")
        self.run.observe(found)
        clock.lap("draft_s")
        report = self._emit(draft, found)
        clock.lap("accept_s")
        report, arrival = self._send(report)  # behind the last mark, which has a time once it has arrived
        return Round(draft, found, logits, report, arrival, clock)

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
        self.run.admit(row, prompt)
        length = torch.tensor([len(prompt)], device=self.pending.device)
        single = self.lm.new_state(1, self.state.max_length, self.state.max_nodes)
        logits = self.lm.prefill(single, torch.tensor([prompt]), length)
        self.state.write_row(row, single)
        self.rng.sequences[row] = sequence  # in place: the drafter's numbers are keyed by the same tensor
        return logits, Random(self.rng.seed, self.rng.sequences[row : row + 1], length)

    def _emit(self, draft: Draft, found: Acceptance) -> Tensor:
        """Take the tokens after the path's nodes, up to a stop token or the limit, and make the last one pending."""
        place = self._place(found.path.shape[1])
        length = found.path_lengths.long()[:, None]
        following = found.next_token[:, None]
        tokens = draft.tree.tokens.gather(1, found.path.clamp(min=0).long())
        tokens = torch.where(place == length - 1, following, tokens.roll(-1, 1))
        count = torch.minimum(length, self.max_new_tokens - self.num_new[:, None])
        if len(self._stop):
            ends = (tokens[..., None] == self._stop).any(-1) & (place < count)
            count = torch.minimum(count, torch.where(ends, place + 1, len(place)).amin(1, keepdim=True))
            self.is_finished |= ends.any(1)
        self.num_new += count.squeeze(1)
        self.is_finished |= self.num_new >= self.max_new_tokens
        self.pending.copy_(torch.where(length > 0, following, self.pending[:, None]).squeeze(1))
        return torch.cat([tokens, count, length], 1)

    def _send(self, report: Tensor) -> tuple[Tensor, Any]:
        """Start to bring a tensor to the host; give it and the event of its arrival."""
        if report.device.type != "cuda":
            return report, None
        host = torch.empty(report.shape, dtype=report.dtype, pin_memory=True)
        host.copy_(report, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record(torch.cuda.current_stream(report.device))
        return host, arrival

    def _place(self, count: int) -> Tensor:
        """Give int64[count] = 0, 1, ..., made once."""
        if count not in self._places:
            self._places[count] = torch.arange(count, device=self.pending.device)
        return self._places[count]
