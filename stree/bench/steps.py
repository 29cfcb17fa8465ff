"""What tree, unrolled and snapshot verification cost at equal nodes: time of verify and commit, and state memory.

All three verify the same trees from the same state; before anything is timed, their logits are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stree.bench.baselines import BaselineLM, SnapshotLM, UnrolledLM, state_bytes
from stree.bench.pair import Pair
from stree.bench.records import Record, quantiles
from stree.models.tree_lm import TreeLM
from stree.tree import TokenTree

__all__ = ["binary_tree", "measure_steps"]

ENGINES: dict[str, Callable[[TreeLM], TreeLM | BaselineLM]] = {
    "tree": lambda lm: lm,
    "unrolled": UnrolledLM,
    "snapshot": SnapshotLM,
}
WARM_UP = 2
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}  # of the logit scale


def binary_tree(n: int, vocab: int, device: torch.device, batch: int = 1) -> TokenTree:
    """Make a tree in which every node has two children, of arbitrary tokens; the same for every sequence."""
    parents = torch.tensor([(node - 1) // 2 if node else -1 for node in range(n)], dtype=torch.int32, device=device)
    tokens = torch.arange(n, device=device) * 7 % vocab
    return TokenTree.unchecked(tokens.repeat(batch, 1), parents.repeat(batch, 1))


class _Engine:
    """One way to verify, with a state."""

    def __init__(self, name: str, pair: Pair, prompt: Sequence[int], nodes: int, rounds: int) -> None:
        lm: Any = ENGINES[name](pair.target)
        self.lm = lm
        ids = torch.tensor([list(prompt)], device=pair.target.device)
        room = len(prompt) + 4 * (rounds + WARM_UP + 1) + nodes
        self.state = lm.new_state(1, room, nodes)
        lm.prefill(self.state, ids)
        self.bytes = state_bytes(pair.target, room)
        self.device = pair.target.device

    def step(self, tree: TokenTree) -> torch.Tensor:
        """Verify a tree and commit its leftmost path of at most four nodes."""
        logits: torch.Tensor = self.lm.verify(self.state, tree)
        path = [0]
        while len(path) < 4 and 2 * path[-1] + 1 < tree.tokens.shape[1]:
            path.append(2 * path[-1] + 1)
        nodes = torch.tensor([path], dtype=torch.int32, device=self.device)
        self.lm.commit(self.state, nodes, torch.tensor([len(path)], dtype=torch.int32, device=self.device))
        return logits

    def seconds(self, tree: TokenTree) -> float:
        """Time one step; waits for the device."""
        began = time.perf_counter()
        self.step(tree)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began

    def num_bytes(self, nodes: int) -> int:
        """Count state and stash."""
        if isinstance(self.lm, BaselineLM):
            return int(self.state.peak_bytes)
        per_state, per_node = self.bytes
        return per_state + nodes * per_node


def measure_steps(pair: Pair, prompt: Sequence[int], nodes: Sequence[int], rounds: int, base: Record) -> list[Record]:
    """Measure every engine at every number of nodes, interleaved.

    Args:
        pair: the models.
        prompt: tokens before the trees.
        nodes: tree sizes, root included.
        rounds: timed steps of each; two more come before them.
        base: what every record holds.

    Returns:
        For each engine and size a record "step_latency" (ms, or failed where its logits differ from the tree's) and one
        "state_bytes"; for the tree also what a chain of as many nodes leaves in the stash, ReplaySSM's way to commit.
    """
    found: list[Record] = []
    for n in nodes:
        tree = binary_tree(n, pair.target.vocab_size, pair.target.device)
        engines = {name: _Engine(name, pair, prompt, n, rounds) for name in ENGINES}
        wrong = _wrong(engines, tree, TOLERANCE[pair.target.dtype])
        for name, error in wrong.items():
            failed = {"metric": "step_latency", "status": "failed", "relative_error": error}
            found.append({**base, "provider": name, "params": {"engine": name, "nodes": n}, **failed})
        times: dict[str, list[float]] = {name: [] for name in ENGINES if name not in wrong}
        for turn in range(rounds + WARM_UP):
            order = list(times)[turn % len(times) :] + list(times)[: turn % len(times)]
            for name in order:
                seconds = engines[name].seconds(tree)
                if turn >= WARM_UP:
                    times[name].append(1e3 * seconds)
        for name, values in times.items():
            line = {**base, "provider": name, "params": {"engine": name, "nodes": n, "prompt_tokens": len(prompt)}}
            found.append({**line, "metric": "step_latency", "unit": "ms", **quantiles(values)})
            found.append({**line, "metric": "state_bytes", "unit": "bytes", "value": engines[name].num_bytes(n)})
        per_state, per_node = engines["tree"].bytes
        sizes = {"state": per_state, "stash_per_node": per_node, "replay_chain": per_state + n * per_node}
        found.append({**base, "provider": "sizes", "params": {"nodes": n}, "metric": "sizes", "unit": "bytes", **sizes})
    return found


def _wrong(engines: Mapping[str, _Engine], tree: TokenTree, tolerance: float) -> dict[str, float]:
    """Find the engines whose logits are not the tree's, and by how much; every engine makes a step."""
    wanted = engines["tree"].step(tree)
    scale = float(wanted.abs().max())
    errors = {name: float((engines[name].step(tree) - wanted).abs().max()) / scale for name in ("unrolled", "snapshot")}
    return {name: error for name, error in errors.items() if not error <= tolerance}
