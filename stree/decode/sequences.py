"""The texts of a generation on the host: prompts, new tokens, and why each has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stree.decode.logprobs import TokenLogprob, read_logprobs
from stree.decode.request import Observer, Request
from stree.decode.step_result import Wanted

__all__ = ["Sequences", "Text"]


@dataclass(slots=True, eq=False)
class Text:
    """The text of one request.

    Attributes:
        request: what was asked for.
        new: its new tokens.
        logprobs: their log probabilities, where the request wants them.
        reason: why it has ended, or None: "stop", "length", "cancelled", or why it was refused.
        ending: why the host ends it once the step that was running by then has been read, or None.
        observers: observe every token, and may end it.
    """

    request: Request
    new: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str | None = None
    ending: str | None = None
    observers: list[Observer] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.request.stop_strings is not None:
            self.observers.append(self.request.stop_strings.match(self.request.prompt))
        if self.request.observer is not None:
            self.observers.append(self.request.observer)

    @property
    def tokens(self) -> list[int]:
        """Prompt and new tokens."""
        return self.request.prompt + self.new


class Sequences:
    """The sequences of a batch, in the order of their requests; every row of the batch holds one of them at a time.

    Args:
        cancelled: asked whether the sequence of a request shall end, or None.

    Attributes:
        all: the sequences, refused ones included.
        rows: the sequence that each row of the batch holds; one that has ended where the row is free.
    """

    def __init__(self, cancelled: Callable[[Request], bool] | None = None) -> None:
        self.all: list[Text] = []
        self.rows: list[Text] = []
        self._cancelled = cancelled

    @property
    def num_new_tokens(self) -> int:
        """Tokens emitted so far."""
        return sum(len(sequence.new) for sequence in self.all)

    @property
    def is_running(self) -> bool:
        """Whether a sequence has not ended."""
        return any(sequence.reason is None for sequence in self.rows)

    @property
    def wanted(self) -> Wanted:
        """What the sequences that have not ended read of a step beside its tokens."""
        running = [sequence for sequence in self.rows if sequence.reason is None]
        counts = (sequence.request.logprobs for sequence in running)
        return Wanted(
            logits=any(observer.needs_logits for sequence in running for observer in sequence.observers),
            top_logprobs=max((count for count in counts if count is not None), default=None),
            trees=any(sequence.request.needs_trees for sequence in running),
        )

    def add(self, request: Request) -> Text:
        """Append the sequence of a request; one that cannot be run has ended already."""
        self.all.append(Text(request, reason=request.problem))
        return self.all[-1]

    def begin(self, sequence: Text, row: int) -> None:
        """Place a sequence in a row of the batch."""
        self.rows[row] = sequence
        if sequence.request.streamer is not None:
            sequence.request.streamer.put(torch.tensor(sequence.request.prompt))

    def free_row(self) -> int | None:
        """Return a row whose sequence has ended, or None."""
        return next((row for row, sequence in enumerate(self.rows) if sequence.reason is not None), None)

    def append(
        self, row: int, tokens: list[int], logits: Tensor | None, logprobs: list[list[float]] | None, *, is_late: bool
    ) -> bool:
        """Append tokens of a row, cut at its end, to its text.

        Args:
            row: of the batch.
            tokens: that the device has emitted.
            logits: float[m, vocab], of which row i gave token i; or None, see ``wanted``.
            logprobs: what ``token_logprobs`` has packed; or None, see ``wanted``.
            is_late: whether the next step is running already; a sequence that the host ends then ends after it.

        Returns:
            Whether the sequence was ended by the host, which the device does not know yet.
        """
        sequence = self.rows[row]
        if sequence.ending is not None and sequence.reason is None:  # this step was launched before that was known
            self._end(sequence, sequence.ending)
        if sequence.reason is not None or not tokens:
            return False
        request, is_ended = sequence.request, False
        for observer in sequence.observers:
            end = observer.observe(
                tokens, logits[: len(tokens)] if observer.needs_logits and logits is not None else None
            )
            is_ended |= end is not None
            tokens = tokens[:end]
        sequence.new += tokens
        if request.logprobs is not None and logprobs is not None:
            sequence.logprobs += read_logprobs(logprobs[: len(tokens)], request.logprobs)
        if request.streamer is not None:
            request.streamer.put(torch.tensor(tokens))
        if is_ended and is_late:
            sequence.ending = "stop"
        elif is_ended or tokens[-1] in request.stop_token_ids:
            self._end(sequence, "stop")
        elif len(sequence.new) >= request.max_new_tokens:
            self._end(sequence, "length")
        return is_ended

    def cancel(self, *, is_late: bool) -> list[int]:
        """Ask which sequences are cancelled; return their rows.  ``is_late`` is as for ``append``."""
        if self._cancelled is None:
            return []
        rows = []
        for row, sequence in enumerate(self.rows):
            is_active = sequence.reason is None and sequence.ending is None
            if is_active and self._cancelled(sequence.request):
                rows.append(row)
                if is_late:
                    sequence.ending = "cancelled"
                else:
                    self._end(sequence, "cancelled")
        return rows

    def cancel_all(self) -> None:
        """End every sequence that has not ended."""
        for sequence in self.rows:
            if sequence.reason is None:
                self._end(sequence, "cancelled")

    def _end(self, sequence: Text, reason: str) -> None:
        sequence.reason = reason
        if sequence.request.streamer is not None:
            sequence.request.streamer.end()
