"""One generation: launches steps until every sequence has ended, and refills rows with the next prompts in between."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from stree.budget.policy import BudgetPolicy
from stree.decode.captured_step import CapturedStep
from stree.decode.cuda_graphs import Graphs
from stree.decode.request import Request, Slots
from stree.decode.sequences import Sequences
from stree.decode.stats import Generation, Statistics
from stree.decode.step import DecodeStep
from stree.decode.step_cache import StepCache, layout_of, rounded
from stree.decode.step_result import StepResult
from stree.drafters import Drafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.kernels.dispatch import host_can_read
from stree.models.tree_lm import TreeLM
from stree.sampling import Random

__all__ = ["DecodeLoop"]


class DecodeLoop:
    """One generation.

    Args:
        lm: the target.
        slots: prompts and rows of the batch.
        request: what the caller asked for.
        verifier: see ``stree.accept``.
        step_cache: keeps captured steps, or None where every operation is launched.

    Attributes:
        sequences: the texts.
        stats: sums over the steps.
        settings: what the statistics report beside them.
        problem: why decoding went on without the drafter, or None.
        is_started: whether the first tokens are about to be emitted.
    """

    def __init__(
        self, lm: TreeLM, slots: Slots, request: Request, verifier: str, step_cache: StepCache | None = None
    ) -> None:
        self.lm, self.slots, self.request, self.verifier = lm, slots, request, verifier
        self.step_cache = step_cache
        self.sequences = Sequences(slots, request)
        self.stats = Statistics()
        self.settings: dict[str, Any] = {}
        self.problem: Exception | None = None
        self.is_started = False
        self._device = lm.device  # read once: it is looked up through the model's modules
        self._graphs: Graphs | None = None
        self._replays = self._replays_before = 0  # of the graphs, at the last step that was read and at the beginning

    def run(self, drafter: Drafter, policy: BudgetPolicy) -> None:
        """Generate until every sequence has ended.

        On a device a step is read while the next one runs, unless its outcome decides on the next one.
        """
        self._began = time.perf_counter()
        prompts = list(islice(self.sequences.take(), self.slots.max_batch))
        if not prompts:
            reasons = self.sequences.reasons
            raise ValueError(f"no prompt can be run: {reasons[0] if reasons else 'there is none'}")
        key = self.key(drafter, policy, len(prompts)) if self.step_cache is not None else None
        step = self.step_cache.take(key) if self.step_cache is not None else None
        if step is None:
            step = self._new_step(len(prompts), policy)
        self._graphs = step.graphs
        self._replays = self._replays_before = self._num_replays()
        self._start(step, drafter, policy, prompts)
        self._run_steps(step, policy)
        self.problem = step.problem
        if self.step_cache is not None and self.problem is None:
            self.step_cache.keep(key, step, drafter)

    def key(self, drafter: Drafter, policy: BudgetPolicy, batch: int) -> Hashable:
        """Key of a decode step of ``batch`` sequences: all that its captured graphs depend on."""
        models = (self.lm, *drafter.models)
        return (
            batch, self._max_length(policy), policy.max_nodes, self.request.sampling, self.verifier,
            self.sequences.stop, _drafter_key(drafter), repr(policy.growth), *map(layout_of, models),
        )  # fmt: skip

    def output(self, reason: str) -> Generation:
        """Texts and statistics; sequences that have not ended end for ``reason``."""
        sequences = self.sequences
        report = {
            "num_prompt_tokens": [len(prompt) for prompt in sequences.prompts],
            "num_new_tokens": [len(new) for new in sequences.new],
            "finish_reasons": [known or reason for known in sequences.reasons],
            **self.stats.report(sequences.num_new_tokens),
            **self.settings,
        }
        if self._graphs is not None:
            report["graphs"] = {**self._graphs.report(), "replays": self._replays - self._replays_before}
        texts = [prompt + new for prompt, new in zip(sequences.prompts, sequences.new, strict=True)]
        return Generation(texts, report)

    def _run_steps(self, step: DecodeStep, policy: BudgetPolicy) -> None:
        """Launch steps and read them until every sequence has ended."""
        self._refill(step)
        is_pipelined = self._is_pipelined()
        launched: deque[tuple[StepResult, int]] = deque()  # with the number of replays until then

        def read() -> None:
            result, self._replays = launched.popleft()
            self._read(step, result, policy)

        try:
            while self.sequences.is_running:
                launched.append((step(policy.growth, policy.next()), self._num_replays()))
                if len(launched) > is_pipelined:
                    read()
                    for row in self.sequences.cancel(is_pipelined=is_pipelined):
                        step.finish(row)
                    self._refill(step)
        finally:  # also read what was launched before something failed
            while launched and self.sequences.is_running:
                read()

    def _read(self, step: DecodeStep, result: StepResult, policy: BudgetPolicy) -> None:
        """Read a step's report: tokens are appended to the texts, times and lengths to the statistics."""
        rows, committed = result.emitted()
        logits = result.logits
        if self.request.observer is not None:
            logits = logits.take_along_dim(result.acceptance.path.clamp(min=0).long()[..., None], 1)
        for row, tokens in enumerate(rows):
            if self.sequences.append(row, tokens, logits[row]):
                step.finish(row)
        seconds = result.timer.seconds()
        self.stats.record(result.draft, committed, seconds)
        self.stats.total_s = time.perf_counter() - self._began
        policy.observe([count for count in committed if count], sum(time_s for _, time_s in seconds))

    def _refill(self, step: DecodeStep) -> None:
        """Prefill waiting prompts into the rows of sequences that have ended."""
        for row in range(len(self.sequences.rows)):
            while self.sequences.has_ended(row):
                prompt = next(self.sequences.take(row), None)
                if prompt is None:
                    return
                began = time.perf_counter()
                logits, rng = step.admit(row, self.sequences.rows[row], prompt)
                self._check(logits)
                self._first_tokens(step, [row], rng, logits)
                self.stats.prefill_s += time.perf_counter() - began

    def _start(self, step: DecodeStep, drafter: Drafter, policy: BudgetPolicy, prompts: list[list[int]]) -> None:
        """Prefill the first prompts together and draw their first tokens."""
        logits = step.fill(drafter, prompts, self.request.max_new_tokens, self.request.seed)
        if self.slots.refills and not step.run.can_admit:
            raise TypeError(f"{type(drafter).__name__} cannot take up a prompt in mid-run; leave max_batch out")
        step.run.reserve(self._max_length(policy), policy.growth, policy.max_nodes, begins=not policy.is_off)
        self._check(logits)
        if self.request.streamer is not None:
            self.request.streamer.put(torch.tensor(prompts[0]))
        self.is_started = True
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self._device)
        self._first_tokens(step, range(len(prompts)), step.rng.at(lengths), logits)
        self.stats.prefill_s = self.stats.total_s = time.perf_counter() - self._began

    def _check(self, logits: Tensor) -> None:
        """Refuse logits after prompts that have no distribution."""
        if not bool(self.request.sampling.has_distribution(logits).all()):
            kind = "NaN" if bool(logits.isnan().any()) else "infinite"
            raise ValueError(f"the target's logits are {kind} after the prompt")

    def _first_tokens(self, step: DecodeStep, rows: Sequence[int], rng: Random, logits: Tensor) -> None:
        """Draw the token after the prompts of some rows from float[len(rows), vocab] logits."""
        sampling = self.request.sampling
        if sampling.is_greedy:
            tokens = logits.argmax(-1)
        else:
            tokens = rng.choice("target", sampling.probs(logits), torch.zeros_like(rng.positions))
        for place, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            self.sequences.append(row, [token], logits[place][None])
            step.begin(row, token, is_finished=self.sequences.has_ended(row))

    def _new_step(self, batch: int, policy: BudgetPolicy) -> DecodeStep:
        """Allocate a state, and the decode step that works on it."""
        state = self.lm.new_state(batch, self._max_length(policy), policy.max_nodes)
        state.fixed_shapes = not host_can_read(state.lengths)  # captured steps must not grow
        sequences = torch.arange(batch, device=self._device)
        seed = self.request.seed if self.step_cache is None else torch.zeros_like(sequences[0])
        rng = Random(seed, sequences, torch.zeros_like(sequences))
        options: dict[str, Any] = {
            "sampling": self.request.sampling, "verifier": self.verifier, "stop_token_ids": self.sequences.stop,
        }  # fmt: skip
        if self.step_cache is None:
            return DecodeStep(self.lm, state, rng, **options)
        return CapturedStep(self.lm, state, rng, graphs=self.step_cache.graphs(), **options)

    def _max_length(self, policy: BudgetPolicy) -> int:
        """Most tokens that a state must hold: the last step may commit a whole path beyond the limit."""
        length = self.slots.max_length + policy.max_nodes
        return length if self.step_cache is None else rounded(length)

    def _num_replays(self) -> int:
        return 0 if self._graphs is None else self._graphs.num_replays

    def _is_pipelined(self) -> bool:
        """Whether a step is launched before the last one is read."""
        return self._device.type == "cuda" and self.request.observer is None


def _drafter_key(drafter: Drafter) -> Hashable:
    """What of a drafter captured steps depend on: drafters of one key may share them."""
    kind = type(drafter)
    if kind in (NoDrafter, SuffixDrafter):
        return kind.__name__  # their runs keep nothing for the next text
    if type(drafter) is ModelDrafter:
        return kind.__name__, id(drafter.lm)
    return id(drafter)
