"""The result of a generation: texts, and statistics over its steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stree.decode.logprobs import TokenLogprob
from stree.decode.step_records import AcceptedCounts, StepRecord
from stree.decode.step_result import StepResult

__all__ = ["PARTS", "Generation", "Statistics"]

PARTS = ("draft_s", "verify_s", "accept_s", "commit_s")
UNTRAINED_TAU = 1.05  # tokens a step with a draft head that knows nothing of its target
MANY_STEPS = 200  # after which a draft of which nothing was accepted does not fit the target

logger = logging.getLogger("stree")


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of ``generate``.

    Attributes:
        sequences: prompt and new tokens of each input, in input order; a stop token is kept.
        stats: JSON-able; seconds by part, steps, tau, draft calls, acceptance by depth, finish reasons; under "rows"
            steps, tau and acceptance by depth of each sequence.
        logprobs: for each sequence the log probabilities of its new tokens; None where none asked for them.
        new_tokens: of each sequence, without its prompt.
        steps: for each sequence what happened in its steps; None where that was not asked for.
    """

    sequences: list[list[int]]
    stats: dict[str, Any]
    logprobs: list[list[TokenLogprob]] | None = None
    new_tokens: list[list[int]] = field(default_factory=list)
    steps: list[list[StepRecord]] | None = None


@dataclass(slots=True)
class Statistics:
    """Sums over the steps of a generation."""

    total_s: float = 0.0
    prefill_s: float = 0.0
    warm_up_s: float = 0.0  # compiling what runs for the first time, which no other time here includes
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    steps: int = 0
    draft_calls: int = 0
    reused_drafts: int = 0  # drafted while the target verified
    nodes: int = 0
    drafted_row_steps: int = 0  # row steps for which a draft model ran or more than the root was verified
    counts: AcceptedCounts = field(default_factory=AcceptedCounts)  # of the steps of all rows
    rules: set[str] = field(default_factory=set)  # that verifier "auto" has chosen
    has_warned: bool = False  # of a drafter that does not fit

    def record(self, step: StepResult, committed: Sequence[int], seconds: Mapping[str, float]) -> None:
        """Count a step: nodes committed by each sequence, 0 for an inactive one, and seconds by part."""
        self.steps += 1
        self.draft_calls += step.num_calls
        self.reused_drafts += step.is_reused
        self.nodes += step.num_nodes
        self.rules.add("traversal" if step.has_ratios else "match")
        for part, time in seconds.items():
            self.parts[part] += time
        for count in filter(None, committed):
            self.drafted_row_steps += step.num_calls > 0 or step.num_nodes > 1
            self.counts.add(count - 1)

    def warn_of_unfit_drafter(self, hidden_layers: Sequence[int] | None) -> None:
        """Warn once of a drafter of which nothing is accepted, or a draft head of which hardly anything is.

        Hidden states of a wrong layer, or from before a norm, show in nothing else.

        Args:
            hidden_layers: what a draft head reads of the target.
        """
        most = 1.0 if hidden_layers is None else UNTRAINED_TAU
        if self.has_warned or self.drafted_row_steps < MANY_STEPS or self.counts.tau > most:
            return
        self.has_warned = True
        if hidden_layers is None:
            logger.warning("no drafted token was accepted in %d steps: the drafter does not fit", self.steps)
            return
        logger.warning(
            "%.2f tokens a step in %d steps, as with an untrained draft head: was it made for this target, and does it "
            "read the hidden states of layers %s (-1 is after the final norm)?",
            self.counts.tau, self.steps, [*hidden_layers],
        )  # fmt: skip

    def report(self, num_new_tokens: int) -> dict[str, Any]:
        """Rates and times, JSON-able."""
        return {
            "steps": self.steps,
            "sequence_steps": self.counts.steps,
            "tau": self.counts.tau,
            "draft_calls": self.draft_calls,
            "reused_drafts": self.reused_drafts,
            "nodes_per_step": self.nodes / max(self.steps, 1),
            "acceptance_by_depth": self.counts.acceptance_by_depth,
            "tokens_per_s": num_new_tokens / max(self.total_s, 1e-9),
            "total_s": self.total_s,
            "prefill_s": self.prefill_s,
            "warm_up_s": self.warm_up_s,
            **self.parts,
        }
