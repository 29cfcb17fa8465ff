"""When the parts of a step ended: by the host's clock, or by events on a device, which nobody waits for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["Clock", "Clocks", "ReplayClock", "StepClock"]


class Clock(Protocol):
    """Knows when the parts of a step ended."""

    def seconds(self) -> list[tuple[str, float]]:
        """List parts and their times, seconds; on a device, of a step that has ended."""
        ...


class StepClock:
    """When the parts of one step ended; on a device the marks are events, so that nobody waits to make one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any]] = []
        self.lap("")

    def lap(self, part: str) -> None:
        """Charge the time since the last mark to a part."""
        if self._device.type != "cuda":
            self._marks.append((part, time.perf_counter()))
            return
        # An external event is recorded anew by every replay of the graph that it is captured in.
        event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((part, event))

    def seconds(self) -> list[tuple[str, float]]:
        """List parts and their times, seconds; on a device, of a step that has ended."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._device.type == "cuda":
            return [(part, 1e-3 * before.elapsed_time(after)) for (_, before), (part, after) in pairs]
        return [(part, after - before) for (_, before), (part, after) in pairs]


@dataclass(frozen=True, slots=True, eq=False)
class ReplayClock:
    """When a replay ended, charged to its parts as they shared the first one.

    Attributes:
        clock: marks around the replay.
        shares: parts, and of the replay's time the share of each.
    """

    clock: StepClock
    shares: Sequence[tuple[str, float]]

    def seconds(self) -> list[tuple[str, float]]:
        """List parts and their times, seconds."""
        whole = sum(time_s for _, time_s in self.clock.seconds())
        return [(part, share * whole) for part, share in self.shares]


@dataclass(frozen=True, slots=True, eq=False)
class Clocks:
    """Marks of a step that is launched in pieces."""

    clocks: Sequence[Clock]

    def seconds(self) -> list[tuple[str, float]]:
        """List parts and their times, seconds."""
        return [part for clock in self.clocks for part in clock.seconds()]
