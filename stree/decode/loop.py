"""One generation: texts on the host, a step after the other on the device, sequences that come and go between steps.

It knows a drafter, a growth and a model by their protocols only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Protocol

import torch
from torch import Tensor

from stree.budget.policy import BudgetPolicy
from stree.decode.captured_step import CapturedStep
from stree.decode.cuda_graphs import Graphs
from stree.decode.stats import Generation, Statistics
from stree.decode.step import DecodeStep
from stree.decode.step_cache import StepCache, layout_of, rounded
from stree.decode.step_result import StepResult
from stree.drafters import Drafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.kernels.topology import reads_freely
from stree.models.tree_lm import TreeLM
from stree.sampling import Random, Sampling

__all__ = ["DecodeLoop", "Observer", "Streamer"]


class Streamer(Protocol):
    """Receives tokens as transformers' streamers do: the prompt first, then what each step emits."""

    def put(self, value: Tensor) -> None:
        """Take int64[count] tokens."""
        ...

    def end(self) -> None:
        """Finish."""
        ...


class Observer(Protocol):
    """Sees every token with the logits it was drawn from."""

    def observe(self, row: int, tokens: Sequence[int], logits: Tensor) -> int | None:
        """Take a sequence's next tokens, never none, and float[len(tokens), vocab] logits.

        Returns:
            How many of the tokens end the sequence, at least 1, or None to go on.
        """
        ...


