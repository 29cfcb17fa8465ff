"""Time and memory of four ways to verify the same tree: packed (the library's), snapshots, replay, unrolled paths.

Run with ``python -m benchmarks.studies.verification [--out FILE]``; it prints a table and one JSON line.  All four give
the same logits and states (``tests/bench/test_baselines.py``) and share all code but the recurrence and what is kept of
it, so only a step's time and the bytes of a pending node differ.  A step is a verification and the commit of 3 nodes;
its time is processor time of one thread, the mean of a round, best of several rounds in turns.  Models run in float32,
operation by operation, the bundled target (two attention layers, six Mamba-2 layers) and random weights of
mamba2-130m's sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from benchmarks.report import study
from stree import TokenTree, TreeLM
from stree.bench.records import Record
from stree.bench.sequential import ReplayLM, SnapshotLM
from stree.bench.unrolled import UnrolledLM
from stree.inputs import ASSETS
from stree.models.state_size import measure_state

__all__ = ["TITLES", "WAYS", "cells", "measure", "static_tree"]

TREES = {16: (3, 2, 1), 64: (7, 2, 1, 1, 1)}  # nodes -> children of every node of a depth
WAYS: dict[str, Callable[[TreeLM], Any]] = {
    "packed": lambda lm: lm, "snapshot": SnapshotLM, "replay": ReplayLM, "unrolled": UnrolledLM,
}  # fmt: skip
TITLES = ("model", "verification", "bytes a node", *(f"ms a step, {n} nodes" for n in TREES), "over packed")
PROMPT, COMMITTED = 64, 3  # tokens
MIB, KIB = 2**20, 2**10


def models() -> Iterator[tuple[str, TreeLM]]:
    """Yield names and models."""
    yield "bundled target", TreeLM.from_pretrained(ASSETS / "target", dtype="float32")
    sizes = {"hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24, "head_dim": 64, "state_size": 128}
    config = Mamba2Config(**sizes, n_groups=1, expand=2, vocab_size=50288, tie_word_embeddings=True)
    torch.manual_seed(0)
    yield "mamba2-130m", TreeLM(Mamba2ForCausalLM(config))


def static_tree(widths: Sequence[int], vocab: int) -> TokenTree:
    """Make the tree in which every node of depth d has ``widths[d]`` children, with random tokens."""
    parents, depth = [-1], [0]
    for width in widths:
        above = depth
        depth = [*range(len(parents), len(parents) + width * len(above))]
        parents += [parent for parent in above for _ in range(width)]
    tokens = torch.randint(vocab, (1, len(parents)), generator=torch.Generator().manual_seed(0))
    return TokenTree(tokens, torch.tensor([parents], dtype=torch.int32))


def measure(lm: TreeLM, widths: Sequence[int], rounds: int, steps: int = 4) -> dict[str, float]:
    """Return the seconds of a step of every way."""
    tree, length = static_tree(widths, lm.vocab_size), PROMPT + (rounds + 1) * steps * COMMITTED + len(widths) + 1
    path = torch.arange(-1, COMMITTED - 1).maximum(torch.tensor(0))[None].int()  # the root, then first children
    for place, (_, after) in enumerate(pairwise(range(COMMITTED))):
        path[0, after] = (tree.parents[0] == path[0, place]).nonzero()[0, 0]
    ways, states, best = {name: make(lm) for name, make in WAYS.items()}, dict[str, Any](), dict[str, float]()
    for name, way in ways.items():
        states[name] = way.new_state(1, length, tree.tokens.shape[1])
        way.prefill(states[name], torch.arange(1, PROMPT + 1)[None])
    for number in range(rounds + 1):
        for name, way in ways.items():
            began = time.process_time()
            for _ in range(steps):
                way.verify(states[name], tree)
                way.commit(states[name], path, torch.tensor([COMMITTED], dtype=torch.int32))
            if number:  # the first round allocates
                best[name] = min(best.get(name, float("inf")), (time.process_time() - began) / steps)
    return best


def records(rounds: int = 6) -> Iterator[Record]:
    """Measure all models.

    Args:
        rounds: of 4 steps of every way.
    """
    torch.set_num_threads(1)
    for name, lm in models():
        seconds = {n: measure(lm, widths, rounds) for n, widths in TREES.items()}
        kept = {"packed": measure_state(lm).stash_per_node, "unrolled": None}
        kept |= {way: WAYS[way](lm).node_bytes for way in ("snapshot", "replay")}
        for way in WAYS:
            times = {f"ms_{n}": 1e3 * found[way] for n, found in seconds.items()}
            over = {f"over_packed_{n}": found[way] / found["packed"] for n, found in seconds.items()}
            yield {"bench": "verification", "model": name, "way": way, "node_bytes": kept[way], **times, **over}


def cells(record: Record) -> list[str]:
    """Return the line of a table."""
    size = record["node_bytes"]
    text = "a path" if size is None else f"{size / MIB:.2f} MiB" if size > MIB else f"{size / KIB:.1f} KiB"
    over = " / ".join(f"{record[f'over_packed_{n}']:.2f}" for n in TREES)
    return [record["model"], record["way"], text, *(f"{record[f'ms_{n}']:.1f}" for n in TREES), over]


if __name__ == "__main__":
    study(records, TITLES, cells, replaces=True)
