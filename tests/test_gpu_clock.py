"""What a failed capture leaves behind is cleared away; a stand-in takes the place of CUDA."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import gpu_clock

CUDA = torch.device("cuda")


class Device:
    """A device whose captures behave as torch's: one that fails leaves its stream current and the draws locked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.is_locked = "before", False
        self.ended: list[tuple[int, str]] = []
        for name, value in {
            "current_stream": lambda device: self.stream, "set_stream": lambda stream: setattr(self, "stream", stream),
            "Stream": lambda device: "another", "CUDAGraph": object, "graph_pool_handle": lambda: "pool",
            "graph": self.graph, "current_device": lambda: 0,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        end = "_cuda_endAllocateToPool"
        monkeypatch.setattr(torch._C, end, lambda index, pool: self.ended.append((index, pool)), raising=False)
        monkeypatch.setattr(torch, "zeros", lambda *shape, device: None)

    @contextmanager
    def graph(self, graph: Any, pool: Any = None, stream: str = "capture") -> Iterator[None]:
        before, self.stream, self.is_locked = self.stream, stream, True
        yield
        self.stream, self.is_locked = before, False


def test_after_a_failed_capture_the_stream_and_the_draws_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    monkeypatch.setattr(gpu_clock, "FAILED", [])

    def failing() -> None:
        raise RuntimeError("a number was read")

    with pytest.raises(RuntimeError, match="a number was read"):
        gpu_clock.capture(failing, CUDA)
    assert (device.stream, device.is_locked, device.ended) == ("before", False, [(0, "pool")])
    assert len(gpu_clock.FAILED) == 1
    gpu_clock.capture(lambda: None, CUDA)
    assert (device.stream, device.is_locked) == ("before", False) and len(gpu_clock.FAILED) == 1


def test_where_nothing_can_be_captured_any_more_the_stream_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)

    def dead(*shape: int, device: Any) -> None:
        raise RuntimeError("the device is dead")

    monkeypatch.setattr(torch, "zeros", dead)
    with pytest.raises(ValueError, match="first"), gpu_clock.recovering(CUDA):
        device.stream = "capture"
        raise ValueError("first")
    assert device.stream == "before"