class DecodeLoop:
    """One generation.

    Slots of the batch hold sequences; when one has finished and prompts are left, the next takes its slot.

    Args:
        lm: the target.
        prompts: token lists with None, or with the reason why one cannot be run, by which its sequence ends.
        sampling: how the target's tokens are drawn.
        max_new_tokens: most new tokens a sequence.
        stop_token_ids: tokens that end a sequence.
        seed: of the random numbers.
        max_batch: slots.
        max_length: most tokens of a prompt and its new tokens.
        refills: whether there may be more prompts than slots.
        streamer: receives tokens as they are emitted, or None.
        observer: sees what every token was drawn from and may end a sequence, or None.
        engine: keeps programs whose steps are captured, or None where they are launched one by one.
        cancelled: asked after every step of each running sequence, by its number, whether it shall end; or None.

    Attributes:
        problem: why the drafter was given up in mid-text, or None.
    """

    problem: Exception | None = None

    def __init__(
        self,
        lm: TreeLM,
        prompts: Iterable[tuple[list[int], str | None]],
        *,
        sampling: Sampling,
        max_new_tokens: int,
        stop_token_ids: Iterable[int] | None,
        seed: int,
        max_batch: int,
        max_length: int,
        refills: bool = False,
        streamer: Streamer | None = None,
        observer: Observer | None = None,
        step_cache: StepCache | None = None,
        cancelled: Callable[[int], bool] | None = None,
    ) -> None:
        self.step_cache, self.cancelled = step_cache, cancelled
        self.lm, self.sampling, self.max_new_tokens, self.seed = lm, sampling, max_new_tokens, seed
        self.max_batch, self.max_length, self.refills = max_batch, max_length, refills
        self.streamer, self.observer = streamer, observer
        self.stop = frozenset(stop_token_ids or ())
        self.waiting = iter(prompts)
        self.prompts: list[list[int]] = []
        self.new: list[list[int]] = []
        self.reasons: list[str | None] = []
        self.slots: list[int] = []  # the sequence that each row of the batch holds
        self.device = lm.device  # asked for once: it is looked up through the model's modules
        self.stats = Statistics()
        self.settings: dict[str, Any] = {}
        self._ending: set[int] = set()
        self._graphs: Graphs | None = None
        self._replays = self._replays_before = 0  # of the graphs, at the last step heard of and at the beginning
        self.is_started = False

    @property
    def num_new_tokens(self) -> int:
        """Tokens emitted so far."""
        return sum(map(len, self.new))

    def opening(self) -> Sequence[int]:
        """Give the next prompt, which stays the next one; of one that cannot be run a token."""
        first = list(islice(self.waiting, 1))
        self.waiting = chain(first, self.waiting)
        return next((prompt for prompt, problem in first if problem is None), [0])

    def run(self, drafter: Drafter, policy: BudgetPolicy, verifier: str) -> None:
        """Generate until every sequence has finished.

        On a device the host hears of a step while the next one runs, unless it must know more before it can go on.
        """
        self._began = time.perf_counter()
        prompts = list(islice(self._runnable(), self.max_batch))
        if not prompts:
            raise ValueError(f"no prompt can be run: {self.reasons[0] if self.reasons else 'there is none'}")
        room = self._room(policy)
        key = self.key(drafter, policy, verifier, len(prompts)) if self.step_cache is not None else None
        decode_step = self.step_cache.take(key) if self.step_cache is not None else None
        if decode_step is None:
            decode_step = self._new_decode_step(len(prompts), room, policy.max_nodes, verifier)
        self._graphs = decode_step.graphs
        self._replays = self._replays_before = self._num_replays()
        self._start(decode_step, drafter, policy, prompts, room)
        self._loop(decode_step, policy)
        self.problem = decode_step.problem
        if self.step_cache is not None and self.problem is None:
            self.step_cache.keep(key, decode_step, drafter)

    def key(self, drafter: Drafter, policy: BudgetPolicy, verifier: str, batch: int) -> Hashable:
        """Name the kind of program that a run of so many sequences needs: all that its captured steps hold."""
        models = (self.lm, *drafter.models)
        return (
            batch, self._room(policy), policy.max_nodes, self.sampling, verifier, self.stop, _kind_of(drafter),
            repr(policy.growth), *map(layout_of, models),
        )  # fmt: skip

    def _room(self, policy: BudgetPolicy) -> int:
        """Count the tokens that a text needs room for."""
        # The last step starts below the limit and may commit a whole path beyond it.
        room = self.max_length + policy.max_nodes
        return room if self.step_cache is None else rounded(room)

    def _loop(self, decode_step: DecodeStep, policy: BudgetPolicy) -> None:
        """Launch steps and hear of them until every sequence has finished."""
        self._refill(decode_step)
        decode_step.copies_draft = policy.watches
        is_late = self._is_late()
        launched: deque[tuple[StepResult, int]] = deque()  # with the replays until then

        def hear() -> None:
            step, self._replays = launched.popleft()
            self._take(decode_step, step, policy)

        try:
            while None in self.reasons:
                launched.append((decode_step(*policy.next()), self._num_replays()))
                if len(launched) > is_late:
                    hear()
                    self._cancel(decode_step, is_late)
                    self._refill(decode_step)
        finally:  # what was launched before something failed is heard all the same
            while launched and None in self.reasons:
                hear()

    def _num_replays(self) -> int:
        """Count what was replayed so far."""
        return 0 if self._graphs is None else self._graphs.num_replays

    def _is_late(self) -> bool:
        """Tell whether a step is launched before the last one is heard of."""
        return self.device.type == "cuda" and self.observer is None

    def output(self, reason: str) -> Generation:
        """Report texts and statistics; sequences that have not finished end for ``reason``."""
        report = {
            "num_prompt_tokens": [len(prompt) for prompt in self.prompts],
            "num_new_tokens": [len(new) for new in self.new],
            "finish_reasons": [known or reason for known in self.reasons],
            **self.stats.report(self.num_new_tokens),
            **self.settings,
        }
        if self._graphs is not None:
            known = self._graphs.report()
            report["graphs"] = {**known, "replays": self._replays - self._replays_before}
        return Generation([prompt + new for prompt, new in zip(self.prompts, self.new, strict=True)], report)

    def _new_decode_step(self, batch: int, room: int, max_nodes: int, verifier: str) -> DecodeStep:
        """Make room for texts."""
        state = self.lm.new_state(batch, room, max_nodes)
        state.fixed_shapes = not reads_freely(state.lengths)  # where steps are replayed they must not grow
        sequences = torch.arange(batch, device=self.device)
        seed = self.seed if self.step_cache is None else torch.zeros_like(sequences[0])
        rng = Random(seed, sequences, torch.zeros_like(sequences))
        options: dict[str, Any] = {"sampling": self.sampling, "verifier": verifier, "stop_token_ids": self.stop}
        if self.step_cache is None:
            return DecodeStep(self.lm, state, rng, **options)
        return CapturedStep(self.lm, state, rng, graphs=self.step_cache.graphs(), **options)

    def _start(
        self, decode_step: DecodeStep, drafter: Drafter, policy: BudgetPolicy, prompts: list[list[int]], room: int
    ) -> None:
        """Prefill the first prompts together, with room for so many tokens each, and draw their first tokens."""
        logits = decode_step.fill(drafter, prompts, self.max_new_tokens, self.seed)
        if self.refills and not decode_step.run.can_admit:
            raise TypeError(f"{type(drafter).__name__} cannot take up a prompt in mid-run; leave max_batch out")
        decode_step.run.reserve(room, policy.growth, policy.max_nodes, begins=not policy.is_off)
        self._check(logits)
        if self.streamer is not None:
            self.streamer.put(torch.tensor(prompts[0]))
        self.is_started = True
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self._first_tokens(decode_step, range(len(prompts)), decode_step.rng.at(lengths), logits)
        self.stats.prefill_s = self.stats.total_s = time.perf_counter() - self._began

    def _refill(self, decode_step: DecodeStep) -> None:
        """Give the slots of sequences that have finished to prompts that wait."""
        for row in range(len(self.slots)):
            while self.reasons[self.slots[row]] is not None:
                prompt = next(self._runnable(row), None)
                if prompt is None:
                    return
                began = time.perf_counter()
                logits, rng = decode_step.admit(row, self.slots[row], prompt)
                self._check(logits)
                self._first_tokens(decode_step, [row], rng, logits)
                self.stats.prefill_s += time.perf_counter() - began

    def _runnable(self, row: int | None = None) -> Iterator[list[int]]:
        """Take up the waiting prompts that can be run, each in a new slot or in that of ``row``."""
        for prompt, problem in self.waiting:
            self.prompts.append(prompt)
            self.new.append([])
            self.reasons.append(problem)
            if problem is None:
                sequence = len(self.prompts) - 1
                if row is None:
                    self.slots.append(sequence)
                else:
                    self.slots[row] = sequence
                yield prompt

    def _check(self, logits: Tensor) -> None:
        """Refuse logits of prompts that have no distribution."""
        if not bool(self.sampling.has_distribution(logits).all()):
            kind = "NaN" if bool(logits.isnan().any()) else "infinite"
            raise ValueError(f"the target's logits are {kind} after the prompt")

    def _first_tokens(self, decode_step: DecodeStep, rows: Sequence[int], rng: Random, logits: Tensor) -> None:
        """Draw the token after the prompts of some rows from float[len(rows), vocab] logits."""
        if self.sampling.is_greedy:
            tokens = logits.argmax(-1)
        else:
            tokens = rng.choice("target", self.sampling.probs(logits), torch.zeros_like(rng.positions))
        for place, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            self._emit(row, [token], logits[place][None])
            decode_step.begin(row, token, is_finished=self.reasons[self.slots[row]] is not None)

    def _take(self, decode_step: DecodeStep, step: StepResult, policy: BudgetPolicy) -> None:
        """Hear of a step: its tokens go to the texts, its times and lengths to the statistics."""
        rows, committed = step.emitted()
        logits = step.logits
        if self.observer is not None:
            logits = logits.take_along_dim(step.acceptance.path.clamp(min=0).long()[..., None], 1)
        for row, tokens in enumerate(rows):
            if self.slots[row] in self._ending:  # it was launched before its end was asked for
                self._end(self.slots[row])
            elif tokens and self._emit(row, tokens, logits[row]):
                decode_step.finish(row)
        self.stats.record(step.draft, committed, step.timer.seconds())
        self.stats.total_s = time.perf_counter() - self._began
        policy.observe(step.draft, step.acceptance)

    def _cancel(self, decode_step: DecodeStep, is_late: bool) -> None:
        """End the sequences that are asked to; one that runs in a step not yet heard of ends when that is."""
        if self.cancelled is None:
            return
        for row, sequence in enumerate(self.slots):
            if self.reasons[sequence] is None and sequence not in self._ending and self.cancelled(sequence):
                decode_step.finish(row)
                self._ending.add(sequence)
                if not is_late:
                    self._end(sequence)

    def _end(self, sequence: int) -> None:
        """End a sequence that was cancelled."""
        self._ending.discard(sequence)
        self.reasons[sequence] = "cancelled"
        if self.streamer is not None:
            self.streamer.end()

    def _emit(self, row: int, tokens: list[int], logits: Tensor) -> bool:
        """Append tokens of a row, cut at its end, to its text; token i was drawn from logits[i].

        Returns:
            Whether the observer ended the sequence.
        """
        sequence, is_ended = self.slots[row], False
        if self.observer is not None:
            end = self.observer.observe(sequence, tokens, logits[: len(tokens)])
            is_ended = end is not None
            tokens = tokens[:end]
        self.new[sequence] += tokens
        if is_ended or tokens[-1] in self.stop:
            self.reasons[sequence] = "stop"
        elif len(self.new[sequence]) >= self.max_new_tokens:
            self.reasons[sequence] = "length"
        if self.streamer is not None:
            self.streamer.put(torch.tensor(tokens))
            if self.reasons[sequence] is not None:
                self.streamer.end()
        return is_ended


def _kind_of(drafter: Drafter) -> Hashable:
    """Name what of a drafter the steps of a program hold: two of one kind may follow each other in it."""
    if type(drafter) in (NoDrafter, SuffixDrafter):
        return type(drafter)  # their runs keep nothing for the next text
    if type(drafter) is ModelDrafter:
        return ModelDrafter, id(drafter.lm)
    return id(drafter)
