"""One decode step on the device: propose, verify, accept, commit, emit, observe.

Nothing here reads the device, except the tree that a grammar is to mask.  What a step leaves for the next one is in
tensors that are written in place; the host reads a step's tokens later.  So it can be captured: see ``capture``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stree.decode import debug
from stree.decode.capture import Capture
from stree.decode.logits_processors import NodeProcessor, TreeProcessing
from stree.decode.prompts import first_tokens
from stree.decode.request import Request
from stree.decode.step_records import path_probs
from stree.decode.step_result import LaunchedStep, StepResult, StepTimer, Wanted, on_path
from stree.drafters import Draft, Drafter, DraftRun, NoDrafter, padded_prompts
from stree.drafters.checked import proposed, selected, started
from stree.drafters.merge import keep_first
from stree.growth import Growth
from stree.kernels.step.texts import Seen, Texts, emit
from stree.models.prefix_cache import PromptRun
from stree.models.state import DecodeState
from stree.models.tree_lm import TreeLM
from stree.sampling import BatchSampling, Random
from stree.verify import Verifier, accept
from stree.verify.acceptance import mask_invalid_logits

__all__ = ["DecodeStep"]

logger = logging.getLogger("stree")


class DecodeStep:
    """The steps of a batch of sequences, each of which starts where the last one ended on the device.

    Everything that differs between sequences is a tensor with one row each, so one captured step serves all mixtures.

    Args:
        lm: the target.
        state: its state, empty.
        sampling: how the tokens of each row are drawn; written when a sequence begins.
        verifier: see ``stree.accept``.
        max_length: most tokens of a text.
        most_stops: most stop tokens of a sequence.
        processor: of the logits of target and draft model, or None; it learns which request each row holds.
        keeps_probs: whether the probabilities of the accepted paths are computed.
        capture: launches the device work; None: operation by operation.
        limits_nodes, isolates_nan: see ``Batch``.

    Attributes:
        rng: random numbers, keyed by the seed of each row.
        processing: of the logits of target and draft model.
        texts: of each row, with its limit and stop tokens.
        seen: the texts as the present step found them.
        run: the drafter's run for the same sequences, from ``fill`` on.
        problem: why decoding went on without the drafter, or None.
        hidden_layers: layers of the target whose hidden states the drafter reads, or None.
    """

    run: DraftRun
    problem: Exception | None = None

    def __init__(
        self, lm: TreeLM, state: DecodeState, *, sampling: BatchSampling, verifier: str | Verifier, max_length: int,
        most_stops: int = 0, processor: NodeProcessor | None = None, keeps_probs: bool = False,
        capture: Capture | None = None, limits_nodes: bool = False, isolates_nan: bool = False,
    ) -> None:  # fmt: skip
        self.lm, self.state, self.sampling, self.verifier = lm, state, sampling, verifier
        batch, device, self._vocab_size = len(state.lengths), state.lengths.device, lm.vocab_size
        self.processing, self._isolates_nan = TreeProcessing(processor, batch, self._vocab_size, device), isolates_nan
        self.capture = capture or Capture()
        self.texts = Texts.empty(batch, max_length, most_stops, device, limits_nodes=limits_nodes)
        self.seen = Seen.of(self.texts)
        self._seeds = torch.zeros_like(self.texts.lengths)
        self.rng = Random(self._seeds, self._seeds.clone(), self.seen.lengths)
        self._is_filled, self._is_debug, self._keeps_probs = False, debug.checks_memory(), keeps_probs
        self.hidden_layers: Sequence[int] | None = None  # that the drafter reads
        self._growth: tuple[Growth | None, Growth | None] = None, None  # the last one, and bound to the sampling

    def __call__(self, growth: Growth | None, budget: int, wanted: Wanted = Wanted()) -> StepResult:  # noqa: B008
        """Launch a step of at most ``budget`` nodes a sequence, and the copies of what the host reads of it."""
        growth = self._bound(growth)
        with self.capture.lock:  # a replay overwrites what another thread's has not copied yet
            timer, num_warm_ups = StepTimer(self.state.lengths.device), self.capture.num_warm_ups
            self.seen.update(self.texts)
            self.capture.launches_drafts = reads_tree = self.processing.advance(self.seen)
            num_calls = self._let_draft(self.run.prepare, self.seen, budget) or 0
            run, draft, inputs = self.run, None, (self._vocab_size, self.seen.pending, growth, budget)
            key: tuple[Any, ...] = f"budget {budget}", growth
            propose: Callable[[], Draft] = partial(self._let_draft, proposed, run, *inputs)
            if not run.is_on_device or reads_tree:
                draft = self._limited(propose() or self.run.propose(self.seen.pending, None, 1))
                timer.lap("draft_s")
                key, propose = self.capture.laid_out(draft, self.state.max_nodes, self.verifier)
                self.processing.lay_out(self.seen, propose().tree, self.state.max_nodes)
            work = partial(self._work, propose, observes=draft is None, needs_logits=wanted.needs_logits)
            key = *key, *self.processing.key, *("with logits of the path",) * wanted.needs_logits
            step = self.capture.step(run, key, work, timer)
            if draft is not None:
                step = replace(step, draft=draft)
                self._let_draft(self.run.observe, step.acceptance)
                timer.lap("draft_s")
            is_steady = self.capture.num_warm_ups == num_warm_ups
            result = replace(step, timer=timer, is_steady=is_steady, num_calls=num_calls).to_host(wanted)
            if self._is_debug:
                debug.check_and_poison(step, self.texts, self.rng.seed, self.rng.sequences, self.state.lengths)
        return result

    def _bound(self, growth: Growth | None) -> Growth | None:
        """Bind a growth to the batch's sampling parameters; the same object for the same growth."""
        if growth is not self._growth[0]:
            self._growth = growth, None if growth is None else growth.bind(self.sampling)
        return self._growth[1]

    def _work(
        self, propose: Callable[[], Draft], timer: StepTimer, *, observes: bool, needs_logits: bool
    ) -> LaunchedStep:
        """Propose, verify, accept, emit, commit, observe; the last one only where the drafter is on the device."""
        draft = propose() or self.run.propose(self.seen.pending, None, 1)
        draft = self._limited(draft) if observes else draft
        timer.lap("draft_s")
        raw, hidden = self._recorded(self.lm.verify, self.state, draft.tree)
        logits = self.processing.target(self.seen, draft.tree, raw)
        logits, highest = mask_invalid_logits(draft.tree, logits, self.sampling, masks=self._isolates_nan)
        timer.lap("verify_s")
        acceptance = accept(draft.tree, logits, self.sampling, self.rng, draft.probs, self.verifier, draft.max_depth)
        lengths = acceptance.path_lengths.masked_fill(self.texts.is_finished, 0)
        hidden = None if hidden is None else on_path(hidden, acceptance.path)
        acceptance = replace(acceptance, path_lengths=lengths, hidden=hidden)
        report = emit(
            draft.tree.tokens, acceptance.path, lengths, acceptance.next_token, self.texts, highest,
            may_be_infinite=self.sampling.is_greedy,
        )  # fmt: skip
        timer.lap("accept_s")
        # A text that ends within the path is committed up to its last token, which is pending.
        lengths = lengths.minimum(report[:, -3].int())
        self.processing.refuse_path_ends(logits, acceptance.path, lengths)
        self.lm.commit(self.state, acceptance.path, lengths)
        timer.lap("commit_s")
        path_logits = on_path(logits, acceptance.path) if needs_logits else None
        raw_path_logits = path_logits if raw is logits or not needs_logits else on_path(raw, acceptance.path)
        given = draft, acceptance, logits, report[:, :-3], self.sampling, self.verifier
        probs = path_probs(*given) if self._keeps_probs else None
        if observes:
            self._let_draft(self.run.observe, acceptance)
            timer.lap("draft_s")
        draft = draft if self._is_debug else replace(draft, probs=None, grown=None)  # a graph keeps what is returned
        path, kept = (path_logits, raw_path_logits, report), logits if self._is_debug else None
        return LaunchedStep(draft, acceptance, *path, timer, logits=kept, path_probs=probs)

    def _limited(self, draft: Draft) -> Draft:
        """Cut the trees of rows that may have fewer nodes, whatever has drafted them."""
        return draft if self.seen.nodes is None else replace(draft, tree=keep_first(draft.tree, self.seen.nodes))

    def _rng_at_ends(self) -> Random:
        """Return the random numbers at the ends of the texts, which are copied: ``emit`` advances them in place."""
        return self.rng.at(self.texts.lengths.clone())

    def _recorded(self, run: Callable[..., Any], *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Run the target; return logits, and the hidden states that the drafter reads, or None where it reads none."""
        if self.hidden_layers is None:
            return run(*inputs), None
        logits, hidden = run(*inputs, hidden_layers=self.hidden_layers)
        return logits, hidden

    def _let_draft(self, part: Callable[..., Any], *inputs: Any) -> Any:
        """Call a method of the drafter's run; where it fails, decoding goes on without it, and None is returned."""
        try:
            return part(*inputs)
        except Exception as problem:
            self._decode_without_drafter(problem)
            return None

    def _decode_without_drafter(self, problem: Exception) -> None:
        """Fail over to plain decoding, unless memory ran out or the device failed: the target would be next."""
        if self.capture.is_capturing or isinstance(problem, (torch.OutOfMemoryError, torch.AcceleratorError)):
            raise problem
        logger.warning("the drafter failed, decoding goes on without it: %s: %s", type(problem).__name__, problem)
        self.problem = problem
        self._use(NoDrafter().start(self._vocab_size, [], self.rng))

    def _use(self, run: DraftRun) -> None:
        """Let a run draft, with the batch's sampling and logits processor."""
        self.capture.clear()
        capture, processing = self.capture, self.processing  # not this step, which would be a cycle
        self.run, run.launch = run, lambda run, key, work: capture.part(run, (*key, *processing.key), work)
        run.sampling, run.processor, run.forced = self.sampling, processing.draft(self.seen), processing.forced

    def fill(self, drafter: Drafter, requests: Sequence[Request]) -> Tensor:
        """Prefill a text in every row, in place of those that were there.

        Args:
            drafter: the same one every time.
            requests: one for each row.

        Returns:
            float[batch, vocab] logits of their first tokens; empty for one free row, which ``admit`` fills first.
        """
        prompts = [request.prompt for request in requests]
        self.hidden_layers = drafter.hidden_layers
        for row, request in enumerate(requests):
            self._write(row, request)
        if self._is_filled:
            self.state.reset()
        is_free = len(requests) == 1 and requests[0].problem is not None and self.hidden_layers is None
        empty = self.state.lengths[:0], None
        logits, hidden = empty if is_free else self._recorded(self.lm.prefill, self.state, *padded_prompts(prompts))
        if self._is_filled and self.run.can_begin:
            self.run.begin(range(len(prompts)), prompts)
        else:
            self._use(started(drafter, self._vocab_size, prompts, self._rng_at_ends()))
        if hidden is not None:
            self.run.read_prompts(range(len(prompts)), hidden)
        self._is_filled = True
        return logits

    def admit(self, row: int, request: Request, prefilled: PromptRun | None = None) -> Tensor:
        """Begin another text in a row whose own has ended; return float[1, vocab] logits of its first token.

        Its prompt is run, unless it was run before into a state of one row and the same sizes.
        """
        self._write(row, request)
        self.run.prefixes = None if prefilled is None else prefilled.prefixes
        self._let_draft(self.run.begin, [row], [request.prompt])
        if prefilled is None:
            logits, hidden = self._recorded(self.lm.prefill_row, self.state, row, torch.tensor([request.prompt]))
        else:
            logits, hidden = prefilled.logits, prefilled.hidden
            self.state.write_row(row, prefilled.state)
        if hidden is not None:
            self.run.read_prompts([row], hidden)
        return logits

    def select(self, rows: Sequence[int], requests: Sequence[Request]) -> DecodeStep:
        """Return a step of some rows, between two steps; this one is not used again.

        Args:
            rows: of this batch; one that occurs twice is given another text by ``admit`` the second time.
            requests: what each of them holds from now on.
        """
        other, index = copy(self), torch.tensor(rows, device=self._seeds.device)
        other.state, other._seeds, other._growth = self.state.select(index), self._seeds[index], (None, None)
        nodes = None if all(request.budget is None for request in requests) else torch.zeros_like(index)
        other.texts = replace(self.texts.select(index), nodes=nodes)  # which are written below
        other.processing, other.seen = self.processing.of_rows(len(rows)), Seen.of(other.texts)
        other.rng = Random(other._seeds, self.rng.sequences[index], other.seen.lengths)
        other.sampling = BatchSampling({request.sampling for request in requests}, len(rows), index.device)
        for row, request in enumerate(requests):
            other._write_rules(row, request)
        other._use(other._let_draft(selected, self.run, index, other._rng_at_ends()) or other.run)
        return other

    def reserve(self, max_length: int, growth: Growth | None, budget: int, *, begins: bool) -> None:
        """Let the drafter allocate its state; with ``begins`` the first step drafts."""
        self.run.reserve(max_length, self._bound(growth), budget, begins=begins)

    def first_tokens(self, rows: Tensor, logits: Tensor) -> tuple[list[int], Tensor]:
        """Draw the tokens after the prompts of int64[count] rows from float[count, vocab] logits; make them pending.

        They are returned with the logits that they were drawn from.

        Raises:
            ValueError: logits that have no distribution.
        """
        sampling, rng = self.sampling.select(rows), self._rng_at_ends().select(rows)
        logits = self.processing.first(self.texts, rows, logits)
        self.processing.refuse_ends(logits, rows)
        tokens = first_tokens(logits, sampling, rng)
        self.texts.pending[rows] = self.texts.tokens[rows, self.texts.lengths[rows]] = tokens
        return tokens.tolist(), logits

    def set_finished(self, row: int, *, is_finished: bool = True) -> None:
        """Make a sequence inactive, or active, from the next step on."""
        self.texts.is_finished[row].fill_(is_finished)
        if is_finished:
            self.processing.end(row)

    def _write(self, row: int, request: Request) -> None:
        """Write what a request asks for to its row; in place, as captured steps and the drafter read these tensors."""
        self._write_rules(row, request)
        self._seeds[row] = (request.seed + (1 << 63)) % (1 << 64) - (1 << 63)
        self.rng.sequences[row] = request.sequence
        self.texts.begin(row, request.prompt, request.max_new_tokens, sorted(request.stop_token_ids))

    def _write_rules(self, row: int, request: Request) -> None:
        """Write how the tokens of a row are drafted and drawn."""
        self.texts.limit_nodes(row, request.budget)
        given = request.processors, request.rules, request.grammar, len(request.prompt), request.stop_token_ids
        self.processing.begin(row, *given)
        self.sampling.write(row, request.sampling)
