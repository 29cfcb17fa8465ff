"""Times of the parts of a step: by the host's clock without compilation, or by CUDA events, without synchronising."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stree.kernels.clock import elapsed, mark, wait_for

__all__ = ["StepTimer"]

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

    def seconds(self) -> list[tuple[str, float]]:
        """Parts and their times in seconds; on a device, of a step that has ended."""
        times = [(shares, elapsed(begin, end)) for shares, begin, end in self._spans]
        return [(part, share * whole) for shares, whole in times for part, share in shares]

    def shares(self) -> Shares:
        """Parts and their shares of the whole time, once the device has ended the step."""
        wait_for(self.device)
        parts = self.seconds()
        whole = max(sum(time_s for _, time_s in parts), 1e-12)
        return [(part, time_s / whole) for part, time_s in parts]
