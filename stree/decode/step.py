"""One decode step on the device: propose, verify, accept, commit, emit, observe.

Nothing here reads the device.  What a step leaves for the next one is in tensors that are written in place, stop tokens
and lengths are checked on the device, and the host reads a step's tokens later.  So a step can be captured once and
replayed: see ``captured_step``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stree.decode.cuda_graphs import Graphs
from stree.decode.step_result import StepResult
from stree.decode.timing import StepTimer
from stree.drafters import Draft, Drafter, DraftRun, NoDrafter, padded_prompts
from stree.growth import Growth
from stree.kernels.step.bookkeeping import Texts, emit
from stree.models.state import DecodeState
from stree.models.tree_lm import TreeLM
from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify import Acceptance, accept

__all__ = ["DecodeStep"]

logger = logging.getLogger("stree")


class DecodeStep:
    """The steps of a batch of sequences, each of which starts where the last one ended on the device.

    Args:
        lm: the target.
        state: its state, empty.
        rng: random numbers; its sequences are written, its positions are not used.
        sampling: how the target's tokens are drawn.
        verifier: see ``stree.accept``.
        stop_token_ids: tokens that end a sequence.

    Attributes:
        run: the drafter's run for the same sequences, from ``fill`` on.
        pending: int64[batch], emitted tokens that were not yet run.
        num_new: int64[batch], tokens emitted.
        limit: int64[batch], most new tokens.
        is_finished: bool[batch], inactive sequences.
        problem: why decoding went on without the drafter, or None.
        graphs: CUDA graphs of captured steps, or None where every operation of every step is launched.
    """

    run: DraftRun
    problem: Exception | None = None
    graphs: Graphs | None = None

    def __init__(
        self,
        lm: TreeLM,
        state: DecodeState,
        rng: Random,
        *,
        sampling: Sampling,
        verifier: str,
        stop_token_ids: Iterable[int],
    ) -> None:
        self.lm, self.state, self.rng = lm, state, rng
        self.sampling, self.verifier = sampling, verifier
        self.pending = torch.zeros_like(rng.sequences)
        self.num_new = torch.zeros_like(rng.sequences)
        self.limit = torch.zeros_like(rng.sequences)
        self.is_finished = torch.ones_like(rng.sequences, dtype=torch.bool)
        self._stop = torch.tensor(sorted(stop_token_ids), dtype=torch.long, device=rng.sequences.device)
        self._is_filled = False

    def __call__(self, growth: Growth | None, budget: int) -> StepResult:
        """Launch a step of at most ``budget`` nodes a sequence."""
        return self._launch(growth, budget).to_host()

    def _launch(self, growth: Growth | None, budget: int) -> StepResult:
        timer = StepTimer(self.pending.device)
        draft = self._propose(growth, budget)
        timer.lap("draft_s")
        result = self._verify(draft, timer)
        self._observe(result.acceptance)
        timer.lap("draft_s")
        return result

    def _verify(self, draft: Draft, timer: StepTimer) -> StepResult:
        """Do the target's part of a step: verify, accept, commit, emit."""
        logits = self.lm.verify(self.state, draft.tree)
        timer.lap("verify_s")
        rng = self.rng.at(self.state.lengths)
        acceptance = accept(draft.tree, logits, self.sampling, rng, draft.probs, self.verifier, draft.max_depth)
        acceptance = replace(acceptance, path_lengths=acceptance.path_lengths.masked_fill(self.is_finished, 0))
        timer.lap("accept_s")
        self.lm.commit(self.state, acceptance.path, acceptance.path_lengths)
        timer.lap("commit_s")
        report = self._emit(draft.tree, acceptance)
        timer.lap("accept_s")
        return StepResult(draft, acceptance, logits, report, timer)

    def _propose(self, growth: Growth | None, budget: int) -> Draft:
        """Let the drafter propose; where it fails, decoding goes on without it."""
        try:
            return self.run.propose(self.pending, growth, budget)
        except Exception as problem:
            self._decode_without_drafter(problem)
            return self.run.propose(self.pending, None, 1)

    def _observe(self, acceptance: Acceptance) -> None:
        """Pass the accepted paths to the drafter; where it fails, decoding goes on without it."""
        try:
            self.run.observe(acceptance)
        except Exception as problem:
            self._decode_without_drafter(problem)

    def _emit(self, tree: TokenTree, acceptance: Acceptance) -> Tensor:
        """Append the accepted tokens, cut at stops and limits: see `stree.kernels.step.bookkeeping.emit`."""
        texts = Texts(self.pending, self.num_new, self.limit, self.is_finished, self._stop)
        return emit(tree.tokens, acceptance.path, acceptance.path_lengths, acceptance.next_token, texts)

    def _decode_without_drafter(self, problem: Exception) -> None:
        """Fail over to plain decoding."""
        logger.warning("the drafter failed, decoding goes on without it: %s: %s", type(problem).__name__, problem)
        self.problem = problem
        self.run = NoDrafter().start(self.lm.vocab_size, [], self.rng)

    def fill(self, drafter: Drafter, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Tensor:
        """Prefill a text in every row, in place of those that were there.

        Args:
            drafter: the same one every time.
            prompts: token lists.
            max_new_tokens: most new tokens a sequence.
            seed: of the random numbers.

        Returns:
            float[batch, vocab] logits of their first tokens.
        """
        input_ids, lengths = padded_prompts(prompts)
        if not self._is_filled:
            logits = self.lm.prefill(self.state, input_ids, lengths)
        else:
            filled = self.lm.new_state(len(prompts), input_ids.shape[1], self.state.max_nodes)
            logits = self.lm.prefill(filled, input_ids, lengths)
            self.state.overwrite(filled)
        if isinstance(self.rng.seed, Tensor):
            self.rng.seed.fill_((seed + (1 << 63)) % (1 << 64) - (1 << 63))
        self.rng.sequences.copy_(torch.arange(len(prompts)))
        self.limit.fill_(max_new_tokens)
        if self._is_filled and self.run.can_restart:
            self.run.restart(prompts)
        else:
            self.run = drafter.start(self.lm.vocab_size, prompts, self.rng.at(lengths.to(self.pending.device)))
            if not isinstance(self.run, DraftRun):
                what = f"{type(drafter).__name__}.start must return a stree.drafters.DraftRun"
                raise TypeError(f"{what}, got {type(self.run).__name__}")
        self._is_filled = True
        return logits

    def admit(self, row: int, sequence: int, prompt: list[int]) -> tuple[Tensor, Random]:
        """Run the prompt of another sequence into a row whose own has finished.

        Returns:
            float[1, vocab] logits of its first token, and the random numbers of that.
        """
        try:
            self.run.admit(row, prompt)
        except Exception as problem:
            self._decode_without_drafter(problem)
        length = torch.tensor([len(prompt)], device=self.pending.device)
        logits = self.lm.prefill_row(self.state, row, torch.tensor([prompt]))
        self.rng.sequences[row] = sequence  # in place: the drafter's numbers are keyed by the same tensor
        return logits, Random(self.rng.seed, self.rng.sequences[row : row + 1], length)

    def begin(self, row: int, token: int, *, is_finished: bool) -> None:
        """Start a sequence whose prompt was run and whose first token was emitted."""
        self.pending[row] = token
        self.num_new[row] = 1
        self.is_finished[row] = is_finished

    def finish(self, row: int) -> None:
        """Make a sequence inactive from the next step on."""
        self.is_finished[row] = True
