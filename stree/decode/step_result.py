"""What one step leaves: tensors, which the next one overwrites, what is copied of them to the host, and times.

The parts of a step are timed by the host's clock without compilation, or by CUDA events, without synchronising.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stree.decode.logprobs import token_logprobs
from stree.drafters import Draft
from stree.kernels.clock import elapsed, mark, wait_for
from stree.kernels.host_copies import arrival, to_host
from stree.verify import Acceptance

__all__ = ["LaunchedStep", "Shares", "StepResult", "StepTimer", "StepTrees", "Wanted", "on_path"]

Shares = Sequence[tuple[str, float]]  # parts of a step, and the share of a time span that each took


class StepTimer:
    """Time spans of one step, each charged to a part or divided between parts.

    Args:
        device: on CUDA the ends of spans are events, so that making one does not synchronise.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spans: list[tuple[Shares, Any, Any]] = []
        self._last = mark(device)

    def lap(self, part: str | Shares) -> None:
        """Charge the time since the last lap to a part, or to several: a replayed graph is timed as a whole."""
        now = mark(self.device)
        self._spans.append(([(part, 1.0)] if isinstance(part, str) else part, self._last, now))
        self._last = now

    def include(self, other: StepTimer) -> None:
        """Take over the laps of work that has its own timer."""
        self._spans += other._spans
        self._last = other._last

    def seconds(self) -> dict[str, float]:
        """Sum the seconds of each part; on a device, of a step that has ended."""
        seconds: dict[str, float] = {}
        for shares, begin, end in self._spans:
            whole = elapsed(begin, end)
            for part, share in shares:
                seconds[part] = seconds.get(part, 0.0) + share * whole
        return seconds

    def shares(self) -> Shares:
        """Parts and their shares of the whole time, once the device has ended the step."""
        wait_for(self.device)
        parts = self.seconds()
        whole = max(sum(parts.values()), 1e-12)
        return [(part, time_s / whole) for part, time_s in parts.items()]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the host reads of a step beside its tokens.

    Attributes:
        logits: whether the logits of the accepted paths.
        top_logprobs: log probabilities of the tokens and of so many alternatives, or None for none.
        trees: whether the trees.
        row_nodes: whether the number of nodes of each tree.
    """

    logits: bool = False
    top_logprobs: int | None = None
    trees: bool = False
    row_nodes: bool = False

    @property
    def needs_logits(self) -> bool:
        """Whether a step must return the logits of the accepted paths."""
        return self.logits or self.top_logprobs is not None


@dataclass(frozen=True, slots=True, eq=False)
class StepTrees:
    """The trees of a step, on the host.

    Attributes:
        tokens: int64[batch, n].
        parents: int32[batch, n].
        path: int32[batch, m], accepted nodes.
        probs: float[batch, m, 2], see ``path_probs``, or None where the step does not compute them.
        values: float[batch, n], estimated by the drafter, or None.
        node_probs: float[batch, n], the draft's of the nodes, or None.
    """

    tokens: Tensor
    parents: Tensor
    path: Tensor
    probs: Tensor | None
    values: Tensor | None
    node_probs: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What the host reads of a step; copies, which no later step writes to.

    Attributes:
        report: int64[batch, m + 3]: up to m emitted tokens, their number, the nodes committed, and 1 where the last
            node's logits define no distribution, or a grammar leaves a node's none.
        timer: times of its parts.
        num_nodes: nodes of a tree, padding included.
        num_calls: forward passes of a draft model.
        is_reused: whether the draft was made while the target verified the one before it.
        logits: float[batch, m, vocab] of the accepted paths, as they were drawn from, or None.
        logprobs: float64[batch, m, 2 + 2 top], see ``token_logprobs``, or None.
        trees: the trees, or None.
        is_steady: whether its time is that of later steps of its kind: nothing was captured, or run to be captured.
        arrival: event after which the copies may be read, or None where they may be at once.
        has_ratios: whether drawn nodes were tested, by traversal or rejection, in place of MATCH or the argmax.
        row_nodes: int32[batch], nodes of each tree without padding, or None.
    """

    report: Tensor
    timer: StepTimer
    num_nodes: int
    num_calls: int
    is_reused: bool
    is_steady: bool
    logits: Tensor | None
    logprobs: Tensor | None
    trees: StepTrees | None
    arrival: Any
    has_ratios: bool = False
    row_nodes: Any = None

    def emitted(self) -> tuple[list[list[int]], list[int], dict[int, Exception]]:
        """Synchronise with the report.

        Returns:
            Each sequence's new tokens; the nodes that it committed; and an error for each row where the target's logits
            are NaN, or +inf where tokens are sampled, whose tokens mean nothing.
        """
        if self.arrival is not None:
            self.arrival.synchronize()
        rows = self.report.tolist()
        what = "the target's logits are NaN, or infinite where tokens are sampled, in row"
        problems: dict[int, Exception] = {n: ValueError(f"{what} {n}") for n, row in enumerate(rows) if row[-1]}
        return [row[: row[-3]] for row in rows], [row[-2] for row in rows], problems


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """One step that was launched.  Its tensors are over with the step: a replay overwrites them.

    A graph keeps what its capture returned, so only what is read is here.

    Attributes:
        draft: what was proposed.
        acceptance: what was accepted; path length 0 where a sequence was inactive.
        path_logits: float[batch, m, vocab], of the accepted paths, as they were drawn from; None where not wanted.
        raw_path_logits: the same before logits processors.
        report: as in ``StepResult``.
        timer: times of its parts.
        is_steady: as in ``StepResult``.
        num_calls: draft calls before the draft was proposed.
        logits: float[batch, n, vocab], of the tree's nodes, where memory is checked; else None.
        path_probs: float[batch, m, 2], see the function of that name, or None.
    """

    draft: Draft
    acceptance: Acceptance
    path_logits: Tensor | None
    raw_path_logits: Tensor | None
    report: Tensor
    timer: StepTimer
    is_steady: bool = True
    num_calls: int = 0
    logits: Tensor | None = None
    path_probs: Tensor | None = None

    def to_host(self, wanted: Wanted) -> StepResult:
        """Start to copy the report to the host, and what else is wanted, before the next step overwrites it."""
        tree, logprobs = self.draft.tree, None
        if wanted.top_logprobs is not None:
            assert self.raw_path_logits is not None, "the step was launched with what is wanted"
            values = token_logprobs(self.raw_path_logits, self.report[:, :-3], wanted.top_logprobs)
            logprobs = to_host(values)
        trees = None
        if wanted.trees:
            offered = self.draft.offered
            node_probs = None if offered is None else offered.probs(tree.tokens)
            parts = self.path_probs, self.draft.values, node_probs
            estimates = (None if part is None else to_host(part) for part in parts)
            path = to_host(self.acceptance.path)
            trees = StepTrees(to_host(tree.tokens), to_host(tree.parents), path, *estimates)
        row_nodes = to_host(tree.num_nodes) if wanted.row_nodes else None
        report, logits = to_host(self.report), self.path_logits if wanted.logits else None
        return StepResult(
            report, self.timer, tree.tokens.shape[1], self.num_calls + self.draft.num_calls, self.draft.is_reused,
            self.is_steady, None if logits is None else logits.clone(), logprobs, trees, arrival(self.report.device),
            has_ratios=self.acceptance.ratios is not None, row_nodes=row_nodes,
        )  # fmt: skip


def on_path(values: Tensor, path: Tensor) -> Tensor:
    """Take from [batch, n, ...] values of nodes those of the nodes of int32[batch, m] paths; any where it is -1."""
    nodes = path.clamp(min=0).long().to(values.device)
    return values[torch.arange(len(nodes), device=nodes.device)[:, None], nodes]  # a gather would expand the indices
