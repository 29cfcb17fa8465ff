"""How the time of verifying and of committing grows on a CPU: with nodes, batch and context, eager or compiled.

Run with ``python -m benchmarks.studies.cpu_scaling [--compile] [--out FILE]``; it prints a table and one JSON line.
The model is the bundled target, with more positions; its state holds zeros in place of a text, which takes the same
time.  Trees are binary, and 3 nodes are committed.  Times are processor time of one thread, the least of several rounds
in turns over all sizes, so other work on the machine adds little.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.report import study
from stree import TokenTree, TreeLM
from stree.bench.device_clock import binary_parents
from stree.bench.records import Record
from stree.inputs import ASSETS

__all__ = ["SIZES", "TITLES", "cells", "measure"]

NODES, BATCHES, CONTEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 2, 4, 8, 16, 32), (256, 1024, 4096, 16384, 32512)
# Axis -> (nodes, batch, context) of its cells.
SIZES = {
    "nodes": [(nodes, 1, 256) for nodes in NODES],
    "batch": [(16, batch, 256) for batch in BATCHES],
    "context": [(16, 1, context) for context in CONTEXTS],
}
PATH = (0, 1, 3)  # nodes that are committed, as far as the tree has them
TITLES = ("way", "axis", "nodes", "batch", "context", "verify, ms", "commit, ms")


def step(lm: TreeLM, nodes: int, batch: int, context: int) -> Callable[[], tuple[float, float]]:
    """Return what times one verification and one commit behind ``context`` tokens, in seconds."""
    state = lm.new_state(batch, context + nodes, nodes)
    tokens = torch.randint(lm.vocab_size, (batch, nodes), generator=torch.Generator().manual_seed(0))
    tree, path = TokenTree(tokens, binary_parents(batch, nodes, lm.device)), [node for node in PATH if node < nodes]
    paths = torch.tensor([path] * batch, dtype=torch.int32)
    count = torch.full((batch,), len(path), dtype=torch.int32)

    def run() -> tuple[float, float]:
        state.lengths.fill_(context - len(path))
        state.length_bound = context
        began = time.process_time()
        lm.verify(state, tree)
        verified = time.process_time()
        lm.commit(state, paths, count)
        return verified - began, time.process_time() - verified

    return run


def measure(lm: TreeLM, way: str, axes: Sequence[str], rounds: int) -> list[Record]:
    """Measure the cells of some axes with an eager or compiled model."""
    cases = [(axis, *size) for axis in axes for size in SIZES[axis]]
    steps = [step(lm, *size) for _, *size in cases]
    times = [[run() for run in steps] for _ in range(rounds + 1)][1:]  # the first round compiles and allocates
    records: list[Record] = []
    for case, *taken in zip(cases, *times, strict=True):
        verify_s, commit_s = (min(part) for part in zip(*taken, strict=True))
        sizes = dict(zip(("axis", "nodes", "batch", "context"), case, strict=True))
        records.append(
            {"bench": "cpu_scaling", "way": way, **sizes, "verify_ms": 1e3 * verify_s, "commit_ms": 1e3 * commit_s}
        )
    return records


def cells(record: Record) -> list[str]:
    """Return the line of a table."""
    sizes = (str(record[name]) for name in ("way", "axis", "nodes", "batch", "context"))
    return [*sizes, f"{record['verify_ms']:.1f}", f"{record['commit_ms']:.2f}"]


def records(rounds: int = 9, axes: str = ",".join(SIZES), compile: bool = False) -> list[Record]:
    """Measure the bundled target.

    Args:
        rounds: of which the fastest counts.
        axes: some of them; every batch size is compiled by itself.
        compile: measure the compiled model in place of the eager one.
    """
    torch.set_num_threads(1)
    lm = TreeLM.from_pretrained(ASSETS / "target", dtype="float32")
    lm.model.config.max_position_embeddings = max(CONTEXTS) + max(NODES)
    if compile:
        lm.compile()
    return measure(lm, "compiled" if compile else "eager", axes.split(","), rounds)


if __name__ == "__main__":
    study(records, TITLES, cells)
