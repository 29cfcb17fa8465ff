"""One decode step on the device: propose, verify, accept, commit, emit, observe.

Nothing here reads the device.  What a step leaves for the next one is in tensors that are written in place, stop tokens
and lengths are checked on the device, and the host reads a step's tokens later.  So a step can be captured once and
replayed: see ``captured_step``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from stree.decode import debug
from stree.decode.batch_token_rules import BatchTokenRules
from stree.decode.cuda_graphs import Graphs
from stree.decode.logits_processors import NodeProcessor, TreeProcessing
from stree.decode.prompts import PrefilledPrompt
from stree.decode.request import Request
from stree.decode.step_result import LaunchedStep, StepResult, Wanted
from stree.decode.timing import StepTimer
from stree.drafters import Draft, Drafter, DraftRun, NoDrafter, padded_prompts
from stree.growth import Growth
from stree.kernels.step.texts import Seen, Texts, emit, unchecked_maxima
from stree.models.state import DecodeState
from stree.models.tree_lm import TreeLM
from stree.sampling import BatchSampling, Random
from stree.tree import TokenTree
from stree.verify import Acceptance, Verifier, accept

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

    Attributes:
        rng: random numbers, keyed by the seed of each row.
        texts: of each row, with its limit and stop tokens.
        seen: the texts as the present step found them.
        run: the drafter's run for the same sequences, from ``fill`` on.
        problem: why decoding went on without the drafter, or None.
        hidden_layers: layers of the target whose hidden states the drafter reads, or None.
        graphs: CUDA graphs of captured steps, or None where every operation of every step is launched.
    """

    run: DraftRun
    problem: Exception | None = None
    graphs: Graphs | None = None

    def __init__(
        self, lm: TreeLM, state: DecodeState, *, sampling: BatchSampling, verifier: str | Verifier, max_length: int,
        most_stops: int = 0, processor: NodeProcessor | None = None,
    ) -> None:  # fmt: skip
        self.lm, self.state, self.sampling, self.verifier = lm, state, sampling, verifier
        rules = BatchTokenRules(len(state.lengths), lm.vocab_size, state.lengths.device)
        self._processing = TreeProcessing(processor, rules)
        self.texts = Texts.empty(len(state.lengths), max_length, most_stops, state.lengths.device)
        self.seen = Seen.of(self.texts)
        self._seeds = torch.zeros_like(self.texts.lengths)
        self.rng = Random(self._seeds, self._seeds.clone(), self.seen.lengths)
        self._is_filled, self._is_debug = False, debug.checks_memory()
        self.hidden_layers: Sequence[int] | None = None  # that the drafter reads
        self._growth: tuple[Growth | None, Growth | None] = None, None  # the last one, and bound to the sampling

    def __call__(self, growth: Growth | None, budget: int, wanted: Wanted = Wanted()) -> StepResult:  # noqa: B008
        """Launch a step of at most ``budget`` nodes a sequence, and the copies of what the host reads of it."""
        step = self._launch(self._bound(growth), budget, needs_logits=wanted.needs_logits)
        result = step.to_host(wanted)
        if self._is_debug:
            debug.check_and_poison(step, self.texts, self.rng.seed, self.rng.sequences, self.state.lengths)
        return result

    def _bound(self, growth: Growth | None) -> Growth | None:
        """Bind a growth to the batch's sampling parameters; the same object for the same growth."""
        if growth is not self._growth[0]:
            self._growth = growth, None if growth is None else growth.bind(self.sampling)
        return self._growth[1]

    def _launch(self, growth: Growth | None, budget: int, *, needs_logits: bool) -> LaunchedStep:
        timer = StepTimer(self.state.lengths.device)
        draft = self._propose(growth, budget)
        timer.lap("draft_s")
        result = self._verify(draft, timer, needs_logits=needs_logits)
        self._observe(result.acceptance)
        timer.lap("draft_s")
        return result

    def _verify(self, draft: Draft, timer: StepTimer, *, needs_logits: bool) -> LaunchedStep:
        """Do the target's part of a step: verify, accept, commit, emit."""
        raw, hidden = self._recorded(self.lm.verify, self.state, draft.tree)
        logits = self._processing.target(self.seen, draft.tree, raw)
        timer.lap("verify_s")
        acceptance = accept(draft.tree, logits, self.sampling, self.rng, draft.probs, self.verifier, draft.max_depth)
        acceptance = replace(acceptance, path_lengths=acceptance.path_lengths.masked_fill(self.texts.is_finished, 0))
        if hidden is not None:
            path = acceptance.path.clamp(min=0).long()[..., None, None]
            acceptance = replace(acceptance, hidden=hidden.take_along_dim(path.to(hidden.device), 1))
        timer.lap("accept_s")
        report = self._emit(draft.tree, acceptance, logits)
        timer.lap("accept_s")
        # A text that ends within the path is committed up to its last token, which is pending.
        lengths = acceptance.path_lengths.minimum(report[:, -3].int())
        if not self.sampling.is_greedy:
            self._processing.refuse_path_ends(logits, acceptance.path, lengths)
        self.lm.commit(self.state, acceptance.path, lengths)
        timer.lap("commit_s")
        on_path = raw_on_path = None
        if needs_logits:
            path = acceptance.path.clamp(min=0).long()[..., None]
            on_path = raw_on_path = logits.take_along_dim(path, 1)
            if raw is not logits:
                raw_on_path = raw.take_along_dim(path, 1)
        kept = logits if self._is_debug else None
        return LaunchedStep(draft, acceptance, on_path, raw_on_path, report, timer, logits=kept)

    def _rng_at_ends(self) -> Random:
        """Return the random numbers at the ends of the texts, which are copied: ``emit`` advances them in place."""
        return self.rng.at(self.texts.lengths.clone())

    def _recorded(self, run: Callable[..., Any], *inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Run the target; return logits, and the hidden states that the drafter reads, or None where it reads none."""
        if self.hidden_layers is None:
            return run(*inputs), None
        logits, hidden = run(*inputs, hidden_layers=self.hidden_layers)
        return logits, hidden

    def _propose(self, growth: Growth | None, budget: int) -> Draft:
        """Let the drafter propose; where it fails, decoding goes on without it."""
        self.seen.update(self.texts)
        try:
            return self.run.propose(self.seen.pending, growth, budget)
        except Exception as problem:
            self._decode_without_drafter(problem)
            return self.run.propose(self.seen.pending, None, 1)

    def _observe(self, acceptance: Acceptance) -> None:
        """Pass the accepted paths to the drafter; where it fails, decoding goes on without it."""
        try:
            self.run.observe(acceptance)
        except Exception as problem:
            self._decode_without_drafter(problem)

    def _emit(self, tree: TokenTree, acceptance: Acceptance, logits: Tensor) -> Tensor:
        """Append the accepted tokens, cut at stops and limits: see `stree.kernels.step.texts.emit`.

        ``accept`` has checked the logits where the host can read them; elsewhere the report says what it would refuse.
        """
        return emit(
            tree.tokens, acceptance.path, acceptance.path_lengths, acceptance.next_token, self.texts,
            unchecked_maxima(logits), may_be_infinite=self.sampling.is_greedy,
        )  # fmt: skip

    def _decode_without_drafter(self, problem: Exception) -> None:
        """Fail over to plain decoding, unless memory ran out or the device failed: the target would be next."""
        if isinstance(problem, (torch.OutOfMemoryError, torch.AcceleratorError)):
            raise problem
        logger.warning("the drafter failed, decoding goes on without it: %s: %s", type(problem).__name__, problem)
        self.problem = problem
        self._use(NoDrafter().start(self.lm.vocab_size, [], self.rng))

    def _use(self, run: DraftRun) -> None:
        """Let a run draft, with the batch's texts and logits processor."""
        self.run, run.seen, run.processor = run, self.seen, self._processing.draft(self.seen)

    def fill(self, drafter: Drafter, requests: Sequence[Request]) -> Tensor:
        """Prefill a text in every row, in place of those that were there.

        Args:
            drafter: the same one every time.
            requests: one for each row.

        Returns:
            float[batch, vocab] logits of their first tokens.
        """
        prompts = [request.prompt for request in requests]
        input_ids, lengths = padded_prompts(prompts)
        self.hidden_layers = drafter.hidden_layers
        for row, request in enumerate(requests):
            self._write(row, request)
        if self._is_filled:
            self.state.reset()
        logits, hidden = self._recorded(self.lm.prefill, self.state, input_ids, lengths)
        if self._is_filled and self.run.can_begin:
            self.run.begin(range(len(prompts)), prompts)
        else:
            run = drafter.start(self.lm.vocab_size, prompts, self._rng_at_ends())
            if not isinstance(run, DraftRun):
                what = f"{type(drafter).__name__}.start must return a stree.drafters.DraftRun"
                raise TypeError(f"{what}, got {type(run).__name__}")
            self._use(run)
        if hidden is not None:
            self.run.read_prompts(range(len(prompts)), hidden)
        self._is_filled = True
        return logits

    def admit(self, row: int, request: Request, prefilled: PrefilledPrompt | None = None) -> Tensor:
        """Begin another text in a row whose own has ended; return float[1, vocab] logits of its first token.

        Its prompt is run, unless it was run before into a state of one row and the same sizes.
        """
        self._write(row, request)
        try:
            self.run.begin([row], [request.prompt])
        except Exception as problem:
            self._decode_without_drafter(problem)
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
        other.state, other._seeds = self.state.select(index), self._seeds[index]
        other._processing = self._processing.of_rows(len(rows))
        other.texts = Texts(*(getattr(self.texts, part.name)[index] for part in fields(Texts)))
        other.seen = Seen.of(other.texts)
        other.rng = Random(other._seeds, self.rng.sequences[index], other.seen.lengths)
        kinds = {request.sampling for request in requests}
        other.sampling, other._growth = BatchSampling(kinds, len(rows), index.device), (None, None)
        for row, request in enumerate(requests):
            other._write_rules(row, request)
        other._use(self.run.select(index, other._rng_at_ends()))
        return other

    def reserve(self, max_length: int, growth: Growth | None, budget: int, *, begins: bool) -> None:
        """Let the drafter allocate its state; with ``begins`` the first step drafts."""
        self.run.reserve(max_length, self._bound(growth), budget, begins=begins)

    def first_tokens(self, rows: Tensor, logits: Tensor) -> tuple[list[int], Tensor]:
        """Draw the tokens after the prompts of int64[count] rows from float[count, vocab] logits; make them pending.

        Returns:
            The tokens, and the logits that they were drawn from.

        Raises:
            ValueError: logits that have no distribution.
        """
        sampling, rng = self.sampling.select(rows), self._rng_at_ends().select(rows)
        logits = self._processing.first(self.texts, rows, logits)
        if not self.sampling.is_greedy:
            self._processing.refuse_ends(logits, rows)
        if not bool(sampling.has_distribution(logits).all()):
            kind = "NaN" if bool(logits.isnan().any()) else "infinite"
            raise ValueError(f"the target's logits are {kind} after the prompt")
        if sampling.is_greedy:
            tokens = logits.argmax(-1)
        else:
            tokens = rng.choice("target", sampling.probs(logits), torch.zeros_like(rows))
        self.texts.pending[rows] = self.texts.tokens[rows, self.texts.lengths[rows]] = tokens
        return tokens.tolist(), logits

    def set_finished(self, row: int, *, is_finished: bool = True) -> None:
        """Make a sequence inactive, or active, from the next step on."""
        self.texts.is_finished[row].fill_(is_finished)
        if is_finished:
            self._processing.end(row)

    def _write(self, row: int, request: Request) -> None:
        """Write what a request asks for to its row; in place, as captured steps and the drafter read these tensors."""
        texts, stops, length = self.texts, sorted(request.stop_token_ids), len(request.prompt)
        self._write_rules(row, request)
        self._seeds[row] = (request.seed + (1 << 63)) % (1 << 64) - (1 << 63)
        self.rng.sequences[row] = request.sequence
        texts.tokens[row, :length] = torch.tensor(request.prompt)
        texts.lengths[row], texts.limit[row] = length, length + request.max_new_tokens
        texts.stop[row] = torch.tensor(stops + [-1] * (texts.stop.shape[1] - len(stops)))

    def _write_rules(self, row: int, request: Request) -> None:
        """Write how the tokens of a row are drawn."""
        self._processing.begin(row, request.processors, request.rules, len(request.prompt))
        self.sampling.write(row, request.sampling)
