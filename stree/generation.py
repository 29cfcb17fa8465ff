"""The loop: draft a tree, verify it in one pass, accept a path, commit it.

It knows a drafter, a growth and a model by their protocols only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from stree.drafters import Draft, Drafter, NoDrafter, SuffixDrafter
from stree.growth import Growth
from stree.models.tree_lm import TreeLM
from stree.sampling import Random, Sampling
from stree.verify import VERIFIERS, Acceptance, accept

__all__ = ["Generation", "GenerationError", "GenerationInterrupted", "Streamer", "generate"]

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Generation:
    """What ``generate`` returns.

    Attributes:
        sequences: prompt and new tokens of each input, in input order; a stop token is kept.
        stats: JSON-able; seconds by part, steps, tau, draft calls, acceptance by depth, finish reasons.
    """

    sequences: list[list[int]]
    stats: dict[str, Any]


class GenerationError(RuntimeError):
    """A drafter, the model or a streamer failed; ``output`` holds what was generated before."""

    def __init__(self, message: str, output: Generation) -> None:
        super().__init__(message)
        self.output = output


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C; ``output`` holds what was generated before."""

    def __init__(self, output: Generation) -> None:
        super().__init__("generation interrupted")
        self.output = output


class Streamer(Protocol):
    """Receives tokens as transformers' streamers do: the prompt first, then what each step emits."""

    def put(self, value: Tensor) -> None:
        """Take int64[count] tokens."""
        ...

    def end(self) -> None:
        """Finish."""
        ...


def generate(
    lm: TreeLM,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter | None = None,
    growth: Growth | None = None,
    budget: int | str = 16,
    verifier: str = "auto",
    sampling: Sampling | None = None,
    max_new_tokens: int = 128,
    stop_token_ids: Iterable[int] | None = None,
    logits_processor: LogitsProcessor | None = None,
    seed: int = 0,
    streamer: Streamer | None = None,
) -> Generation:
    """Generate from a target, token for token distributed as the target alone would.

    Args:
        lm: the target.
        prompts: token lists of any lengths, none empty; they run as one batch.
        drafter: what proposes trees; None for ``SuffixDrafter()``.
        growth: the shape of a model drafter's trees; None for its default, ``DySpec()``.
        budget: most nodes a step, root included; 1 is plain decoding.
        verifier: "auto", "match" or "rejection"; see ``stree.accept``.
        sampling: temperature, top-k, top-p; None for greedy.
        max_new_tokens: most new tokens a sequence.
        stop_token_ids: tokens that end a sequence.
        logits_processor: a function of int64[1, length] text and float[1, vocab] logits that returns logits, as
            transformers' processors are; called once for every node, on the host.
        seed: of the random numbers.
        streamer: receives tokens as they are emitted; one prompt only.

    Returns:
        Sequences and statistics.

    Raises:
        ValueError: an argument outside its range; the message names it.
        NotImplementedError: budget="auto".
        GenerationError: something failed in the loop; it carries what was generated before.
        GenerationInterrupted: Ctrl-C; likewise.
    """
    sampling = Sampling() if sampling is None else sampling
    nodes = _check(lm, prompts, budget, verifier, max_new_tokens, streamer)
    drafter = SuffixDrafter() if drafter is None else drafter
    if nodes == 1:
        drafter = NoDrafter()
    growth = getattr(drafter, "default_growth", None) if growth is None else growth
    if growth is not None:
        growth = growth.bind(sampling)
        growth.plan(nodes)  # refuses a fixed shape above the budget
    session = _Session(lm, [list(prompt) for prompt in prompts], sampling, max_new_tokens, stop_token_ids, seed)
    session.logits_processor, session.streamer = logits_processor, streamer
    session.settings = {"growth": None if growth is None else str(growth), "budget": nodes, "verifier": verifier}
    try:
        session.run(drafter, growth, nodes, verifier)
    except KeyboardInterrupt as interrupt:
        raise GenerationInterrupted(session.output("interrupted")) from interrupt
    except Exception as error:
        if not session.is_started:
            raise
        message = f"generation failed after {session.num_new_tokens} new tokens: {error}"
        raise GenerationError(message, session.output("error")) from error
    return session.output("length")


@dataclass(slots=True)
class _Stats:
    """Sums over the steps of a run."""

    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    accept_s: float = 0.0
    commit_s: float = 0.0
    total_s: float = 0.0
    steps: int = 0
    draft_calls: int = 0
    nodes: int = 0
    row_steps: int = 0
    row_tokens: int = 0
    accepted: list[int] = field(default_factory=list)  # row steps that accepted exactly i drafted nodes

    def record(self, draft: Draft, num_accepted: Sequence[int]) -> None:
        """Count a step: nodes accepted by each sequence that took part."""
        self.steps += 1
        self.draft_calls += draft.num_calls
        self.nodes += draft.tree.tokens.shape[1]
        self.row_steps += len(num_accepted)
        self.row_tokens += sum(num_accepted) + len(num_accepted)
        for count in num_accepted:
            self.accepted += [0] * (count + 1 - len(self.accepted))
            self.accepted[count] += 1


