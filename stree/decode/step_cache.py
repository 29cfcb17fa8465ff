"""What a target keeps between calls where steps are captured: programs with their states and their graphs.

A graph holds the places of what it was captured with, so a program serves all texts of one shape: as many sequences,
as much room, the same distributions, the same drafter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any

from torch import Tensor

from stree.decode.cuda_graphs import CudaRecorder, Graphs, Recorder
from stree.decode.step import DecodeStep
from stree.models.tree_lm import TreeLM

__all__ = ["StepCache", "layout_of", "rounded", "step_cache_of"]

MAX_DECODE_STEPS = 4
SETTINGS = (bool, int, float, str, dict, list, tuple, set)  # of a module, as a captured step finds them
ROOM = 256  # least room for a text; powers of two above it, so that texts of about one length share a program


class StepCache:
    """The programs of one target; beyond ``most`` the one that was not used for longest is dropped.

    Args:
        recorder: captures their steps.

    Attributes:
        recorder: it.
        most: programs that are kept.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.most = recorder, MAX_DECODE_STEPS
        self._decode_steps: OrderedDict[Hashable, tuple[DecodeStep, Any]] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        """Tell whether there is a program of this kind."""
        return key in self._decode_steps

    def take(self, key: Hashable) -> DecodeStep | None:
        """Give a program of this kind, if there is one; nobody else has it until it is put back."""
        known = self._decode_steps.pop(key, None)
        return None if known is None else known[0]

    def keep(self, key: Hashable, decode_step: DecodeStep, drafter: Any) -> None:
        """Put a program back, with the drafter that it belongs to."""
        self._decode_steps[key] = decode_step, drafter
        while len(self._decode_steps) > self.most:
            self._decode_steps.popitem(last=False)

    def release(self) -> None:
        """Drop all programs, their states and graphs."""
        self._decode_steps.clear()

    def graphs(self) -> Graphs:
        """Begin the graphs of a new program."""
        return Graphs(self.recorder)

    def report(self) -> list[dict[str, Any]]:
        """Describe the programs, JSON-able: sequences, room, bytes of the state, graphs and their bytes."""
        return [
            {
                "batch": decode_step.state.batch_size, "max_length": decode_step.state.max_length,
                "max_nodes": decode_step.state.max_nodes, "state_bytes": decode_step.state.num_bytes,
                **(decode_step.graphs.report() if decode_step.graphs is not None else {}),
            }
            for decode_step, _ in self._decode_steps.values()
        ]  # fmt: skip


def step_cache_of(lm: TreeLM) -> StepCache | None:
    """Give a target's engine, or None where its steps are launched one by one.

    Steps are captured on CUDA, unless ``lm.captures_steps`` is False or the model's layers stand on several devices.
    """
    if not _can_capture(lm):
        return None
    if "step_cache" not in lm.cache:
        lm.cache["step_cache"] = StepCache(CudaRecorder(lm.device))
    step_cache: StepCache = lm.cache["step_cache"]
    return step_cache


def layout_of(lm: TreeLM) -> Hashable:
    """Name what a captured step of a model holds beside its state: how it runs, and the places of its weights."""
    modules = [*lm.model.modules()]
    configs = {id(config): config for module in modules if hasattr(config := vars(module).get("config"), "__dict__")}
    told = (setting for part in (*modules, *configs.values()) for setting in _settings(part))
    return lm.defers_commit, lm.fused_layers, *map(_place, (*lm.model.parameters(), *lm.model.buffers())), *told


def _settings(module: Any) -> Iterator[Any]:
    """List what decides on a module's way beside its weights, or stands in its config: class, hooks, switches."""
    yield type(module)
    for name, value in vars(module).items():
        if isinstance(value, SETTINGS) and value:  # most are empty
            yield name, _frozen(value)


def _frozen(value: Any) -> Any:
    """Copy numbers, names and collections of them; of hooks, which are functions, the numbers that they go by."""
    if isinstance(value, dict):
        return tuple((key, _frozen(part)) for key, part in value.items())
    if isinstance(value, (list, tuple, set)):
        return tuple(map(_frozen, value))
    return value if isinstance(value, SETTINGS) else None


def _place(tensor: Tensor) -> int:
    """Name the place of a tensor; one that is made of others has none of its own."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return id(tensor)


def rounded(length: int) -> int:
    """Give the room that texts of about this length share."""
    return max(ROOM, 1 << (length - 1).bit_length())


def _can_capture(lm: TreeLM) -> bool:
    """Tell whether a model's steps can be captured."""
    return lm.device.type == "cuda" and lm.captures_steps is not False and len(lm.devices) == 1
