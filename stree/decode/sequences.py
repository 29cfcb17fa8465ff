"""The texts of a generation on the host: prompts, new tokens, and why each has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stree.decode.grammar import GrammarEnd
from stree.decode.logprobs import TokenLogprob, read_logprobs
from stree.decode.request import Observer, Request
from stree.decode.step_records import AcceptedCounts, StepRecord, step_record
from stree.decode.step_result import StepResult, Wanted

__all__ = ["Sequences", "Text"]


@dataclass(slots=True, eq=False)
class Text:
    """The text of one request.

    Attributes:
        request: what was asked for.
        new: its new tokens.
        logprobs: their log probabilities, where the request wants them.
        reason: why it has ended, or None: "stop", "length", "cancelled", or why it was refused or cannot go on.
        error: what keeps it from going on, or None.
        observers: observe every token, and may end it.
        counts: of its steps.
        steps: what happened in them, where the request wants it.
    """

    request: Request
    new: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str | None = None
    error: Exception | None = None
    observers: list[Observer] = field(default_factory=list)
    counts: AcceptedCounts = field(default_factory=AcceptedCounts)
    steps: list[StepRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.request.stop_strings is not None:
            self.observers.append(self.request.stop_strings.match(self.request.prompt))
        if self.request.grammar is not None:
            self.observers.append(GrammarEnd(self.request.grammar))
        if self.request.observer is not None:
            self.observers.append(self.request.observer)

    @property
    def tokens(self) -> list[int]:
        """Prompt and new tokens."""
        return self.request.prompt + self.new

    def record(self, result: StepResult, row: int, committed: int, seconds: Mapping[str, float]) -> None:
        """Record a step in which the text's row has committed so many nodes, 0 if it was inactive."""
        if committed:
            self.counts.add(committed - 1)
            if self.request.return_steps:
                self.steps.append(step_record(result, row, committed, seconds))

    def append(self, tokens: list[int], logits: Tensor | None, logprobs: list[list[float]] | None) -> bool:
        """Append the tokens of a step, cut where an observer ends the text; a text that has ended takes none.

        Args:
            tokens: that the device has emitted, none beyond a stop token or the limit.
            logits: float[m, vocab], of which row i gave token i; or None, see ``Sequences.wanted``.
            logprobs: what ``token_logprobs`` has packed; or None, likewise.

        Returns:
            Whether the text has ended by them.
        """
        if self.reason is not None or not tokens:
            return False
        request, is_stopped = self.request, False
        for observer in self.observers:
            end = observer.observe(
                tokens, logits[: len(tokens)] if observer.needs_logits and logits is not None else None
            )
            is_stopped |= end is not None
            tokens = tokens[:end]
            if isinstance(observer, GrammarEnd):
                self.error = observer.problem
            if not tokens:  # the first of them was drawn where the grammar could not be followed
                break
        self.new += tokens
        if request.logprobs is not None and logprobs is not None:
            self.logprobs += read_logprobs(logprobs[: len(tokens)], request.logprobs)
        if request.streamer is not None and tokens:
            request.streamer.put(torch.tensor(tokens))
        if self.error is not None:
            self.fail(self.error)
        elif is_stopped or tokens[-1] in request.stop_token_ids:
            self.end("stop")
        elif len(self.new) >= request.max_new_tokens:
            self.end("length")
        return self.reason is not None

    def fail(self, error: Exception) -> None:
        """End the text by an error, unless it has ended."""
        if self.reason is None:
            self.error = error
            self.end(f"error: {error}")

    def end(self, reason: str) -> None:
        """End the text."""
        self.reason = reason
        if self.request.streamer is not None:
            self.request.streamer.end()


class Sequences:
    """The sequences of a batch, in the order of their requests; every row of the batch holds one of them at a time.

    Args:
        cancelled: asked whether the sequence of a request shall end, or None.
        counts_nodes: whether the nodes of each sequence's trees are read.

    Attributes:
        all: the sequences, refused ones included.
        rows: the sequence that each row of the batch holds; one that has ended where the row is free.
    """

    def __init__(self, cancelled: Callable[[Request], bool] | None = None, *, counts_nodes: bool = False) -> None:
        self.all: list[Text] = []
        self.rows: list[Text] = []
        self._cancelled, self._counts_nodes = cancelled, counts_nodes

    @property
    def num_new_tokens(self) -> int:
        """Tokens emitted so far."""
        return sum(len(sequence.new) for sequence in self.all)

    @property
    def is_running(self) -> bool:
        """Whether a sequence has not ended."""
        return any(sequence.reason is None for sequence in self.rows)

    @property
    def is_plain(self) -> bool:
        """Whether every sequence that has not ended has a budget of one node."""
        return all(sequence.request.budget == 1 for sequence in self.rows if sequence.reason is None)

    @property
    def wanted(self) -> Wanted:
        """What the sequences that have not ended read of a step beside its tokens."""
        running = [sequence for sequence in self.rows if sequence.reason is None]
        counts = (sequence.request.logprobs for sequence in running)
        return Wanted(
            logits=any(observer.needs_logits for sequence in running for observer in sequence.observers),
            top_logprobs=max((count for count in counts if count is not None), default=None),
            trees=any(sequence.request.return_steps for sequence in running),
            row_nodes=self._counts_nodes,
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

    def cancel(self, problems: Mapping[int, Exception]) -> list[int]:
        """End the sequences that are cancelled, and those of rows that cannot go on; return their rows."""
        rows = []
        for row, sequence in enumerate(self.rows):
            if sequence.reason is not None:
                continue
            if row in problems:
                sequence.fail(problems[row])
            elif self._cancelled is not None and self._cancelled(sequence.request):
                sequence.end("cancelled")
            else:
                continue
            rows.append(row)
        return rows

    def cancel_all(self) -> None:
        """End every sequence that has not ended."""
        for sequence in self.rows:
            if sequence.reason is None:
                sequence.end("cancelled")
