"""Count the kernels of one whole decoding step, by part, without a GPU: what stands beside the models' forwards.

Run: python benchmarks/step_counts.py [--sizes 16x4 64x6] [--out FILE]

A tiny hybrid target and a tiny Mamba-2 drafter take a step at fixed shapes, with Triton's kernels under its
interpreter, as a GPU would.  Counted is what `kernel_counts.py` counts; forwards are counted apart, and depend on the
models.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import kernel_counts  # sets the interpreter up, so before what it imports
import torch
from helpers.tiny_models import grafted, tiny_model
from rich.table import Table

import stree.program
from stree.bench.records import Record, environment
from stree.drafters import ModelDrafter
from stree.growth import Calibrated
from stree.program import Program
from stree.sampling import Random, Sampling

SIZES = ((16, 4), (64, 6))  # nodes, root included, and draft calls
TEMPERATURES = (0.0, 0.8)
PROMPT = [5, 6, 7, 8, 9, 3]
FORWARDS = ("draft forwards", "target forward")
PARTS = ("growth", "verify", "accept", "commit", "emit", "observe")


class Places:
    """Names the part of a step that runs, so that launches are counted there."""

    def __init__(self) -> None:
        self.now = "loop"

    def within(self, owner: Any, name: str, part: str) -> None:
        """Let a method or function be a part."""
        real: Callable[..., Any] = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.now = self.now, part
            try:
                return real(*args, **kwargs)
            finally:
                self.now = before

        setattr(owner, name, run)


class StepCounts(kernel_counts.Counts):
    """Counts launches by the part that runs; arguments as for ``Counts``, and the places."""

    def __init__(self, lm: stree.TreeLM, places: Places) -> None:
        super().__init__(lm)
        self.parts: Counter[tuple[str, str]] = Counter()
        self._where = places

    def _count(self, what: str) -> None:
        self.parts[self._where.now, what] += 1


def count(nodes: int, depth: int, temperature: float) -> Record:
    """Count one step of a draft model's tree of so many nodes and draft calls."""
    growth = Calibrated(depth).bind(Sampling(temperature))
    loop: Any = stree.program
    accept = loop.accept
    with kernel_counts.as_on_a_gpu():
        target, draft = grafted(tiny_model("bamba")), grafted(tiny_model("mamba2", seed=1))
        state = target.new_state(1, 512, nodes, fixed_shapes=True)
        rng = Random(torch.zeros((), dtype=torch.long), torch.arange(1), torch.tensor([len(PROMPT)]))
        program = Program(target, state, rng, sampling=growth.sampling, verifier="auto", stop_token_ids=[1])
        program.fill(ModelDrafter(draft), [PROMPT], 400, 0)
        run: Any = program.run
        run.reserve(512, growth, nodes, begins=True)
        program.begin(0, 3, is_finished=False)
        program.step(growth, nodes)
        places = Places()
        counts = StepCounts(target, places)
        for owner, name, part in (
            (target, "forward", FORWARDS[1]), (draft, "forward", FORWARDS[0]), (run, "propose", "growth"),
            (target, "verify", "verify"), (loop, "accept", "accept"), (target, "commit", "commit"),
            (program, "_emit", "emit"), (run, "observe", "observe"),
        ):  # fmt: skip
            places.within(owner, name, part)
        try:
            with counts.watching():
                program.step(growth, nodes)
        finally:
            loop.accept = accept
    by_part: Counter[str] = Counter()
    for (part, _), number in counts.parts.items():
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
        "by_name": {f"{part}: {what}": number for (part, what), number in counts.parts.most_common()
                    if part not in FORWARDS},
    }  # fmt: skip


def table(records: Sequence[Record]) -> Table:
    """Set the parts beside each other."""
    found = Table("nodes x calls", "T", *PARTS, "loop", "all", title="launches of a step beside the forwards")
    for record in records:
        params, parts = record["params"], record["parts"]
        numbers = (str(parts.get(part, 0)) for part in (*PARTS, "loop"))
        size = f"{params['nodes']} x {params['draft_calls']}"
        found.add_row(size, f"{params['temperature']:g}", *numbers, str(record["value"]))
    return found


def main() -> None:
    """Count all sizes at both temperatures, and print a table and the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=[f"{nodes}x{depth}" for nodes, depth in SIZES],
                        help="nodes x draft calls; the interpreter is slow on large trees")  # fmt: skip
    parser.add_argument("--out", type=Path, help="file of JSON lines, replaced")
    options = parser.parse_args()
    env = environment()
    sizes = [tuple(map(int, size.split("x"))) for size in options.sizes]
    records = [
        {**count(nodes, depth, temperature), "env": env} for temperature in TEMPERATURES for nodes, depth in sizes
    ]
    kernel_counts.report(records, table(records), options.out)


if __name__ == "__main__":
    main()
