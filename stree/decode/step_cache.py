"""Decode steps that a target keeps between calls where steps are captured, with their states and graphs.

A graph holds the addresses of what it was captured with, so a decode step serves all texts of one shape: the same batch
size, maximal length, sampling and drafter.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from stree.decode.cuda_graphs import CudaRecorder, Graphs, Recorder
from stree.decode.step import DecodeStep
from stree.models.tree_lm import TreeLM

__all__ = ["StepCache", "rounded", "step_cache_of"]

MAX_DECODE_STEPS = 4
MIN_LENGTH = 256  # lengths are rounded up to a power of two from here, so that texts of similar length share a step


class StepCache:
    """A least-recently-used cache of the decode steps of one target.

    Graphs of one recorder share temporary memory, so decode steps that run at the same time, in several threads, have
    graphs of different recorders.

    Args:
        new_recorder: makes what captures them.

    Attributes:
        most: decode steps that are kept.
    """

    def __init__(self, new_recorder: Callable[[], Recorder]) -> None:
        self._new_recorder, self.most = new_recorder, MAX_DECODE_STEPS
        self._decode_steps: OrderedDict[Hashable, tuple[DecodeStep, Any]] = OrderedDict()
        self._recorders: list[Recorder] = []
        self._running = weakref.WeakSet[Graphs]()  # of decode steps that were taken, or are new, and were not kept yet
        self._lock = threading.Lock()

    def __contains__(self, key: Hashable) -> bool:
        """Whether a decode step with this key is kept."""
        return key in self._decode_steps

    def take(self, key: Hashable) -> DecodeStep | None:
        """Remove and return the decode step with this key, or None; ``keep`` puts it back.

        One whose recorder has the graphs of a running decode step is dropped.
        """
        with self._lock:
            decode_step: DecodeStep | None = self._decode_steps.pop(key, (None, None))[0]
            if decode_step is None or decode_step.graphs is None or decode_step.graphs.recorder in self._busy():
                return None
            self._running.add(decode_step.graphs)
            return decode_step

    def keep(self, key: Hashable, decode_step: DecodeStep, drafter: Any) -> None:
        """Keep a decode step, and its drafter, whose address may be part of the key."""
        with self._lock:
            if decode_step.graphs is not None:
                self._running.discard(decode_step.graphs)
            self._decode_steps[key] = decode_step, drafter
            while len(self._decode_steps) > self.most:
                self._decode_steps.popitem(last=False)

    def release(self) -> None:
        """Drop all decode steps, their states and graphs."""
        self._decode_steps.clear()

    def graphs(self) -> Graphs:
        """An empty set of graphs for a new decode step, of a recorder that no running one uses."""
        with self._lock:
            busy = self._busy()
            recorder = next((one for one in self._recorders if one not in busy), None)
            if recorder is None:
                recorder = self._new_recorder()
                self._recorders.append(recorder)
            graphs = Graphs(recorder)
            self._running.add(graphs)
            return graphs

    def _busy(self) -> list[Recorder]:
        """List the recorders of running decode steps."""
        return [graphs.recorder for graphs in self._running]

    def report(self) -> list[dict[str, Any]]:
        """Batch, length, nodes, bytes of the state, graphs and their bytes of each decode step, JSON-able."""
        return [
            {
                "batch": decode_step.state.batch_size, "max_length": decode_step.state.max_length,
                "max_nodes": decode_step.state.max_nodes, "state_bytes": decode_step.state.num_bytes,
                **(decode_step.graphs.report() if decode_step.graphs is not None else {}),
            }
            for decode_step, _ in [*self._decode_steps.values()]
        ]  # fmt: skip


def step_cache_of(lm: TreeLM) -> StepCache | None:
    """A target's cache of decode steps, or None where its steps are not captured.

    Steps are captured on CUDA, unless ``lm.captures_steps`` is False or the model's layers are on several devices.
    """
    if not _can_capture(lm):
        return None
    step_cache: StepCache | None = lm.cache.get("step_cache")
    return step_cache or lm.cache.setdefault("step_cache", StepCache(lambda: CudaRecorder(lm.device)))


def rounded(length: int) -> int:
    """Length of the states that texts of about this length share."""
    return max(MIN_LENGTH, 1 << (length - 1).bit_length())


def _can_capture(lm: TreeLM) -> bool:
    """Whether a model's steps can be captured."""
    return lm.device.type == "cuda" and lm.captures_steps is not False and len(lm.devices) == 1
