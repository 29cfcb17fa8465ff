"""Measure the cost table of this machine and pair, which ``stree.cost.CostTable`` reads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from stree.bench.pair import Pair
from stree.bench.records import environment
from stree.bench.steps import binary_tree
from stree.cost import CostTable
from stree.drafters import ModelDrafter
from stree.growth import Static
from stree.models.tree_lm import TreeLM
from stree.sampling import Random
from stree.verify import Acceptance

__all__ = ["Points", "clock", "measure_cost"]

LAYERS = 3  # draft calls of one width that are timed together
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Points:
    """The grid that is measured.

    Attributes:
        nodes: tree sizes of a target step.
        widths: nodes of a draft call.
        batch: sequences.
        context: committed tokens.
    """

    nodes: Sequence[int]
    widths: Sequence[int]
    batch: Sequence[int]
    context: Sequence[int]


def measure_cost(pair: Pair, points: Points, rounds: int, advance: Callable[[], None]) -> CostTable:
    """Measure every point of the grid; medians of ``rounds``.

    Args:
        pair: the models.
        points: the grid.
        rounds: timed runs of each point; two more come before them.
        advance: called after every point.

    Raises:
        ValueError: the target or the drafter has fewer positions than a point needs; nothing is measured then.
    """
    context = max(points.context)
    for lm, most in ((pair.target, _room(max(points.nodes), context, rounds)), (pair.drafter, context + LAYERS + 2)):
        if lm is not None and lm.max_length is not None and most > lm.max_length:
            raise ValueError(f"a context of {context} takes {most} positions; a model has {lm.max_length}")
    target, draft = [], []
    for batch, context in product(points.batch, points.context):
        for n in points.nodes:
            target.append((batch, context, n, _target_ms(pair.target, n, batch, context, rounds)))
            advance()
        if pair.drafter is None:
            continue
        for width in points.widths:
            draft.append((batch, context, width, _draft_ms(pair.drafter, width, batch, context, rounds)))
            advance()
    env = environment(pair.target.device)
    threads = torch.get_num_threads()
    return CostTable(*pair.names, env["device"], pair.dtype, threads, target, draft, env)


def _room(nodes: int, context: int, rounds: int) -> int:
    """Count the tokens of a context, of two committed in every step, and of the last tree."""
    return context + 2 * (rounds + WARM_UP) + nodes


def _text(vocab: int, batch: int, context: int, device: torch.device) -> torch.Tensor:
    """Make texts of arbitrary tokens."""
    rows = torch.arange(batch * context, device=device).view(batch, context)
    return rows * 7919 % vocab


def _target_ms(lm: TreeLM, nodes: int, batch: int, context: int, rounds: int) -> float:
    """Time verify of a binary tree and commit of its leftmost two nodes."""
    state = lm.new_state(batch, _room(nodes, context, rounds), nodes)
    lm.prefill(state, _text(lm.vocab_size, batch, context, lm.device))
    tree = binary_tree(nodes, lm.vocab_size, lm.device, batch)
    length = min(nodes, 2)
    path = torch.arange(length, dtype=torch.int32, device=lm.device).expand(batch, length).contiguous()
    lengths = torch.full((batch,), length, dtype=torch.int32, device=lm.device)
    times = []
    for _ in range(rounds + WARM_UP):
        began = clock(lm.device)
        lm.verify(state, tree)
        lm.commit(state, path, lengths)
        times.append(clock(lm.device) - began)
    return 1e3 * statistics.median(times[WARM_UP:])


def _draft_ms(lm: TreeLM, width: int, batch: int, context: int, rounds: int) -> float:
    """Time a draft call of ``width`` nodes: a tree with further layers of that width less one without."""
    prompts = _text(lm.vocab_size, batch, context, lm.device).tolist()
    rng = Random(0, torch.arange(batch, device=lm.device), torch.full((batch,), context, device=lm.device))
    pending = torch.full((batch,), 7 % lm.vocab_size, device=lm.device)
    none = torch.zeros(batch, dtype=torch.int32, device=lm.device)
    nothing = Acceptance(none[:, None], none, pending)
    shapes = (Static([width, *[1] * LAYERS]), Static([width]))
    budget = 1 + width * (LAYERS + 1)
    run = ModelDrafter(lm).start(lm.vocab_size, prompts, rng)
    times: list[float] = []
    for _ in range(rounds + WARM_UP):
        seconds = []
        for shape in shapes:
            began = clock(lm.device)
            run.propose(pending, shape, budget)
            seconds.append(clock(lm.device) - began)
            run.observe(nothing)
        times.append((seconds[0] - seconds[1]) / LAYERS)
    return max(1e3 * statistics.median(times[WARM_UP:]), 1e-6)  # noise may outweigh a call of a tiny model


def clock(device: torch.device) -> float:
    """Read the time, seconds; waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
