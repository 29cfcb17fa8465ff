"""An engine that decodes requests of different kinds in one batch, which they join and leave between steps."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stree.checks import NotCopied, check_counts, check_flags, check_numbers, check_object
from stree.decode.grammar import Grammar
from stree.decode.memory import check_memory
from stree.decode.request import Request, alternatives
from stree.decode.sequences import Text
from stree.decode.settings import Settings
from stree.decode.step_result import StepResult
from stree.decode.stop_strings import new_text_stops
from stree.decode.token_rules import check_names
from stree.drafters import Drafter
from stree.growth import Growth, sized_growth
from stree.models.prefix_cache import PrefixCache, PromptRun, RequestPrefixes
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling
from stree.serving.handle import QueueFull, RequestHandle
from stree.serving.prefill import default_chunk
from stree.serving.running import RunningBatch, check_stops
from stree.serving.totals import Totals
from stree.verify import Verifier

__all__ = ["Engine"]

logger = logging.getLogger("stree")


class Engine(NotCopied):
    """Decodes requests from any thread, each as ``generate`` alone would decode it.

    In float32 on a CPU, under a number as budget, at temperature 0, and under MATCH, the text of a request depends on
    nothing but the request (near-ties of logits apart); elsewhere only its distribution does.  One thread owns the
    models; on a CPU, load them by ``in_own_thread``.

    Args:
        lm: the target.
        drafter, growth, verifier: as for ``generate``.  Requests fail if the drafter's runs have no ``can_begin``.
        budget: likewise; None for what the growth's name sets, else "auto".
        max_batch: most requests that run at once; others wait.
        max_length: most tokens of a prompt and its new ones.  Memory is bounded by ``max_batch`` times it.
        max_queue: most requests that wait, or None for any number.
        cache_bytes: of the states of earlier texts, whose continuations run new tokens only.  Dropped by
            ``clear_cache`` and after changes of the target (but of weights through their ``data``).
        prefill_chunk: most tokens of a prompt that run between two steps; None for 512, and on CUDA for what fits.
        before_step: called by the engine's thread before every step, or None; its errors end the engine.

    Attributes:
        settings: drafter, growth, budget and verifier.
        problem: why no request is taken any more, or None.
        totals: sums over all requests, and who is told of every step.

    Raises:
        ValueError: an argument outside its range, or states that memory cannot hold.
        TypeError: an object of another kind.
    """

    def __init__(
        self, lm: TreeLM, drafter: Drafter | TreeLM | str | Path | None = None, *, growth: Growth | str | None = None,
        budget: int | str | None = None, verifier: str | Verifier = "auto", max_batch: int = 8, max_length: int = 4096,
        max_queue: int | None = None, cache_bytes: int = 0, prefill_chunk: int | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        check_counts(below=1 << 31, max_batch=max_batch)
        check_counts(max_length=max_length, prefill_chunk=512 if prefill_chunk is None else prefill_chunk)
        check_object("before_step", print if before_step is None else before_step, "__call__", "a function")
        self.lm, self.max_batch, self.max_length, self.max_queue = lm, max_batch, max_length, max_queue
        growth, budget = sized_growth(growth, budget, "auto")
        self.settings = Settings(lm, drafter, growth=growth, budget=budget, verifier=verifier)
        self._drafter = self.settings.drafter
        self._batch = RunningBatch(self.settings, max_batch, max_length, self._is_cancelled, self._record)
        extent = self._batch.extent
        self._chunk = int(prefill_chunk or default_chunk(lm, self._drafter, extent))
        check_memory(lm, self._drafter, replace(extent, chunk=self._chunk))
        self._cache, self._before_step = PrefixCache(cache_bytes), before_step or (lambda: None)
        self._prefill: tuple[RequestHandle, Request, PromptRun] | None = None
        self._waiting: deque[tuple[RequestHandle, Request]] = deque()
        self._handles: dict[Request, RequestHandle] = {}  # of the running sequences
        self.problem: str | None = None
        self._closing: float | None = None  # when the last requests are cancelled
        self.totals, self._changed = Totals(), threading.Condition()
        self._thread = threading.Thread(target=self._run, name="stree engine", daemon=True)
        self._thread.start()

    def submit(
        self, prompt: Sequence[int], *, sampling: Sampling | None = None, max_new_tokens: int = 128, seed: int = 0,
        stop_token_ids: Iterable[int] | None = None, stop_strings: str | Sequence[str] | None = None,
        tokenizer: Any = None, ignore_eos: bool = False, logprobs: bool | int = False, budget: int | None = None,
        grammar: Grammar | None = None, trees: bool = False, cache: bool = True, num_shared: int = 0,
        prompt_logprobs: int | None = None, **rules: Any,
    ) -> RequestHandle:  # fmt: skip
        """Take a request, from any thread; parameters are those of ``generate``.

        Args:
            prompt: token ids.
            sampling: temperature, top-k, top-p, min-p; None for greedy.
            max_new_tokens: most new tokens.
            stop_token_ids: tokens that end the text, at most 64; None for the model's own.
            stop_strings: strings that end it, in its new tokens alone: with the names of special ones, and without.
            tokenizer: which stop strings and grammars need.
            ignore_eos: write on through the model's own stop tokens.
            logprobs: keep each token's log probability, and a number of alternatives.
            seed: of its random numbers.
            budget: most nodes of its trees, at most the engine's; 1 decodes plainly.
            grammar: of its new tokens, or None.
            trees: give the trees of its steps.
            cache: start from the states of earlier texts, and keep its own.
            num_shared: first tokens of the prompt that others have, too, as a system prompt's; their state is kept.
            prompt_logprobs: alternatives to the prompt's tokens, whose log probabilities the handle then has, or None.
            rules: bias, penalties, allowed tokens and bad words, under the names of ``generate``.

        Raises:
            ValueError, TypeError: a parameter outside its range or of another kind; nothing has run.
            QueueFull: too many requests wait.
            RuntimeError: the engine is closed, or its thread has ended by an error or runs in a parent process.
        """
        check_flags(cache=cache, trees=trees)
        num_alternatives = alternatives("prompt_logprobs", self.lm, prompt_logprobs)
        handle = RequestHandle(self.totals, RequestPrefixes(self._cache if cache else PrefixCache(0), num_shared))
        request = Request.of(
            self.lm, sampling=sampling, max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids, budget=budget,
            stop_strings=new_text_stops(tokenizer, stop_strings), ignore_eos=ignore_eos, logprobs=logprobs, seed=seed,
            streamer=handle, grammar=grammar, tokenizer=tokenizer, return_steps=trees, **check_names(rules),
        ).with_prompt(self.lm, prompt, self.max_length)  # fmt: skip
        self.settings.check_request(request)
        check_stops(request)
        handle.start(request, num_alternatives)
        with self._changed:
            if self.problem is not None or not self._thread.is_alive():
                raise RuntimeError(self.problem or "the engine runs in the process that this one was forked from")
            if self.max_queue is not None and self.totals.num_open >= (most := self.max_batch + self.max_queue):
                raise QueueFull(f"{self.totals.num_open} requests run or wait already, of at most {most}")
            self._waiting.append((handle, request))
            self.totals.sums["requests"] += 1
            self._changed.notify_all()
        return handle

    @property
    def stats(self) -> dict[str, int]:
        """Requests that run and wait now, tokens of those that run, and sums over all requests so far, JSON-able."""
        with self._changed:
            begun = self._begun()
            held = sum(len(request.prompt) + handle.num_new for handle, request in begun)
            return {"running": len(begun), "waiting": len(self._waiting), "held_tokens": held, **self.totals.sums}

    def clear_cache(self) -> None:
        """Drop the states of earlier texts, from any thread; of the requests that run now none is kept."""
        self._cache.clear()

    def close(self, grace: float = 0.0, timeout: float | None = None) -> bool:
        """Refuse further requests, let the others end for ``grace`` seconds, cancel the rest, and free all states.

        Returns whether the engine has ended; False where the step that runs takes longer than ``timeout`` seconds.
        """
        check_numbers(grace=grace, timeout=0 if timeout is None else timeout)
        with self._changed:
            self._closing, self.problem = time.monotonic() + grace, self.problem or "the engine is closed"
            self._changed.notify_all()
        self._thread.join(timeout if timeout is None else max(0.0, min(float(timeout), threading.TIMEOUT_MAX)))
        return not self._thread.is_alive()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What follows runs in the engine's thread.
    def _run(self) -> None:
        try:
            self._decode()
        finally:  # however it ends, no request must wait for it
            with self._changed:
                self.problem = self.problem or "the engine's thread has ended by an error"
                left, self._handles, self._prefill = [*self._waiting, *self._begun()], {}, None
                self._waiting.clear()
            for handle, _ in left:
                handle.finish("error", RuntimeError(self.problem))

    @torch.inference_mode(False)  # what is kept must be usable outside of it
    @torch.no_grad()
    def _decode(self) -> None:
        while self._wait():
            self._before_step()
            try:
                self._prefill_chunk()
                if self._batch.is_running:
                    self._batch.advance()
                    self._leave()
            except Exception as error:
                self._fail(error)
        self._batch.drop()
        self._cache.clear()

    def _wait(self) -> bool:
        """Wait until there is work, and begin with the next request; False once the engine is closed and done."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._begun() or self._closing is not None)
            if self._closing is not None and time.monotonic() >= self._closing:
                for handle, _ in [*self._waiting, *self._begun()]:
                    handle.cancel()
            for item in [item for item in self._waiting if item[0].is_cancelled]:
                self._waiting.remove(item)
                item[0].finish("cancelled")
            can_begin = self._waiting and self._prefill is None and len(self._begun()) < self.max_batch
        if can_begin:
            self._begin(*self._waiting[0])  # it leaves the queue when it has begun, so that it is always in a list
        return bool(self._begun() or self._waiting) or self._closing is None

    def _begun(self) -> list[tuple[RequestHandle, Request]]:
        """Requests that run or are prefilled."""
        prefilled, running = self._prefill, [(handle, request) for request, handle in self._handles.items()]
        return running if prefilled is None else [*running, prefilled[:2]]

    def _begin(self, handle: RequestHandle, request: Request) -> None:
        """Begin to prefill a request, unless it has to wait for requests that run with other weights."""
        try:
            if not self._batch.takes_up_weights(self._cache):
                return
            handle.note("started")
            handle.prefixes.begin()
            row, layers = self._batch.new_row(), self._drafter.hidden_layers
            prefill = PromptRun(self.lm, request.prompt, row, handle.prefixes, layers, handle.reads_prompt)
        except Exception as error:
            self._waiting.popleft()
            return handle.finish("error", error)
        handle.num_cached = prefill.num_cached
        with self._changed:
            self._prefill = *self._waiting.popleft(), prefill

    def _prefill_chunk(self) -> None:
        """Run the next chunk of the prompt that is prefilled; after the last one its sequence joins the batch."""
        if self._prefill is None:
            return
        handle, request, prefill = self._prefill
        try:
            is_over = handle.is_cancelled or self._batch.read(prefill, self._chunk, request)
        except Exception as error:  # concerns this request alone
            self._prefill = None
            return handle.finish("error", error)
        if is_over:
            self._prefill = None
            return handle.finish("cancelled") if handle.is_cancelled else self._join(handle, request, prefill)

    def _join(self, handle: RequestHandle, request: Request, prefill: PromptRun) -> None:
        """Let a prefilled request run, and emit its first token."""
        with self._changed:
            self._handles[request] = handle
        length = len(request.prompt)
        self.totals.prompt(length, length * handle.prefixes.keeps, handle.num_cached)
        handle.sequence = self._batch.add(request)
        self._batch.join(handle.sequence, prefill)
        self._leave()

    def _leave(self) -> None:
        """Let the sequences that have ended leave the batch; keep their states."""
        ended = [sequence for sequence in self._batch.rows if sequence.reason and sequence.request in self._handles]
        if not ended:
            return
        with self._changed:
            handles = [self._handles.pop(sequence.request) for sequence in ended]
        for sequence, handle in zip(ended, handles, strict=True):
            handle.finish(sequence.reason or "error", sequence.error, self._batch.drafting_problem)
            if handle.prefixes.keeps and sequence.error is None:
                self._batch.keep_state(sequence, handle.prefixes)
        self._batch.leave(is_idle=self._prefill is None)

    def _fail(self, error: Exception) -> None:
        """End the running requests with an error; the states are lost, and later requests begin anew."""
        logger.exception("decoding failed; %d requests end with an error", len(self._handles))
        with self._changed:
            handles, self._handles = [*self._handles.values()], {}
            if self._prefill is not None:
                self._waiting.appendleft(self._prefill[:2])
        self._prefill = None
        self._batch.drop()
        for handle in handles:
            reason = None if handle.sequence is None else handle.sequence.reason
            handle.finish(reason or "error", None if reason else error)

    def _is_cancelled(self, request: Request) -> bool:
        return request in self._handles and self._handles[request].is_cancelled

    def _record(self, result: StepResult, texts: list[Text], committed: list[int]) -> None:
        """Note a step that was read in the handles of its rows."""
        for text, count, num_nodes in zip(texts, committed, result.row_nodes.tolist(), strict=True):
            if count and (handle := self._handles.get(text.request)) is not None:
                handle.record(num_nodes, count - 1)
