"""Decode steps that a target keeps between calls where steps are captured, with their states and graphs.

A graph holds the addresses of what it was captured with, so a decode step serves all texts of one shape: the same batch
size, maximal length, sampling and drafter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from stree.decode.capture import GraphCapture
from stree.decode.cuda_graphs import CudaRecorder, Recorder
from stree.decode.step import DecodeStep
from stree.drafters import Drafter, HeadDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.models.tree_lm import TreeLM

__all__ = ["StepCache", "drafter_key", "rounded", "state_length", "step_cache_of"]

MAX_DECODE_STEPS = 4
MIN_LENGTH = 256  # lengths are rounded up from here, so that texts of similar length share a step: to a power of two,
MAX_POWER = 4096  # and beyond this by at most a quarter, as memory is short there


class StepCache:
    """A least-recently-used cache of the decode steps of one target.

    Args:
        recorder: captures them.

    Attributes:
        most: decode steps that are kept.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.most = recorder, MAX_DECODE_STEPS
        self._decode_steps: OrderedDict[Hashable, tuple[DecodeStep, Any]] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        """Whether a decode step with this key is kept."""
        return key in self._decode_steps

    def take(self, key: Hashable) -> DecodeStep | None:
        """Remove and return the decode step with this key, or None; ``keep`` puts it back."""
        return self._decode_steps.pop(key, (None, None))[0]

    def keep(self, key: Hashable, decode_step: DecodeStep, drafter: Any) -> None:
        """Keep a decode step, and its drafter, whose address may be part of the key."""
        self._decode_steps[key] = decode_step, drafter
        while len(self._decode_steps) > self.most:
            self._decode_steps.popitem(last=False)

    def release(self) -> None:
        """Drop all decode steps, their states and graphs."""
        self._decode_steps.clear()

    def capture(self) -> GraphCapture:
        """An empty set of graphs for a new decode step."""
        return GraphCapture(self.recorder)

    def report(self) -> list[dict[str, Any]]:
        """Batch, length, nodes, bytes of the state, graphs and their bytes of each decode step, JSON-able."""
        return [
            {
                "batch": decode_step.state.batch_size, "max_length": decode_step.state.max_length,
                "max_nodes": decode_step.state.max_nodes, "state_bytes": decode_step.state.num_bytes,
                **decode_step.capture.report(),
            }
            for decode_step, _ in self._decode_steps.values()
        ]  # fmt: skip


def step_cache_of(lm: TreeLM) -> StepCache | None:
    """A target's cache of decode steps, or None where its steps are not captured.

    Steps are captured on CUDA, unless ``lm.captures_steps`` is False or the model's layers are on several devices.
    """
    if not _can_capture(lm):
        return None
    step_cache: StepCache | None = lm.cache.get("step_cache")
    return step_cache or lm.cache.setdefault("step_cache", StepCache(CudaRecorder(lm.device)))


def rounded(length: int) -> int:
    """Length of the states that texts of about this length share."""
    power = max(MIN_LENGTH, 1 << (length - 1).bit_length())
    return power if power <= MAX_POWER else -(-length // (power // 8)) * (power // 8)


def state_length(max_length: int, max_nodes: int, *, is_captured: bool) -> int:
    """Tokens that a state holds for texts of ``max_length``: the last step may commit a whole path beyond the limit."""
    length = max_length + max_nodes
    return rounded(length) if is_captured else length


def drafter_key(drafter: Drafter) -> Hashable:
    """What of a drafter captured steps depend on: drafters of one key may share them."""
    kind = type(drafter)
    if kind in (NoDrafter, SuffixDrafter):
        return kind.__name__  # their runs keep nothing for the next text
    if kind in (ModelDrafter, HeadDrafter):
        return kind.__name__, *map(id, drafter.models)
    return id(drafter)


def _can_capture(lm: TreeLM) -> bool:
    """Whether a model's steps can be captured."""
    return lm.device.type == "cuda" and lm.captures_steps is not False and len(lm.devices) == 1
