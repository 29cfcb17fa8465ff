"""What one step leaves: the draft, what was accepted, and a report that is copied to the host without synchronising."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stree.decode.logprobs import token_logprobs
from stree.decode.timing import StepTimer
from stree.drafters import Draft
from stree.kernels.dispatch import host_can_read
from stree.verify import Acceptance

__all__ = ["StepResult"]


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """One step that was launched.

    Attributes:
        draft: what was proposed.
        acceptance: what was accepted; path length 0 where a sequence was inactive.
        logits: float[batch, n, vocab], of the tree's nodes, as they were drawn from; in what ``to_host`` returns
            float[batch, m, vocab], of the accepted paths, or None.  The tensors of a replayed step are overwritten by
            the next one.
        raw_logits: the same before logits processors.
        report: int64[batch, m + 2]: up to m emitted tokens, their number, and the nodes committed.
        timer: times of its parts.
        arrival: event after which a report on the host may be read, or None where it may be at once.
        logprobs: float64[batch, m, 2 + 2 top] on the host, see ``token_logprobs``, or None.
    """

    draft: Draft
    acceptance: Acceptance
    logits: Tensor | None
    raw_logits: Tensor | None
    report: Tensor
    timer: StepTimer
    arrival: Any = None
    logprobs: Tensor | None = None

    def to_host(self, *, needs_logits: bool = False, top_logprobs: int | None = None) -> StepResult:
        """Start to copy the report to the host, and what else is wanted, before the next step overwrites it."""
        assert self.logits is not None and self.raw_logits is not None, "this result is on the host already"
        logits = self._on_path(self.logits) if needs_logits else None
        logprobs = None
        if top_logprobs is not None:
            logprobs = _to_host(token_logprobs(self._on_path(self.raw_logits), self.report[:, :-2], top_logprobs))
        report = _to_host(self.report)  # after the last lap, whose event has ended once the report has arrived
        arrival = None
        if self.report.device.type == "cuda":
            arrival = torch.cuda.Event()
            arrival.record(torch.cuda.current_stream(self.report.device))
        return replace(self, report=report, arrival=arrival, logits=logits, raw_logits=None, logprobs=logprobs)

    def _on_path(self, logits: Tensor) -> Tensor:
        """Select float[batch, m, vocab] of the accepted paths from float[batch, n, vocab] logits."""
        return logits.take_along_dim(self.acceptance.path.clamp(min=0).long()[..., None], 1)

    def emitted(self) -> tuple[list[list[int]], list[int]]:
        """Synchronise with the report; return each sequence's new tokens, and the nodes that it committed."""
        if self.arrival is not None:
            self.arrival.synchronize()
        rows = self.report.tolist()
        return [row[: row[-2]] for row in rows], [row[-1] for row in rows]


def _to_host(tensor: Tensor) -> Tensor:
    """Start to copy a tensor to pinned memory of the host."""
    if host_can_read(tensor):
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
