"""Times device work: replays of one CUDA graph between events; plain calls where there is no GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from stree.bench.records import Record, quantiles
from stree.decode.cuda_graphs import CudaRecorder
from stree.kernels.clock import wait_for

__all__ = ["time_calls", "time_graph", "time_launches"]


def time_graph(calls: Callable[[], Any], device: torch.device, count: int = 1, runs: int = 50) -> Record:
    """Time ``calls``, which does ``count`` equal pieces of work: quantiles of microseconds a piece."""
    if device.type != "cuda":
        return time_calls(calls, device, count, runs=3)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            calls()
    torch.cuda.current_stream().wait_stream(stream)
    return time_launches(CudaRecorder(device).capture(calls)[0].replay, device, count, runs)


def time_launches(launch: Callable[[], Any], device: torch.device, count: int = 1, runs: int = 50) -> Record:
    """Time what ``launch`` puts into the stream, by events around it: quantiles of microseconds a piece of work."""
    for _ in range(3):
        launch()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for begin, end in events:
        begin.record()
        launch()
        end.record()
    torch.cuda.synchronize(device)
    return quantiles([begin.elapsed_time(end) * 1e3 / count for begin, end in events])


def time_calls(calls: Callable[[], Any], device: torch.device, count: int = 1, runs: int = 10) -> Record:
    """Time plain calls, waiting for the device after each: quantiles of microseconds a piece of work."""
    times = []
    for _ in range(2 + runs):
        start = time.perf_counter()
        calls()
        wait_for(device)
        times.append((time.perf_counter() - start) * 1e6 / count)
    return quantiles(times[2:])
