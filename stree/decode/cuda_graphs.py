"""Device work that is captured once and replayed from then on: on CUDA, one graph for every kind of step.

Work is a function without arguments that reads and writes tensors at fixed addresses, and whose host code does the same
every time.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import torch

__all__ = ["CudaRecorder", "Graph", "GraphPools", "Graphs", "Recorder", "recovering"]

WARM_UP = 2  # runs before a capture: one-time compilation and allocation must not be part of it
MOST_GRAPHS = 32

logger = logging.getLogger("stree")

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


@dataclass(slots=True)
class _Kind:
    """One kind of work: how often it ran, and its graph, if it has one."""

    runs: int = 0
    graph: Graph | None = None
    out: Any = None
    num_bytes: int = 0


class Graphs:
    """A least-recently-used cache of graphs.

    Args:
        recorder: captures them.
        most: graphs that are kept.

    Attributes:
        problems: why kinds of work cannot be captured; they run without graphs.
        num_replays: replays of all of them.
        num_warm_ups: runs before a capture, and captures: their times are not those of replays.
        is_capturing: whether work is being captured.
        lock: see ``Recorder``.
    """

    def __init__(self, recorder: Recorder, most: int = MOST_GRAPHS) -> None:
        self._recorder, self._most, self.lock = recorder, most, recorder.lock
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self.problems: dict[Hashable, str] = {}
        self.num_replays = self.num_warm_ups = 0
        self.is_capturing = False

    def run(
        self, key: Hashable, work: Callable[[], Any], on_failure: Callable[[], None], *, separate_pool: bool = False
    ) -> tuple[Any, bool]:
        """Do work: eagerly at first, then captured and replayed.

        Args:
            key: its kind; work of one kind always uses the same tensors and host numbers.
            work: what to do.
            on_failure: called after a failed capture, of which nothing has run on the device, before work runs eagerly.
            separate_pool: whether its output is read after work of the other pool was replayed.

        Returns:
            What work returned, now or when it was captured, and whether it was replayed.
        """
        kind = self._kinds.setdefault(key, _Kind())
        self._kinds.move_to_end(key)
        kind.runs += 1
        self.num_warm_ups += kind.graph is None and key not in self.problems
        if kind.graph is None and kind.runs > WARM_UP and key not in self.problems:
            self._capture(key, kind, work, on_failure, separate_pool=separate_pool)
        if kind.graph is None:
            return work(), False
        kind.graph.replay()
        self.num_replays += 1
        return kind.out, True

    def clear(self) -> None:
        """Drop all graphs, since tensors that they use were replaced."""
        self._kinds.clear()

    def report(self) -> dict[str, Any]:
        """Graphs, their bytes, replays, and what could not be captured, JSON-able."""
        captured = [kind for kind in self._kinds.values() if kind.graph is not None]
        return {
            "graphs": len(captured),
            "graph_bytes": sum(kind.num_bytes for kind in captured),
            "replays": self.num_replays,
            "not_captured": {str(key): problem for key, problem in self.problems.items()},
        }

    def _capture(
        self,
        key: Hashable,
        kind: _Kind,
        work: Callable[[], Any],
        on_failure: Callable[[], None],
        *,
        separate_pool: bool,
    ) -> None:
        """Capture a kind of work; a failure is logged, and the kind is not tried again."""
        captured = [other for other, known in self._kinds.items() if known.graph is not None]
        if len(captured) >= self._most:
            del self._kinds[captured[0]]
        before = self._recorder.allocated()
        self.is_capturing = True
        try:
            kind.graph, kind.out = self._recorder.capture(work, separate_pool=separate_pool)
        except Exception as problem:  # a model's own code may do anything that no graph can hold
            kind.graph = None
            self.problems[key] = f"{type(problem).__name__}: {problem}"[:500]
            logger.warning("a step (%s) runs without a CUDA graph: %s", key, self.problems[key])
            on_failure()
            return
        finally:
            self.is_capturing = False
        kind.num_bytes = max(self._recorder.allocated() - before, 0)
