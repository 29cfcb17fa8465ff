"""The sequences that an engine decodes now: a decode loop whose batch has as many rows as sequences, where it can."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

import numpy as np
import torch

from stree.budget.controller import AcceptanceLevel
from stree.budget.policy import BudgetPolicy
from stree.checks import check_counts
from stree.decode.loop import DecodeLoop
from stree.decode.prompts import check_logits
from stree.decode.request import Batch, Request
from stree.decode.sequences import Sequences, Text
from stree.decode.settings import Settings
from stree.decode.step_cache import step_cache_of
from stree.decode.step_result import StepResult
from stree.decode.token_rules import TokenRules
from stree.decode.tree_sizes import budget_policy
from stree.models.layout import layout_of, writes_of
from stree.models.loading import reason_of
from stree.models.prefix_cache import PrefixCache, PromptRun, RequestPrefixes
from stree.models.state import DecodeState
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling

__all__ = ["PREFILL_NODES", "RunningBatch", "check_stops"]

MOST_STOPS = 64  # stop tokens of a request
PREFILL_NODES = 64  # tokens that later chunks of a prompt run at once
MIXED = frozenset({Sampling(), Sampling(1.0, top_k=1)})  # a captured step serves all mixtures
ANY_RULES = (TokenRules({0: 1.0}, 2.0, 1.0, 1.0, min_new_tokens=1, stops=frozenset({0})),)  # that requests may have


class RunningBatch:
    """Sequences join and leave between steps.

    Where steps are captured, the batch always has ``max_batch`` rows, of which some are free.  Elsewhere rows cost
    time, so it has one for each sequence, and states are copied when a sequence joins or leaves.

    Args:
        settings: of all requests.
        max_batch: most sequences.
        max_length: most tokens of each.
        is_cancelled: asked after every step whether the sequence of a request shall end.
        on_step: see ``DecodeLoop``.

    Attributes:
        extent: sizes of all states.
    """

    def __init__(
        self, settings: Settings, max_batch: int, max_length: int, is_cancelled: Callable[[Request], bool],
        on_step: Callable[[StepResult, list[Text], list[int]], None],
    ) -> None:  # fmt: skip
        self._settings, self._lm, self._drafter = settings, settings.lm, settings.drafter
        check_counts(max_batch=max_batch, max_length=max_length)
        self._max_batch, self._max_length = int(max_batch), int(max_length)
        self._is_cancelled, self._on_step = is_cancelled, on_step
        self._step_cache = step_cache_of(self._lm) if settings.runs_on_device else None
        self._layout: list[Hashable] = []  # of the models, and writes to the target's weights, at the last request
        self._writes: Hashable = None
        self._policies: dict[tuple[int, bool], BudgetPolicy] = {}
        self._levels = AcceptanceLevel(), AcceptanceLevel()  # of sampled and of greedy texts
        self._loop: DecodeLoop | None = None
        extent = self._new_loop(self._max_batch).extent(self._policy(self._max_batch, is_greedy=False))
        self.extent = replace(extent, prompts=1)

    @property
    def rows(self) -> list[Text]:
        """The sequence of each row; one that has ended where the row is free."""
        return [] if self._loop is None else self._loop.sequences.rows

    @property
    def drafting_problem(self) -> str | None:
        """Why the sequences are decoded without the drafter, or None."""
        problem = None if self._loop is None else self._loop.problem
        return None if problem is None else reason_of(problem)

    @property
    def is_running(self) -> bool:
        """Whether there is a sequence that has not ended."""
        return any(sequence.reason is None for sequence in self.rows)

    def takes_up_weights(self, cache: PrefixCache) -> bool:
        """Drop what was computed with weights, adapters or settings that the models no longer have.

        False where sequences still run by captured steps that hold them: a new one has to wait.
        """
        if (self._step_cache is None and not cache.max_bytes) or not isinstance(self._lm, TreeLM):
            return True
        models = [self._lm, *(one for one in self._drafter.models if self._step_cache or isinstance(one, TreeLM))]
        layout, writes = [*map(layout_of, models)], tuple(map(writes_of, models))
        if layout != self._layout and self._step_cache is not None:
            if self.is_running:
                return False
            self.drop()
        if (layout, writes) != (self._layout, self._writes):
            cache.clear()
            self._layout, self._writes = layout, writes
        return True

    def new_row(self) -> DecodeState:
        """Return an empty state of one row, for the prompt of a sequence that will ``join``."""
        if self._loop is None:
            self._loop = self._started(1) if self._step_cache is None else None
            if self._loop is None or not self._loop.can_select:
                self._loop = self._started(self._max_batch)
        return self._lm.new_state(1, self._loop.state.max_length, self._loop.state.max_nodes)

    def read(self, prompt: PromptRun, size: int, request: Request) -> bool:
        """Run at most ``size`` tokens of a prompt; return whether all have run.

        Raises:
            ValueError: the logits after it have no distribution.
        """
        if self._loop is not None:
            self._loop.pause()
        is_over = prompt.run(size)
        if is_over:
            check_logits(prompt.logits, request.sampling)
        return is_over

    def add(self, request: Request) -> Text:
        """Return the sequence of a request, which will ``join``."""
        assert self._loop is not None, "its prompt has been run"
        return self._loop.sequences.add(request)

    def join(self, sequence: Text, prefilled: PromptRun) -> None:
        """Give a sequence a row and draw its first token."""
        assert self._loop is not None, "its prompt has been run"
        if self._loop.can_select:
            self._select(self._loop, sequence.request)
        self._loop.admit(sequence, prefilled)

    def advance(self) -> None:
        """Run a step."""
        assert self._loop is not None, "sequences run"
        self._loop.advance()

    def keep_state(self, sequence: Text, prefixes: RequestPrefixes) -> None:
        """Keep the state of a sequence that has ended, after the tokens that it has read: all but the last one.

        Nothing is kept where the host has ended it, by a stop string, before tokens that were read already, and where
        the drafter needs hidden states of the text, which are not kept.
        """
        assert self._loop is not None, "sequences run"
        row, state = self._loop.sequences.rows.index(sequence), self._loop.state
        num_read = int(state.lengths[row])
        if num_read < len(sequence.tokens) and self._drafter.hidden_layers is None:
            state = state.select(torch.tensor([row], device=state.lengths.device))
            prefixes.keep(np.asarray(sequence.tokens[:num_read], np.int64), state)

    def leave(self, *, is_idle: bool) -> None:
        """Drop the sequences that have ended; ``is_idle``: nothing will join soon, so that memory is freed."""
        loop = self._loop
        assert loop is not None, "sequences have run"
        loop.sequences.all = [sequence for sequence in loop.sequences.all if sequence.reason is None]
        if self.is_running and loop.can_select:
            self._select(loop)
        elif not self.is_running and is_idle and (self._step_cache is None or loop.problem is not None):
            self.drop()

    def drop(self) -> None:
        """Drop all sequences and states."""
        self._loop = None

    def _select(self, loop: DecodeLoop, newcomer: Request | None = None) -> None:
        rows = [row for row, sequence in enumerate(loop.sequences.rows) if sequence.reason is None]
        requests = [loop.sequences.rows[row].request for row in rows] + ([] if newcomer is None else [newcomer])
        loop.select(rows, newcomer)
        loop.policy = self._policy(len(requests), is_greedy=all(one.sampling.is_greedy for one in requests))

    def _started(self, rows: int) -> DecodeLoop:
        """Start a loop of free rows."""
        loop = self._new_loop(rows)
        loop.on_step = self._on_step
        loop.start(self._policy(rows, is_greedy=False), [], rows)
        return loop

    def _new_loop(self, rows: int) -> DecodeLoop:
        batch = Batch(
            iter(()), MIXED, MOST_STOPS, max_batch=rows, max_length=self._max_length, prompt_length=self._max_length,
            refills=True, min_nodes=PREFILL_NODES, limits_nodes=True, rules=ANY_RULES, keeps_logprobs=True,
            isolates_nan=True,
        )  # fmt: skip
        sequences = Sequences(self._is_cancelled, counts_nodes=True)
        return DecodeLoop(self._settings, batch, sequences, self._step_cache)

    def _policy(self, rows: int, *, is_greedy: bool) -> BudgetPolicy:
        """Return what chooses the sizes of steps with so many rows; it learns from all of them."""
        if (rows, is_greedy) not in self._policies:
            kinds = {Sampling(0.0 if is_greedy else 1.0)}
            self._policies[rows, is_greedy] = budget_policy(self._settings, rows, kinds, self._levels[is_greedy])[1]
        return self._policies[rows, is_greedy]


def check_stops(request: Request) -> None:
    """Refuse a request of more stop tokens than a row has room for.

    Raises:
        ValueError: it has more.
    """
    if len(request.stop_token_ids) > MOST_STOPS:
        raise ValueError(f"stop_token_ids must be at most {MOST_STOPS} tokens, got {len(request.stop_token_ids)}")
