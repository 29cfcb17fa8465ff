"""CUDA graphs: device work is captured once, in memory pools that all graphs of a target share.

Work is a function without arguments that reads and writes tensors at fixed addresses, and whose host code does the same
every time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol
from weakref import WeakSet

import torch

__all__ = ["CudaRecorder", "Graph", "GraphPools", "Recorder", "recovering"]

_failed: list[Any] = []  # graphs whose capture failed: torch's allocator still points at them


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Launch it again, on the tensors that it was captured with."""
        ...


class Recorder(Protocol):
    """Captures work on a device.

    Attributes:
        lock: held by a thread while it captures or replays, until what a replay made was copied: the graphs of all
            decode steps of a target share memory pools and a stream.
    """

    lock: threading.RLock

    def capture(self, work: Callable[[], Any], *, separate_pool: bool = False) -> tuple[Graph, Any]:
        """Call work once without running it on the device; return its graph, and what it returned.

        The output of a replay is valid until other work of the same memory pool is replayed.  There are two pools.
        """
        ...

    def allocated(self) -> int:
        """Bytes that the device's allocator holds."""
        ...


@contextmanager
def recovering(device: torch.device) -> Iterator[None]:
    """Leave a device usable after a capture inside has failed.

    torch (2.11) then stays on the stream of the capture, and its random number generator refuses to run outside of
    replays until some capture succeeds.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.current_stream(device)
    try:
        yield
    except BaseException:
        torch.cuda.set_stream(before)
        with suppress(Exception), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(device)):
            torch.zeros(1, device=device)
        torch.cuda.set_stream(before)  # that capture may fail, too
        raise


class GraphPools:
    """Two memory pools that graphs are captured into.

    A pool whose graphs are all gone is replaced: torch asserts where something is captured into one while a block of it
    is still allocated, as the workspace of cuBLAS always is.

    Args:
        new_handle: makes the handle of a new pool.
    """

    def __init__(self, new_handle: Callable[[], Any]) -> None:
        self._new_handle, self._handles = new_handle, [new_handle(), new_handle()]
        self._graphs: list[WeakSet[Any] | None] = [None, None]  # None before the first capture

    def handle(self, separate_pool: bool) -> Any:
        """Return the handle of a pool that can be captured into."""
        graphs = self._graphs[separate_pool]
        if graphs is not None and not graphs:
            self.replace(separate_pool)
        return self._handles[separate_pool]

    def add(self, graph: Any, separate_pool: bool) -> None:
        """Note a graph that was captured into a pool."""
        graphs = self._graphs[separate_pool] = self._graphs[separate_pool] or WeakSet()
        graphs.add(graph)

    def replace(self, separate_pool: bool) -> None:
        """Use a new pool from now on."""
        self._handles[separate_pool], self._graphs[separate_pool] = self._new_handle(), None


class CudaRecorder:
    """Captures CUDA graphs of one device in two memory pools; graphs of one pool share their temporary memory.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._pools = device, GraphPools(torch.cuda.graph_pool_handle)
        self._stream, self.lock = torch.cuda.Stream(device), threading.RLock()

    def capture(self, work: Callable[[], Any], *, separate_pool: bool = False) -> tuple[Graph, Any]:
        """Capture on a stream of its own; other threads may go on using the device."""
        with torch.cuda.device(self._device), recovering(self._device):
            graph, pool = torch.cuda.CUDAGraph(), self._pools.handle(separate_pool)
            try:
                with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                    out = work()
            except BaseException:
                _failed.append(graph)
                with suppress(Exception):  # else nothing could be captured into the pool any more
                    torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
                self._pools.replace(separate_pool)
                self._stream = torch.cuda.Stream(self._device)
                raise
        self._pools.add(graph, separate_pool)
        return graph, out

    def allocated(self) -> int:
        """Bytes that the caching allocator holds and cannot release."""
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved(self._device))