class _Session:
    """One call of ``generate``: texts on the host, state on the device."""

    logits_processor: LogitsProcessor | None = None
    streamer: Streamer | None = None

    def __init__(
        self,
        lm: TreeLM,
        prompts: list[list[int]],
        sampling: Sampling,
        max_new_tokens: int,
        stop_token_ids: Iterable[int] | None,
        seed: int,
    ) -> None:
        self.lm, self.prompts, self.sampling, self.max_new_tokens = lm, prompts, sampling, max_new_tokens
        self.stop = frozenset(stop_token_ids or ())
        self.new: list[list[int]] = [[] for _ in prompts]
        self.reasons: list[str | None] = [None] * len(prompts)
        self.device = lm.device  # asked for once: it is looked up through the model's modules
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self.rng = Random(seed, torch.arange(len(prompts), device=self.device), lengths)
        self.stats = _Stats()
        self.settings: dict[str, Any] = {}
        self.is_started = False

    @property
    def num_new_tokens(self) -> int:
        """Tokens emitted so far."""
        return sum(map(len, self.new))

    def run(self, drafter: Drafter, growth: Growth | None, budget: int, verifier: str) -> None:
        """Generate until every sequence has finished."""
        began = clock = self._clock()
        lengths = torch.tensor([len(prompt) for prompt in self.prompts])
        width = int(lengths.max())
        input_ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in self.prompts])
        # The last step starts below the limit and may commit a whole path beyond it.
        state = self.lm.new_state(len(self.prompts), width + self.max_new_tokens + budget, budget)
        logits = self.lm.prefill(state, input_ids, lengths)
        run = drafter.start(self.lm.vocab_size, self.prompts, self.rng)
        pending = self._first_token(logits)
        if self.streamer is not None:
            self.streamer.put(input_ids[0])
        self.is_started = True
        self._emit([[token] for token in pending.tolist()])
        self.stats.prefill_s = self._clock() - clock
        while None in self.reasons:
            clock = self._clock()
            draft = run.propose(pending, growth, budget)
            clock = self._lap("draft_s", clock)
            logits = self._process(draft, self.lm.verify(state, draft.tree))
            clock = self._lap("verify_s", clock)
            self.rng = self.rng.at(state.lengths.long())
            acceptance = accept(draft.tree, logits, self.sampling, self.rng, draft.laws, verifier, draft.max_depth)
            if any(reason is not None for reason in self.reasons):
                acceptance = self._hold_finished(acceptance)
            clock = self._lap("accept_s", clock)
            self.lm.commit(state, acceptance.path, acceptance.path_lengths)
            clock = self._lap("commit_s", clock)
            run.observe(acceptance)
            clock = self._lap("draft_s", clock)
            pending = torch.where(acceptance.path_lengths > 0, acceptance.next_token, pending)
            self._take(draft, acceptance)
            self._lap("accept_s", clock)
            self.stats.total_s = self._clock() - began

    def output(self, reason: str) -> Generation:
        """Report texts and statistics; sequences that have not finished end for ``reason``."""
        stats, steps = self.stats, max(self.stats.row_steps, 1)
        reached = [sum(stats.accepted[depth:]) for depth in range(len(stats.accepted))]
        seconds = max(stats.total_s, 1e-9)
        report: dict[str, Any] = {
            "num_prompt_tokens": [len(prompt) for prompt in self.prompts],
            "num_new_tokens": [len(new) for new in self.new],
            "finish_reasons": [known or reason for known in self.reasons],
            "steps": stats.steps,
            "tau": stats.row_tokens / steps if stats.row_steps else 0.0,
            "draft_calls": stats.draft_calls,
            "nodes_per_step": stats.nodes / max(stats.steps, 1),
            "acceptance_by_depth": [now / before for before, now in zip(reached, reached[1:], strict=False)],
            "tokens_per_s": self.num_new_tokens / seconds,
            **self.settings,
        }
        for name in ("total_s", "prefill_s", "draft_s", "verify_s", "accept_s", "commit_s"):
            report[name] = getattr(stats, name)
        sequences = [prompt + new for prompt, new in zip(self.prompts, self.new, strict=True)]
        return Generation(sequences, report)

    def _first_token(self, logits: Tensor) -> Tensor:
        """Draw the token after each prompt: int64[batch]."""
        if self.logits_processor is not None:
            texts = [torch.tensor([prompt], device=logits.device) for prompt in self.prompts]
            rows = [self.logits_processor(text, logits[row : row + 1]) for row, text in enumerate(texts)]
            logits = torch.cat(rows)
        if bool(logits.isnan().any()):
            raise ValueError("the target's logits are NaN after the prompt")
        if self.sampling.is_greedy:
            return logits.argmax(-1)
        return self.rng.choice("target", self.sampling.law(logits), torch.zeros_like(self.rng.positions))

    def _process(self, draft: Draft, logits: Tensor) -> Tensor:
        """Run the logits processor on every node, its text being prompt, output and path."""
        if self.logits_processor is None:
            return logits
        logits = logits.clone()
        tokens, masks = draft.tree.tokens.tolist(), draft.tree.ancestor_mask.tolist()
        for row, (prompt, new) in enumerate(zip(self.prompts, self.new, strict=True)):
            if self.reasons[row] is not None:
                continue
            for node, ancestors in enumerate(masks[row]):
                path = [token for token, is_above in zip(tokens[row], ancestors, strict=True) if is_above]
                text = torch.tensor([prompt + new[:-1] + path], device=logits.device)  # new[-1] is the root
                logits[row, node] = self.logits_processor(text, logits[row, node][None])[0]
        return logits

    def _hold_finished(self, acceptance: Acceptance) -> Acceptance:
        """Let finished sequences stand still."""
        is_live = torch.tensor([reason is None for reason in self.reasons], device=acceptance.path.device)
        return replace(acceptance, path_lengths=acceptance.path_lengths * is_live)

    def _take(self, draft: Draft, acceptance: Acceptance) -> None:
        """Bring a step's tokens to the host."""
        tokens = draft.tree.tokens.gather(1, acceptance.path.clamp(min=0).long()).tolist()
        following = acceptance.next_token.tolist()
        lengths = acceptance.path_lengths.tolist()
        self.stats.record(draft, [length - 1 for length in lengths if length])
        self._emit(
            [
                [*path[1:length], token] if length else []
                for path, length, token in zip(tokens, lengths, following, strict=True)
            ]
        )

    def _emit(self, rows: list[list[int]]) -> None:
        """Append tokens to the texts, up to a stop token or the limit."""
        for row, tokens in enumerate(rows):
            if self.reasons[row] is not None:
                continue
            tokens = tokens[: self.max_new_tokens - len(self.new[row])]
            stop = next((place for place, token in enumerate(tokens) if token in self.stop), None)
            if stop is not None:
                tokens = tokens[: stop + 1]
                self.reasons[row] = "stop"
            self.new[row] += tokens
            if self.reasons[row] is None and len(self.new[row]) >= self.max_new_tokens:
                self.reasons[row] = "length"
            if self.streamer is not None and tokens:
                self.streamer.put(torch.tensor(tokens))
        if self.streamer is not None and None not in self.reasons:
            self.streamer.end()

    def _clock(self) -> float:
        """Read the time, seconds; waits for the device, so that parts are charged with their own work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _lap(self, name: str, since: float) -> float:
        """Charge the time since ``since`` to a part."""
        now = self._clock()
        setattr(self.stats, name, getattr(self.stats, name) + now - since)
        return now


def _check(
    lm: TreeLM,
    prompts: Sequence[Sequence[int]],
    budget: int | str,
    verifier: str,
    max_new_tokens: int,
    streamer: Streamer | None,
) -> int:
    """Refuse bad arguments before anything runs; return the budget."""
    if isinstance(budget, str):
        if budget == "auto":
            raise NotImplementedError('budget="auto" is not supported yet; pass a number of nodes')
        raise ValueError(f"budget must be a number of nodes, got {budget!r}")
    for name, value in (("budget", budget), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if verifier not in VERIFIERS:
        raise ValueError(f"verifier must be one of {', '.join(VERIFIERS)}, got {verifier!r}")
    if not prompts:
        raise ValueError("generate needs at least one prompt, got none")
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {row} is empty; every prompt needs at least one token")
        bad = next((token for token in prompt if not 0 <= token < lm.vocab_size), None)
        if bad is not None:
            raise ValueError(f"prompt {row} has token {bad}, outside the vocabulary of {lm.vocab_size}")
        if lm.max_length is not None and len(prompt) + max_new_tokens > lm.max_length:
            raise ValueError(
                f"prompt {row} of {len(prompt)} tokens plus {max_new_tokens} new ones exceeds max_length "
                f"{lm.max_length}"
            )
    if streamer is not None and len(prompts) > 1:
        raise ValueError(f"a streamer takes one prompt, got {len(prompts)}")
    return budget
