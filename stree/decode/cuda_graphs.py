"""Work that is captured once and replayed from then on: on CUDA, a graph for every kind of step.

It knows no model and no drafting: work is a function without arguments that reads and writes tensors which stay where
they are, and whose host code does the same every time.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["CudaRecorder", "Graph", "Graphs", "Recorder", "recovering"]

WARM_UP = 2  # runs before a capture: what is compiled or allocated once must not be part of it
MOST_GRAPHS = 32

logger = logging.getLogger("stree")

_failed: list[Any] = []  # graphs whose capture failed: torch's allocator still points at them


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Launch it again, on the tensors that it was captured with."""
        ...


class Recorder(Protocol):
    """Captures work on a device."""

    def capture(self, work: Callable[[], Any], *, lasts: bool = False) -> tuple[Graph, Any]:
        """Call work once without running it on the device; give what replays it, and what it returned.

        What a replay leaves in memory holds until other work is replayed; if it ``lasts``, until other such work is.
        """
        ...

    def allocated(self) -> int:
        """Count the bytes that the device's allocator holds."""
        ...


@contextmanager
def recovering(device: torch.device) -> Iterator[None]:
    """Leave a device usable where a capture inside fails.

    torch (2.11) then stays on the stream of the capture, and the device's own random numbers wait for a replay until
    some capture succeeds.
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


class CudaRecorder:
    """CUDA graphs of one device, with a memory pool, and one for what lasts: what is dead between a pool's is shared.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._pools = device, [torch.cuda.graph_pool_handle() for _ in range(2)]
        self._stream = torch.cuda.Stream(device)

    def capture(self, work: Callable[[], Any], *, lasts: bool = False) -> tuple[Graph, Any]:
        """Capture on a stream of its own; other threads may go on using the device."""
        with torch.cuda.device(self._device), recovering(self._device):
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(
                    graph, pool=self._pools[lasts], stream=self._stream, capture_error_mode="thread_local"
                ):
                    out = work()
            except BaseException:
                _failed.append(graph)
                with suppress(Exception):  # else the pool stays taken, and nothing could be captured into it any more
                    torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pools[lasts])
                self._pools[lasts], self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)
                raise
        return graph, out

    def allocated(self) -> int:
        """Count the bytes that the caching allocator cannot give back."""
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
    """The graphs of one owner, at most so many; the one that was not used for longest is dropped first.

    Args:
        recorder: captures.
        most: graphs.

    Attributes:
        problems: why a kind of work cannot be captured, by kind; it runs without a graph.
        num_replays: replays of all of them.
        is_capturing: whether work is called to be captured.
    """

    def __init__(self, recorder: Recorder, most: int = MOST_GRAPHS) -> None:
        self._recorder, self._most = recorder, most
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self.problems: dict[Hashable, str] = {}
        self.num_replays = 0
        self.is_capturing = False

    def run(
        self, key: Hashable, work: Callable[[], Any], give_up: Callable[[], None], *, lasts: bool = False
    ) -> tuple[Any, bool]:
        """Do work: at first as it is, then captured and replayed.

        Args:
            key: its kind; the tensors and numbers that work of one kind finds are always the same ones.
            work: what to do.
            give_up: called after a capture that failed, before work is done without it: nothing has run on the device.
            lasts: whether what work returns is read after other work was replayed, of the kinds that do not last.

        Returns:
            What work returned, now or when it was captured, and whether it was replayed.
        """
        kind = self._kinds.setdefault(key, _Kind())
        self._kinds.move_to_end(key)
        kind.runs += 1
        if kind.graph is None and kind.runs > WARM_UP and key not in self.problems:
            self._capture(key, kind, work, give_up, lasts=lasts)
        if kind.graph is None:
            return work(), False
        kind.graph.replay()
        self.num_replays += 1
        return kind.out, True

    def clear(self) -> None:
        """Drop all graphs: what they were captured with is gone."""
        self._kinds.clear()

    def report(self) -> dict[str, Any]:
        """Say what there is, JSON-able."""
        captured = [kind for kind in self._kinds.values() if kind.graph is not None]
        return {
            "graphs": len(captured),
            "graph_bytes": sum(kind.num_bytes for kind in captured),
            "replays": self.num_replays,
            "not_captured": {str(key): problem for key, problem in self.problems.items()},
        }

    def _capture(
        self, key: Hashable, kind: _Kind, work: Callable[[], Any], give_up: Callable[[], None], *, lasts: bool
    ) -> None:
        """Capture a kind of work; what cannot be captured is remembered, and said."""
        captured = [other for other, known in self._kinds.items() if known.graph is not None]
        if len(captured) >= self._most:
            del self._kinds[captured[0]]
        before = self._recorder.allocated()
        self.is_capturing = True
        try:
            kind.graph, kind.out = self._recorder.capture(work, lasts=lasts)
        except Exception as problem:  # whatever a model's own code does that no graph can hold
            kind.graph = None
            self.problems[key] = f"{type(problem).__name__}: {problem}"[:500]
            logger.warning("a step (%s) runs without a CUDA graph: %s", key, self.problems[key])
            give_up()
            return
        finally:
            self.is_capturing = False
        kind.num_bytes = max(self._recorder.allocated() - before, 0)
