"""What ``Engine.submit`` returns: the tokens of one request as they are emitted, in threads and in coroutines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stree.checks import NotCopied
from stree.decode.failures import GenerationError
from stree.decode.logprobs import PromptLogprob, TokenLogprob, prompt_logprobs
from stree.decode.request import Request
from stree.decode.sequences import Text
from stree.decode.stats import Generation
from stree.decode.step_records import AcceptedCounts, StepRecord
from stree.models.loading import reason_of
from stree.models.prefix_cache import RequestPrefixes
from stree.serving.totals import Totals

__all__ = ["EmittedStep", "QueueFull", "RequestHandle"]


class QueueFull(RuntimeError):
    """As many requests wait as ``max_queue`` allows."""


@dataclass(frozen=True, slots=True)
class EmittedStep:
    """What one step has emitted for a request.

    Attributes:
        tokens: at least one; the first step of a request has the token after its prompt.
        logprobs: of the tokens, where the request wants them, as in ``generate``.
        tree: of the step, without probabilities, where the request wants trees; None for the first one.
    """

    tokens: list[int]
    logprobs: list[TokenLogprob] | None
    tree: StepRecord | None


class RequestHandle(NotCopied):
    """One request: iterate over its tokens, or over ``steps()``, or over its steps in a coroutine by ``async for``.

    Iterating from several places gives every one all tokens.  If decoding fails, iterating ends with the error.

    Args:
        totals: count its tokens and its end.
        prefixes: states that it starts from, and keeps.

    Attributes:
        prompt_logprobs: of the prompt's tokens but the first, where they are wanted, once there is a new token.
        finish_reason: "stop", "length", "cancelled" or "error"; None while it waits or runs.
        drafting_problem: why its text was decoded on without the drafter, or None; known at its end.
    """

    def __init__(self, totals: Totals, prefixes: RequestPrefixes) -> None:
        self.finish_reason: str | None = None
        self.drafting_problem: str | None = None
        self._totals, self.prefixes = totals, prefixes
        self.sequence: Text | None = None  # what follows belongs to the engine's thread
        self.is_cancelled = False
        self.num_cached = self.num_new = self.drafted = self.accepted = 0
        self._request: Request | None = None
        self._top: int | None = None
        self.prompt_logprobs = list[PromptLogprob]()
        self._steps: list[EmittedStep] = []
        self._step: tuple[int, int] | None = None  # nodes that the next tokens' step has drafted and accepted
        self._put_s = 0.0  # time of the tokens before
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._listeners: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._times = {"submitted": time.perf_counter()}

    def steps(self) -> Iterator[EmittedStep]:
        """Wait for every step and yield it.

        Raises:
            GenerationError: decoding failed; its output has what was generated.
        """
        place = 0
        while True:
            with self._changed:
                while len(self._steps) == place and self.finish_reason is None:
                    self._changed.wait()
                new = self._steps[place:]
            if not new:
                return self._raise_error()
            place += len(new)
            yield from new

    async def __aiter__(self) -> AsyncIterator[EmittedStep]:
        """Yield the steps as ``steps`` does, without blocking the event loop."""
        async for new in self.new_steps():
            for step in new:
                yield step

    async def new_steps(self, apart_s: float = 0.0) -> AsyncIterator[list[EmittedStep]]:
        """Yield the steps since the last time, at least one, and at least so many seconds after it."""
        listener = asyncio.get_running_loop(), asyncio.Event()
        with self._changed:
            self._listeners.add(listener)
        try:
            place, earliest = 0, 0.0
            while True:
                listener[1].clear()
                is_ended, new = self.finish_reason is not None, self._steps[place:]
                place += len(new)
                if new:
                    earliest = time.perf_counter() + apart_s
                    yield new
                if is_ended:
                    break
                await listener[1].wait()
                if (early_s := earliest - time.perf_counter()) > 0:
                    await asyncio.sleep(early_s)
        finally:
            with self._changed:
                self._listeners.discard(listener)
        self._raise_error()

    def __iter__(self) -> Iterator[int]:
        """Wait for every token and yield it."""
        return (token for step in self.steps() for token in step.tokens)

    def cancel(self) -> None:
        """End the request after the step that runs, from any thread; nothing happens if it has ended."""
        self.is_cancelled = True

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the end, and return the text as ``generate`` does.

        Raises:
            TimeoutError: it has not ended after so many seconds.
            GenerationError: decoding failed; its output has what was generated.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.finish_reason is not None, timeout):
                raise TimeoutError(f"the request has not ended after {timeout} s")
        self._raise_error()
        return self._output()

    @property
    def prompt(self) -> list[int]:
        """Tokens before the new ones."""
        return [] if self._request is None else self._request.prompt

    @property
    def tokens(self) -> list[int]:
        """New tokens so far."""
        return [token for step in self._steps for token in step.tokens]

    @property
    def counts(self) -> AcceptedCounts:
        """Its steps so far, by the drafted nodes that they accepted."""
        return AcceptedCounts() if self.sequence is None else self.sequence.counts

    @property
    def stats(self) -> dict[str, Any]:
        """Counts and seconds, JSON-able; seconds of what has not happened yet are None."""
        submitted = self._times["submitted"]
        seconds = {
            name: self._times[event] - submitted if event in self._times else None
            for name, event in (("queue_s", "started"), ("first_token_s", "first"), ("total_s", "ended"))
        }
        counts = {**self.counts.report(), "drafted": self.drafted, "accepted": self.accepted}
        return {
            "num_prompt_tokens": len(self.prompt), "num_cached_tokens": self.num_cached,
            "num_new_tokens": self.num_new, **counts, **seconds, "drafting_problem": self.drafting_problem,
        }  # fmt: skip

    # The engine's thread calls what follows.  ``put`` makes a handle the streamer of its request.

    def start(self, request: Request, top: int | None) -> None:
        """Note what was asked for, and how many alternatives to the tokens of the prompt; None for none of these."""
        self._request, self._top = request, top

    @property
    def reads_prompt(self) -> Callable[[Tensor, Tensor], None] | None:
        """What reads the logits of the prompt, from its beginning, where log probabilities of it are wanted."""
        if (top := self._top) is None:
            return None
        found = self.prompt_logprobs = list[PromptLogprob]()
        return lambda logits, tokens: found.extend(prompt_logprobs(logits, tokens, top))

    def note(self, event: str) -> None:
        """Note the time of an event, once."""
        self._times.setdefault(event, time.perf_counter())

    def record(self, num_nodes: int, num_accepted: int) -> None:
        """Note a step whose tokens come next, of a tree of so many nodes."""
        self._step = num_nodes - 1, num_accepted

    def put(self, value: Tensor) -> None:
        """Take the prompt first, which is known, and then the tokens of every step."""
        assert self.sequence is not None, "a sequence is in a row"
        if not self.sequence.new:
            return
        self.note("first")
        tokens = value.tolist()
        self._count(len(tokens))
        logprobs = self.sequence.logprobs[-len(tokens) :] if self.sequence.request.logprobs is not None else None
        self._notify(EmittedStep(tokens, logprobs, self.sequence.steps[-1] if self.sequence.steps else None))

    def _count(self, new: int) -> None:
        """Count the tokens of a step; an accepted one beyond the limit or a stop is none of the text's."""
        now = time.perf_counter()
        gap_s = now - self._put_s if self._put_s else None
        steps = self._step is not None
        drafted, accepted = self._step or (0, 0)
        accepted = min(accepted, new)
        self.num_new += new
        self.drafted += drafted
        self.accepted += accepted
        self._step, self._put_s = None, now
        first_s = self._times["first"] - self._times["submitted"]
        self._totals.tokens(first_s, new, steps=steps, drafted=drafted, accepted=accepted, gap_s=gap_s)

    def end(self) -> None:
        """Do nothing: the engine calls ``finish`` when the sequence has left its row."""

    def finish(self, reason: str, error: BaseException | None = None, drafting_problem: str | None = None) -> None:
        """End the request, unless it has ended, by an error where there is one."""
        if self.finish_reason is None:
            self.note("ended")
            self._error, self.drafting_problem, reason = error, drafting_problem, "error" if error else reason
            self._totals.end(self.stats, reason)
            self._notify(None, reason)

    def _notify(self, step: EmittedStep | None, reason: str | None = None) -> None:
        with self._changed:
            if step is not None:
                self._steps.append(step)
            self.finish_reason = reason
            self._changed.notify_all()
            for loop, event in self._listeners:
                if not event.is_set() and not loop.is_closed():  # else it has not looked since the step before
                    loop.call_soon_threadsafe(event.set)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise GenerationError(f"the request failed: {reason_of(self._error)}", self._output()) from self._error

    def _output(self) -> Generation:
        assert self._request is not None
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = [[one for step in self._steps for one in step.logprobs or ()]]
        stats, steps = {**self.stats, "finish_reasons": [self.finish_reason]}, None
        if self.sequence is not None and self._request.return_steps:
            steps = [[*self.sequence.steps]]
        return Generation([self._request.prompt + self.tokens], stats, logprobs, [self.tokens], steps)
