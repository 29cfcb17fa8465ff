"""The decode loop: launches steps and reads them, while sequences join and leave the batch in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from stree.budget.policy import BudgetPolicy
from stree.decode.draft_memory import Drafting
from stree.decode.logprobs import token_logprobs
from stree.decode.memory import Extent, path_nodes, verifier_bytes
from stree.decode.request import Batch, Request
from stree.decode.sequences import Sequences, Text
from stree.decode.settings import Settings
from stree.decode.stats import Generation, Statistics
from stree.decode.step import DecodeStep
from stree.decode.step_cache import StepCache, drafter_key, state_length
from stree.decode.step_result import StepResult
from stree.kernels.clock import clock, compile_seconds
from stree.kernels.dispatch import fixes_shapes
from stree.models.layout import layout_of
from stree.models.prefix_cache import PromptRun
from stree.models.state import DecodeState
from stree.sampling import BatchSampling

__all__ = ["DecodeLoop"]

EMPTY = Request([0], problem="an empty row")


class DecodeLoop:
    """Decodes one batch: ``start`` it, then ``advance`` by a step at a time and ``admit`` requests to free rows.

    Args:
        settings: models, drafter and verifier.
        batch: sizes, and what the sampling parameters and stop tokens of all requests need.
        sequences: the texts.
        step_cache: keeps captured steps, or None where every operation is launched.

    Attributes:
        stats: sums over the steps.
        reported: what the statistics report beside them.
        problem: why decoding went on without the drafter, or None.
        policy: chooses growth and nodes of the next step.
        on_step: called with every step that is read, the texts that its rows held, and the nodes that each row
            committed, before its tokens are appended to the texts.
        is_started: whether the first tokens are about to be emitted.
    """

    def __init__(
        self, settings: Settings, batch: Batch, sequences: Sequences, step_cache: StepCache | None = None
    ) -> None:
        self.lm, self.drafter, self.verifier = settings.lm, settings.drafter, settings.verifier
        self.batch, self.sequences, self.step_cache = batch, sequences, step_cache
        self.on_step: Callable[[StepResult, list[Text], list[int]], None] | None = None
        self.stats, self.reported = Statistics(), dict[str, Any]()
        self.is_started = False
        self._step: DecodeStep
        self._device = self.lm.device  # read once: it is looked up through the model's modules
        # With the texts that the rows held when they were launched, the number of replays until then, and the
        # policy that chose their size: None where all requests have a budget of one node.
        self._launched: deque[tuple[StepResult, list[Text], int, BudgetPolicy | None]] = deque()
        self._replays = self._replays_before = 0  # of the graphs, at the last step that was read and at the beginning
        self._read_s: float | None = None  # when that step was read; None where other work has run since then

    @property
    def problem(self) -> Exception | None:
        """Why decoding went on without the drafter, or None."""
        return self._step.problem

    def steps(self, policy: BudgetPolicy) -> Iterator[None]:
        """Decode all requests of the batch, each in a row as one becomes free; yield after prefill and every step.

        Where the iterator is closed before its end, the sequences that have not ended are cancelled.
        """
        first = self._next_sequences(self.batch.max_batch)
        if not first:
            refused = [sequence.reason for sequence in self.sequences.all]
            raise ValueError(f"no prompt can be run: {refused[0] if refused else 'there is none'}")
        self.start(policy, first)
        try:
            self._refill()
            yield
            while self.sequences.is_running:
                self.advance()
                self._refill()
                yield
        except GeneratorExit:
            self.sequences.cancel_all()
            for row in range(len(self.sequences.rows)):
                self._step.set_finished(row)
        finally:  # also read what was launched before something failed
            while self._launched and self.sequences.is_running:
                self._read()
        if self.step_cache is not None and self.problem is None:
            self.step_cache.keep(self._key, self._step, self.drafter)

    def start(self, policy: BudgetPolicy, sequences: list[Text], batch_size: int | None = None) -> None:
        """Prefill the first sequences together and draw their first tokens; rows beyond them are free."""
        self._began, self._compiled_before, self.policy = clock(), compile_seconds(), policy
        size = batch_size or len(sequences)
        self.sequences.rows = [Text(EMPTY, reason=EMPTY.problem) for _ in range(size)]
        self._key = None if self.step_cache is None else self.key(policy, size)
        step = None if self.step_cache is None else self.step_cache.take(self._key)
        step = self._step = self._new_step(size, policy) if step is None else step
        self._replays = self._replays_before = step.capture.num_replays
        requests = [sequence.request for sequence in sequences]
        logits = step.fill(self.drafter, [*requests, *[EMPTY] * (size - len(requests))])
        if self.batch.refills and not step.run.can_begin:
            name = type(self.drafter).__name__
            raise TypeError(f"{name} cannot take up a prompt in mid-run (can_begin is False): max_batch needs begin")
        step.reserve(self.max_length(policy), policy.growth, policy.max_nodes, begins=not policy.is_off)
        if sequences:
            self._begin(sequences, list(range(len(sequences))), logits[: len(sequences)])
        self._count_time()
        self.stats.prefill_s = self.stats.total_s

    def admit(self, sequence: Text, prefilled: PromptRun | None = None) -> None:
        """Prefill a sequence in a free row, unless that was done before, and draw its first token.

        Raises:
            RuntimeError: no row is free.
        """
        row = self.sequences.free_row()
        if row is None:
            raise RuntimeError("every row of the batch holds a sequence that has not ended")
        began = clock()
        self._begin([sequence], [row], self._step.admit(row, sequence.request, prefilled))
        self.stats.prefill_s += clock() - began
        self._count_time()

    def select(self, rows: list[int], newcomer: Request | None = None) -> None:
        """Drop all rows but these; with a newcomer append a free row for it, which ``admit`` fills.

        Between two calls of ``advance``, where ``can_select``.
        """
        held = [self.sequences.rows[row] for row in rows]
        requests = [sequence.request for sequence in held]
        if newcomer is not None:
            rows, requests = [*rows, rows[0] if rows else 0], [*requests, newcomer]
            held.append(Text(EMPTY, reason=EMPTY.problem))
        self._step, self.sequences.rows = self._step.select(rows, requests), held
        self.pause()

    def pause(self) -> None:
        """Leave the time since the last step out of that of the next one: other work runs in between."""
        self._read_s = None

    @property
    def can_select(self) -> bool:
        """Whether ``select`` may be called now: every step is read at once, and the drafter's run allows it."""
        return self._step.run.can_select and self.step_cache is None and not self._is_pipelined()

    @property
    def state(self) -> DecodeState:
        """The state of all rows."""
        return self._step.state

    def advance(self) -> None:
        """Launch a step, and read the oldest one that the host does not run ahead of."""
        policy = None if self.sequences.is_plain and self.drafter.is_lossless else self.policy
        size = 1 if policy is None else policy.next()
        result = self._step(self.policy.growth, size, self.sequences.wanted)
        self._launched.append((result, [*self.sequences.rows], self._step.capture.num_replays, policy))
        if len(self._launched) > self._is_pipelined():
            self._read()
            for row in self.sequences.cancel(self._step.processing.problems):
                self._step.set_finished(row)

    def key(self, policy: BudgetPolicy, batch: int) -> Hashable:
        """Key of a decode step of ``batch`` sequences: all that its captured graphs depend on."""
        models = (self.lm, *self.drafter.models)
        sampling = BatchSampling(self.batch.kinds, 0, self._device)
        return (
            batch, self.max_length(policy), policy.max_nodes, repr(sampling), self.verifier, self.batch.most_stops,
            drafter_key(self.drafter), repr(policy.growth), self.batch.keeps_probs, self.batch.limits_nodes,
            *map(layout_of, models),
        )  # fmt: skip

    def output(self, reason: str) -> Generation:
        """Texts and statistics; sequences that have not ended end for ``reason``."""
        sequences = self.sequences.all
        report = {
            "num_prompt_tokens": [len(sequence.request.prompt) for sequence in sequences],
            "num_new_tokens": [len(sequence.new) for sequence in sequences],
            "finish_reasons": [sequence.reason or reason for sequence in sequences],
            **self.stats.report(self.sequences.num_new_tokens),
            **self.reported,
            **({"rule": ", ".join(sorted(self.stats.rules))} if self.verifier == "auto" else {}),
            "rows": [sequence.counts.report() for sequence in sequences],
        }
        if self.is_started and self.step_cache is not None:
            report["graphs"] = {**self._step.capture.report(), "replays": self._replays - self._replays_before}
        has_logprobs = any(sequence.request.logprobs is not None for sequence in sequences)
        logprobs = [sequence.logprobs for sequence in sequences] if has_logprobs else None
        steps = [[*sequence.steps] for sequence in sequences] if self.batch.keeps_probs else None
        texts, new = [sequence.tokens for sequence in sequences], [[*sequence.new] for sequence in sequences]
        return Generation(texts, report, logprobs, new, steps)

    def _next_sequences(self, count: int) -> list[Text]:
        """Take the sequences of the next requests that can be run; the others have ended already."""
        runnable: list[Text] = []
        while len(runnable) < count and (request := next(self.batch.requests, None)) is not None:
            sequence = self.sequences.add(request)
            if sequence.reason is None:
                runnable.append(sequence)
        return runnable

    def _refill(self) -> None:
        """Admit the next requests to the rows of sequences that have ended."""
        while self.sequences.free_row() is not None:
            following = self._next_sequences(1)
            if not following:
                return
            self.admit(following[0])

    def _read(self) -> None:
        """Read a step's report: tokens are appended to the texts, times and lengths to the statistics.

        The host may have ended a text, by a stop string, after this step was launched for it: that is no step of it.
        """
        result, texts, self._replays, policy = self._launched.popleft()
        rows, committed, problems = result.emitted()
        for row, problem in problems.items():
            if not self.batch.isolates_nan:
                self._launched.clear()  # they go on from what cannot be used
                raise problem
            texts[row].fail(problem)
            self._step.set_finished(row)
        seconds = result.timer.seconds()
        counted = [0 if text.reason is not None else count for text, count in zip(texts, committed, strict=True)]
        self.stats.record(result, counted, seconds)
        if self.on_step is not None:
            self.on_step(result, texts, counted)
        for row, (text, tokens) in enumerate(zip(texts, rows, strict=True)):
            text.record(result, row, counted[row], seconds)
            logprobs = None if result.logprobs is None else result.logprobs[row].tolist()
            if text.append(tokens, None if result.logits is None else result.logits[row], logprobs):
                self._step.set_finished(row)
        self._count_time()
        # What the host does between two steps is time of a step, too: the fewer steps, the less of it.
        step_s = sum(seconds.values()) if self._read_s is None else self.stats.total_s - self._read_s
        step_s, self._read_s = self.lm.agreed(step_s), self.stats.total_s
        self.stats.warn_of_unfit_drafter(self._step.hidden_layers)
        if policy is not None:
            policy.observe([count for count in committed if count], step_s if result.is_steady else None)

    def _begin(self, sequences: list[Text], rows: list[int], logits: Tensor) -> None:
        """Place sequences in rows, and draw and emit their first tokens from float[len(rows), vocab] logits."""
        self.pause()
        raw = logits[:, None]
        tokens, logits = self._step.first_tokens(torch.tensor(rows, device=self._device), logits)
        for sequence, row in zip(sequences, rows, strict=True):
            self.sequences.begin(sequence, row)
        self.is_started, top = True, self.sequences.wanted.top_logprobs
        logprobs = None if top is None else token_logprobs(raw, torch.tensor(tokens, device=raw.device)[:, None], top)
        for place, (sequence, row, token) in enumerate(zip(sequences, rows, tokens, strict=True)):
            own = None if logprobs is None else logprobs[place].tolist()
            has_ended = sequence.append([token], logits[place][None], own)
            self._step.set_finished(row, is_finished=has_ended)

    def _new_step(self, batch: int, policy: BudgetPolicy) -> DecodeStep:
        """Allocate a state, and the decode step that works on it."""
        state = self.lm.new_state(batch, self.max_length(policy), max(policy.max_nodes, self.batch.min_nodes))
        state.fixed_shapes = fixes_shapes(state.lengths)  # captured steps must not grow
        return DecodeStep(
            self.lm, state, sampling=BatchSampling(self.batch.kinds, batch, self._device), verifier=self.verifier,
            max_length=self.max_length(policy), most_stops=self.batch.most_stops, processor=self.batch.processor,
            keeps_probs=self.batch.keeps_probs, capture=self.step_cache.capture() if self.step_cache else None,
            limits_nodes=self.batch.limits_nodes, isolates_nan=self.batch.isolates_nan,
        )  # fmt: skip

    def extent(self, policy: BudgetPolicy) -> Extent:
        """Return the sizes of what the batch allocates."""
        batch, nodes = self.batch, policy.max_nodes
        return Extent(
            batch.max_batch, self.max_length(policy), max(nodes, batch.min_nodes), batch.max_batch, batch.prompt_length,
            is_padded=batch.is_padded, single_rows=int(batch.refills), is_greedy=batch.is_greedy,
            truncates=any(kind.truncates for kind in batch.kinds), drafting=Drafting.of(policy.growth, nodes),
            verifier_bytes=verifier_bytes(self.drafter, policy.growth, nodes, self.verifier),
            rules=batch.rules, has_grammar=batch.has_grammar,
            path_nodes=path_nodes(self.drafter, policy.growth, nodes) * batch.keeps_logprobs,
        )  # fmt: skip

    def max_length(self, policy: BudgetPolicy) -> int:
        """Return the tokens that the states hold room for."""
        return state_length(self.batch.max_length, policy.max_nodes, is_captured=self.step_cache is not None)

    def _is_pipelined(self) -> bool:
        """Whether a step is read while the next one runs: on a device."""
        return self._device.type == "cuda"

    def _count_time(self) -> None:
        """Take the time since ``start``, and apart from it that of compiling."""
        self.stats.total_s = clock() - self._began
        self.stats.warm_up_s = compile_seconds() - self._compiled_before
