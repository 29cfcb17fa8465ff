"""The texts of a generation on the host: prompts, new tokens, and why each has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stree.decode.request import Observer, Request, Streamer

__all__ = ["Sequence", "Sequences"]


@dataclass(slots=True, eq=False)
class Sequence:
    """The text of one request.

    Attributes:
        request: what was asked for.
        new: its new tokens.
        reason: why it has ended, or None: "stop", "length", "cancelled", or why it was refused.
        is_ending: whether it was cancelled while a step was running that was not read yet.
    """

    request: Request
    new: list[int] = field(default_factory=list)
    reason: str | None = None
    is_ending: bool = False

    @property
    def tokens(self) -> list[int]:
        """Prompt and new tokens."""
        return self.request.prompt + self.new


class Sequences:
    """The sequences of a batch, in the order of their requests; every row of the batch holds one of them at a time.

    Args:
        streamer: receives the tokens, or None.
        observer: observes every token, and may end a sequence, or None.
        cancelled: asked by a request's ``sequence`` whether that one shall end, or None.

    Attributes:
        all: the sequences, refused ones included.
        observer: observes every token, or None.
        rows: the sequence that each row of the batch holds; one that has ended where the row is free.
    """

    def __init__(
        self,
        streamer: Streamer | None = None,
        observer: Observer | None = None,
        cancelled: Callable[[int], bool] | None = None,
    ) -> None:
        self.all: list[Sequence] = []
        self.rows: list[Sequence] = []
        self.observer, self._streamer, self._cancelled = observer, streamer, cancelled

    @property
    def num_new_tokens(self) -> int:
        """Tokens emitted so far."""
        return sum(len(sequence.new) for sequence in self.all)

    @property
    def is_running(self) -> bool:
        """Whether a sequence has not ended."""
        return any(sequence.reason is None for sequence in self.rows)

    def add(self, request: Request) -> Sequence:
        """Append the sequence of a request; one that cannot be run has ended already."""
        self.all.append(Sequence(request, reason=request.problem))
        return self.all[-1]

    def begin(self, sequence: Sequence, row: int) -> None:
        """Place a sequence in a row of the batch."""
        self.rows[row] = sequence
        if self._streamer is not None:
            self._streamer.put(torch.tensor(sequence.request.prompt))

    def free_row(self) -> int | None:
        """Return a row whose sequence has ended, or None."""
        return next((row for row, sequence in enumerate(self.rows) if sequence.reason is not None), None)

    def append(self, row: int, tokens: list[int], logits: Tensor) -> bool:
        """Append tokens of a row, cut at its end, to its text; token i was drawn from logits[i].

        Returns:
            Whether the sequence was ended by the host, which the device does not know yet.
        """
        sequence, is_ended = self.rows[row], False
        if sequence.is_ending:  # the step was launched before the sequence was cancelled
            self._end(sequence, "cancelled")
        if sequence.reason is not None or not tokens:
            return False
        request = sequence.request
        if self.observer is not None:
            end = self.observer.observe(request.sequence, tokens, logits[: len(tokens)])
            is_ended = end is not None
            tokens = tokens[:end]
        sequence.new += tokens
        if self._streamer is not None:
            self._streamer.put(torch.tensor(tokens))
        if is_ended or tokens[-1] in request.stop_token_ids:
            self._end(sequence, "stop")
        elif len(sequence.new) >= request.max_new_tokens:
            self._end(sequence, "length")
        return is_ended

    def cancel(self, *, is_pipelined: bool) -> list[int]:
        """Ask which sequences are cancelled; return their rows.

        Where steps are pipelined, a sequence ends only when the step that is running has been read.
        """
        if self._cancelled is None:
            return []
        rows = []
        for row, sequence in enumerate(self.rows):
            is_active = sequence.reason is None and not sequence.is_ending
            if is_active and self._cancelled(sequence.request.sequence):
                rows.append(row)
                sequence.is_ending = is_pipelined
                if not is_pipelined:
                    self._end(sequence, "cancelled")
        return rows

    def _end(self, sequence: Sequence, reason: str) -> None:
        sequence.reason = reason
        if self._streamer is not None:
            self._streamer.end()
