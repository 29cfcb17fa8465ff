"""One run of the loop: draft a tree, verify it in one pass, accept a path, commit it.

It knows a drafter, a growth and a model by their protocols only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from stree.drafters import Draft, Drafter
from stree.models.tree_lm import TreeLM
from stree.sampling import Random, Sampling
from stree.steering import Steering
from stree.verify import Acceptance, accept

__all__ = ["Generation", "Observer", "Session", "Streamer"]


@dataclass(frozen=True, slots=True)
class Generation:
    """What ``generate`` returns.

    Attributes:
        sequences: prompt and new tokens of each input, in input order; a stop token is kept.
        stats: JSON-able; seconds by part, steps, tau, draft calls, acceptance by depth, finish reasons.
    """

    sequences: list[list[int]]
    stats: dict[str, Any]


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


class Session:
    """One generation: texts on the host, state on the device.

    Args:
        lm: the target.
        prompts: token lists, checked by the caller.
        sampling: how the target's tokens are drawn.
        max_new_tokens: most new tokens a sequence.
        stop_token_ids: tokens that end a sequence.
        seed: of the random numbers.
        streamer: receives tokens as they are emitted, or None.
        observer: sees what every token was drawn from and may end a sequence, or None.
    """

    def __init__(
        self,
        lm: TreeLM,
        prompts: list[list[int]],
        *,
        sampling: Sampling,
        max_new_tokens: int,
        stop_token_ids: Iterable[int] | None,
        seed: int,
        streamer: Streamer | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.lm, self.prompts, self.sampling, self.max_new_tokens = lm, prompts, sampling, max_new_tokens
        self.streamer, self.observer = streamer, observer
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

    def run(self, drafter: Drafter, steering: Steering, verifier: str) -> None:
        """Generate until every sequence has finished."""
        began = clock = self._clock()
        lengths = torch.tensor([len(prompt) for prompt in self.prompts])
        width = int(lengths.max())
        input_ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in self.prompts])
        # The last step starts below the limit and may commit a whole path beyond it.
        nodes = steering.max_nodes
        state = self.lm.new_state(len(self.prompts), width + self.max_new_tokens + nodes, nodes)
        logits = self.lm.prefill(state, input_ids, lengths)
        run = drafter.start(self.lm.vocab_size, self.prompts, self.rng)
        pending = self._first_token(logits)
        if self.streamer is not None:
            self.streamer.put(input_ids[0])
        self.is_started = True
        self._emit([[token] for token in pending.tolist()], logits[:, None])
        self.stats.prefill_s = self._clock() - clock
        self.stats.total_s = self._clock() - began
        while None in self.reasons:
            clock = started = self._clock()
            draft = run.propose(pending, *steering.next())
            clock = self._lap("draft_s", clock)
            logits = self.lm.verify(state, draft.tree)
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
            self._take(draft, acceptance, logits)
            clock = self._lap("accept_s", clock)
            steering.observe(draft, acceptance, clock - started)
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
        if bool(logits.isnan().any()):
            raise ValueError("the target's logits are NaN after the prompt")
        if self.sampling.is_greedy:
            return logits.argmax(-1)
        return self.rng.choice("target", self.sampling.law(logits), torch.zeros_like(self.rng.positions))

    def _hold_finished(self, acceptance: Acceptance) -> Acceptance:
        """Let finished sequences stand still."""
        is_live = torch.tensor([reason is None for reason in self.reasons], device=acceptance.path.device)
        return replace(acceptance, path_lengths=acceptance.path_lengths * is_live)

    def _take(self, draft: Draft, acceptance: Acceptance, logits: Tensor) -> None:
        """Bring a step's tokens to the host; those after each node of the path were drawn from its logits."""
        tokens = draft.tree.tokens.gather(1, acceptance.path.clamp(min=0).long()).tolist()
        following = acceptance.next_token.tolist()
        lengths = acceptance.path_lengths.tolist()
        self.stats.record(draft, [length - 1 for length in lengths if length])
        rows = [
            [*path[1:length], token] if length else []
            for path, length, token in zip(tokens, lengths, following, strict=True)
        ]
        if self.observer is not None:
            logits = logits.take_along_dim(acceptance.path.clamp(min=0).long()[..., None], 1)
        self._emit(rows, logits)

    def _emit(self, rows: list[list[int]], logits: Tensor) -> None:
        """Append tokens to the texts, up to a stop token or the limit; token i was drawn from logits[:, i]."""
        for row, tokens in enumerate(rows):
            if self.reasons[row] is not None:
                continue
            tokens = tokens[: self.max_new_tokens - len(self.new[row])]
            stop = next((place for place, token in enumerate(tokens) if token in self.stop), None)
            if stop is not None:
                tokens = tokens[: stop + 1]
                self.reasons[row] = "stop"
            if self.observer is not None and tokens:
                end = self.observer.observe(row, tokens, logits[row, : len(tokens)])
                if end is not None:
                    tokens = tokens[:end]
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
