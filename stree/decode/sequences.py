"""The texts of a generation on the host: prompts, new tokens, and why each has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

import torch
from torch import Tensor

from stree.decode.request import Request, Slots

__all__ = ["Sequences"]


class Sequences:
    """Sequences in the order of their prompts; every row of the batch holds one of them at a time.

    Args:
        slots: prompts.
        request: stop tokens, limits, streamer and observer.

    Attributes:
        prompts: of the sequences that were begun.
        new: their new tokens.
        reasons: why they have ended, or None.
        rows: the sequence that each row of the batch holds.
    """

    def __init__(self, slots: Slots, request: Request) -> None:
        self.prompts: list[list[int]] = []
        self.new: list[list[int]] = []
        self.reasons: list[str | None] = []
        self.rows: list[int] = []
        self.stop = frozenset(request.stop_token_ids or ())
        self._max_new_tokens = request.max_new_tokens
        self._streamer, self._observer, self._cancelled = request.streamer, request.observer, request.cancelled
        self._queue = iter(slots.prompts)
        self._ending: set[int] = set()  # cancelled, with a step that was not read yet

    @property
    def num_new_tokens(self) -> int:
        """Tokens emitted so far."""
        return sum(map(len, self.new))

    @property
    def is_running(self) -> bool:
        """Whether a sequence has not ended."""
        return None in self.reasons

    def next_prompt(self) -> Sequence[int]:
        """Look at the next prompt without taking it; a single token where it cannot be run."""
        first = list(islice(self._queue, 1))
        self._queue = chain(first, self._queue)
        return next((prompt for prompt, problem in first if problem is None), [0])

    def take(self, row: int | None = None) -> Iterator[list[int]]:
        """Take prompts that can be run from the queue, each into a new row or into ``row``."""
        for prompt, problem in self._queue:
            self.prompts.append(prompt)
            self.new.append([])
            self.reasons.append(problem)
            if problem is None:
                sequence = len(self.prompts) - 1
                if row is None:
                    self.rows.append(sequence)
                else:
                    self.rows[row] = sequence
                yield prompt

    def has_ended(self, row: int) -> bool:
        """Whether the sequence of a row has ended."""
        return self.reasons[self.rows[row]] is not None

    def append(self, row: int, tokens: list[int], logits: Tensor) -> bool:
        """Append tokens of a row, cut at its end, to its text; token i was drawn from logits[i].

        Returns:
            Whether the sequence was ended by the host, which the device does not know yet.
        """
        sequence, is_ended = self.rows[row], False
        if sequence in self._ending:  # the step was launched before the sequence was cancelled
            self._end_cancelled(sequence)
        if self.reasons[sequence] is not None or not tokens:
            return False
        if self._observer is not None:
            end = self._observer.observe(sequence, tokens, logits[: len(tokens)])
            is_ended = end is not None
            tokens = tokens[:end]
        self.new[sequence] += tokens
        if is_ended or tokens[-1] in self.stop:
            self.reasons[sequence] = "stop"
        elif len(self.new[sequence]) >= self._max_new_tokens:
            self.reasons[sequence] = "length"
        if self._streamer is not None:
            self._streamer.put(torch.tensor(tokens))
            if self.reasons[sequence] is not None:
                self._streamer.end()
        return is_ended

    def cancel(self, *, is_pipelined: bool) -> list[int]:
        """Ask which sequences are cancelled; return their rows.

        Where steps are pipelined, a sequence ends only when the step that is running has been read.
        """
        if self._cancelled is None:
            return []
        rows = []
        for row, sequence in enumerate(self.rows):
            if self.reasons[sequence] is None and sequence not in self._ending and self._cancelled(sequence):
                rows.append(row)
                self._ending.add(sequence)
                if not is_pipelined:
                    self._end_cancelled(sequence)
        return rows

    def _end_cancelled(self, sequence: int) -> None:
        self._ending.discard(sequence)
        self.reasons[sequence] = "cancelled"
        if self._streamer is not None:
            self._streamer.end()
