"""Times device work: replays of one CUDA graph between events; plain calls where there is no GPU; and steps to time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stree.bench.records import Record, quantiles
from stree.decode.cuda_graphs import CudaRecorder
from stree.kernels.clock import wait_for
from stree.models.tree_lm import TreeLM
from stree.tree import TokenTree

__all__ = ["binary_parents", "step_of", "time_calls", "time_graph", "time_launches", "tree_step"]


def time_graph(calls: Callable[[], Any], device: torch.device, count: int = 1, runs: int = 50) -> Record:
    """Time ``calls``, which does ``count`` equal pieces of work: quantiles of microseconds a piece."""
    if device.type != "cuda":
        return time_calls(calls, device, count, runs=3)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            calls()
    torch.cuda.current_stream().wait_stream(stream)
    return time_launches(CudaRecorder(device).capture(calls)[0].replay, device, count, runs)


def time_launches(launch: Callable[[], Any], device: torch.device, count: int = 1, runs: int = 50) -> Record:
    """Time what ``launch`` puts into the stream, by events around it: quantiles of microseconds a piece of work."""
    for _ in range(3):
        launch()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for begin, end in events:
        begin.record()
        launch()
        end.record()
    torch.cuda.synchronize(device)
    return quantiles([begin.elapsed_time(end) * 1e3 / count for begin, end in events])


def time_calls(calls: Callable[[], Any], device: torch.device, count: int = 1, runs: int = 10) -> Record:
    """Time plain calls, waiting for the device after each: quantiles of microseconds a piece of work."""
    times = []
    for _ in range(2 + runs):
        start = time.perf_counter()
        calls()
        wait_for(device)
        times.append((time.perf_counter() - start) * 1e6 / count)
    return quantiles(times[2:])


def binary_parents(batch: int, nodes: int, device: torch.device) -> Tensor:
    """Return int32[batch, nodes] parents of complete binary trees."""
    parents = [[(node - 1) // 2 if node else -1 for node in range(nodes)]] * batch
    return torch.tensor(parents, dtype=torch.int32, device=device)


def tree_step(lm: TreeLM, nodes: int, context: int) -> Callable[[], Any]:
    """Return a call that verifies a binary tree behind ``context`` tokens and commits its root."""
    state = lm.new_state(1, context + 512, nodes, fixed_shapes=True)
    lm.prefill(state, torch.arange(context, device=lm.device)[None] % lm.vocab_size)
    return step_of(lm, state, nodes, 1)


def step_of(lm: TreeLM, state: Any, nodes: int, most: int) -> Callable[[], Any]:
    """Return a call that verifies a binary tree in each row and commits its leftmost path, ``most`` nodes or less."""
    batch, length = state.batch_size, min(most, nodes.bit_length())
    tokens = (torch.arange(nodes, device=lm.device) % lm.vocab_size).repeat(batch, 1)
    drawn = TokenTree.unchecked(tokens, binary_parents(batch, nodes, lm.device))
    tree = TokenTree.unchecked(tokens, drawn.parents, drawn.depths, drawn.ancestor_mask)  # as a growth leaves it
    left = [[2**depth - 1 for depth in range(length)]] * batch
    path = torch.tensor(left, dtype=torch.int32, device=lm.device)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=lm.device)

    def step() -> Any:
        logits = lm.verify(state, tree)
        lm.commit(state, path, lengths)
        return logits

    return step
