"""Times device work: replays of one CUDA graph between events; plain calls where there is no GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from stree.bench.records import Record, quantiles

FAILED: list[Any] = []  # graphs whose capture failed: the allocator still points at them


@contextmanager
def recovering(device: torch.device) -> Iterator[None]:
    """Leave the device usable where a capture inside fails.

    torch (2.11) then stays on the stream of the capture, and the device's own random numbers wait for a replay until
    some capture succeeds.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.current_stream(device)
    try:
        yield
    except Exception:
        torch.cuda.set_stream(before)
        with suppress(Exception), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(device)):
            torch.zeros(1, device=device)
        torch.cuda.set_stream(before)  # that capture may fail, too
        raise


def capture(calls: Callable[[], Any], device: torch.device) -> torch.cuda.CUDAGraph:
    """Capture ``calls``; where that fails, the device can be used as before."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    with recovering(device):
        try:
            with torch.cuda.graph(graph, pool=pool):
                calls()
        except Exception:
            FAILED.append(graph)
            with suppress(Exception):  # else the pool stays taken
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            raise
    return graph


def time_graph(calls: Callable[[], Any], device: torch.device, count: int, runs: int = 50) -> Record:
    """Time ``calls``, which does ``count`` equal pieces of work: quantiles of microseconds a piece."""
    if device.type != "cuda":
        times = []
        for _ in range(3):
            start = time.perf_counter()
            calls()
            times.append((time.perf_counter() - start) * 1e6 / count)
        return quantiles(times)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            calls()
    torch.cuda.current_stream().wait_stream(stream)
    return time_launches(capture(calls, device).replay, device, count, runs)


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
