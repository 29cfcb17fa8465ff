"""Count the kernels of one whole decoding step, by part, without a GPU, apart from those of the models' forwards.

Run: python -m benchmarks.ahead_of_time.step_counts [--sizes 16x4,64x6] [--out FILE]

A tiny hybrid target and a tiny Mamba-2 drafter take a step at fixed shapes on meta tensors, along the code that a GPU
would run.  Launches are counted by `launch_counter`; those of forwards are counted apart, since they depend on the
models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

from helpers.tiny_models import tiny_model
from triton.runtime.interpreter import InterpretedFunction

import stree.decode.step
from benchmarks.ahead_of_time.launch_counter import LaunchCounter  # sets the interpreter up
from benchmarks.ahead_of_time.whole_step import as_on_a_gpu, begun
from benchmarks.report import study
from stree.bench.records import Record
from stree.growth import Calibrated

SIZES = "16x4,64x6"  # nodes, root included, x draft calls
TEMPERATURES = (0.0, 0.8)
FORWARDS = ("draft forwards", "target forward")
PARTS = ("growth", "verify", "accept", "commit", "emit", "observe")


class Places:
    """Names the part of a step that runs, so that launches are counted there."""

    def __init__(self) -> None:
        self.now = "loop"

    def within(self, owner: Any, name: str, part: str) -> None:
        """Count launches inside a method or function under a part."""
        real: Callable[..., Any] = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.now = self.now, part
            try:
                return real(*args, **kwargs)
            finally:
                self.now = before

        setattr(owner, name, run)


def count(nodes: int, depth: int, temperature: float) -> Record:
    """Count one step of a draft model's tree of so many nodes and draft calls."""
    loop: Any = stree.decode.step
    own = {name: getattr(loop, name) for name in ("accept", "emit", "mask_invalid_logits")}
    launch = mock.patch.object(InterpretedFunction, "run", lambda *_, **__: None)
    with as_on_a_gpu(), launch:
        target, draft = (stree.TreeLM(tiny_model(family).to("meta")) for family in ("bamba", "mamba2"))
        program, step = begun(target, draft, nodes, Calibrated(depth), temperature)
        step()
        run: Any = program.run
        places = Places()
        counts = LaunchCounter(lambda: places.now)
        for owner, name, part in (
            (target, "forward", FORWARDS[1]), (draft, "forward", FORWARDS[0]), (run, "propose", "growth"),
            (target, "verify", "verify"), (loop, "accept", "accept"), (target, "commit", "commit"),
            (loop, "emit", "emit"), (loop, "mask_invalid_logits", "emit"), (run, "observe", "observe"),
        ):  # fmt: skip
            places.within(owner, name, part)
        try:
            with counts.watching():
                step()
        finally:
            vars(loop).update(own)
    by_part: Counter[str] = Counter()
    for (part, _), number in counts.found.items():
        by_part[part] += number
    beside = {part: number for part, number in by_part.items() if part not in FORWARDS}
    return {
        "bench": "step_counts",
        "provider": "stree",
        "params": {"nodes": nodes, "draft_calls": depth, "temperature": temperature},
        "metric": "launches",
        "unit": "launches/step",
        "value": sum(beside.values()),
        "parts": beside,
        "forwards": {part: by_part[part] for part in FORWARDS},
        "by_name": {f"{part}: {what}": number for (part, what), number in counts.found.most_common()
                    if part not in FORWARDS},
    }  # fmt: skip


def cells(record: Record) -> list[str]:
    """Return the line of the table: launches by part."""
    params, parts = record["params"], record["parts"]
    size = f"{params['nodes']} x {params['draft_calls']}"
    numbers = (str(parts.get(part, 0)) for part in (*PARTS, "loop"))
    return [size, f"{params['temperature']:g}", *numbers, str(record["value"])]


def records(sizes: str = SIZES) -> list[Record]:
    """Count all sizes at both temperatures.

    Args:
        sizes: nodes x draft calls, separated by commas; the interpreter is slow on large trees.
    """
    pairs = [[int(number) for number in size.split("x")] for size in sizes.split(",")]
    return [count(nodes, depth, temperature) for temperature in TEMPERATURES for nodes, depth in pairs]


if __name__ == "__main__":
    study(records, ["nodes x calls", "T", *PARTS, "loop", "all"], cells, replaces=True)
