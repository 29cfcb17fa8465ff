"""What a failed capture leaves behind is cleared away; a stand-in takes the place of CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from stree.decode import cuda_graphs as graphs
from stree.decode.cuda_graphs import CudaRecorder

CUDA = torch.device("cuda", 0)


class Device:
    """A device whose captures behave as torch's: one that fails leaves its stream current and the draws locked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.is_locked = "before", False
        self.ended: list[tuple[int, int]] = []
        self.pools = iter(range(9))
        self.used: list[Any] = []
        for name, value in {
            "current_stream": lambda device: self.stream, "set_stream": lambda stream: setattr(self, "stream", stream),
            "Stream": lambda device: "another", "CUDAGraph": type("Graph", (), {}),
            "graph_pool_handle": lambda: next(self.pools),
            "graph": self.graph, "current_device": lambda: 0,
            "device": lambda device: nullcontext(),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        end = "_cuda_endAllocateToPool"
        monkeypatch.setattr(torch._C, end, lambda index, pool: self.ended.append((index, pool)), raising=False)
        monkeypatch.setattr(torch, "zeros", lambda *shape, device: None)

    @contextmanager
    def graph(self, graph: Any, pool: Any = None, stream: str = "capture", **_: Any) -> Iterator[None]:
        before, self.stream, self.is_locked = self.stream, stream, True
        self.used.append(pool)
        yield
        self.stream, self.is_locked = before, False


def test_after_a_failed_capture_the_stream_and_the_draws_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    monkeypatch.setattr(graphs, "_failed", [])
    recorder = CudaRecorder(CUDA)

    def failing() -> None:
        raise RuntimeError("a number was read")

    kept = [recorder.capture(lambda: 5)]
    assert kept[0][1] == 5 and not device.ended
    with pytest.raises(RuntimeError, match="a number was read"):
        recorder.capture(failing)
    assert (device.stream, device.is_locked, device.ended) == ("before", False, [(0, 0)])
    kept += [recorder.capture(lambda: 6), recorder.capture(lambda: 7, separate_pool=True)]
    assert [out for _, out in kept] == [5, 6, 7]
    with pytest.raises(RuntimeError, match="a number was read"):
        recorder.capture(failing, separate_pool=True)
    assert recorder.capture(lambda: 8, separate_pool=True)[1] == 8
    assert device.ended == [(0, 0), (0, 1)] and len(graphs._failed) == 2
    used = [pool for pool in device.used if pool is not None]
    assert used == [0, 0, 2, 1, 1, 3], "another pool after a failure, and the separate one is another"
    assert (device.stream, device.is_locked) == ("before", False) and len(graphs._failed) == 2
    del kept
    recorder.capture(lambda: 9)
    assert device.used[-1] == 4, "another pool where all graphs of the last one are gone"
