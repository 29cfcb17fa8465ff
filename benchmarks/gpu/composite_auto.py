"""Composite figures of the default budget: the controller is told that steps take what those of another shape take.

It then chooses the sizes that it would choose there, on texts of the measured pair, and every step is charged what it
takes there.  Like all composite figures it is a calculation, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import stree.rehearsal
from benchmarks.gpu.composite import Key, StepTimes, speedup, step_seconds
from stree.bench.pair import Pair
from stree.bench.records import Record
from stree.drafters import Draft, ModelDrafter
from stree.engine import engine_of
from stree.generation import run
from stree.rehearsal import step_times
from stree.sampling import Sampling
from stree.steering import AutoSize, Sizes, Steering
from stree.verify import Acceptance

__all__ = ["ShapeTimes", "auto_row"]

WIDTH = 4  # nodes of the draft call by which the controller counts


class ShapeTimes:
    """What steps of a shape take, forwards and what stands outside them.

    Args:
        target: seconds of a step of the target.
        draft: likewise of the drafter.
        beside_plain: seconds outside the forwards of a step of plain decoding.
        beside_tree: likewise of a tree.
    """

    def __init__(self, target: StepTimes, draft: StepTimes, beside_plain: float, beside_tree: float) -> None:
        self._target, self._draft = target, draft
        self._beside_plain, self._beside_tree = beside_plain, beside_tree

    def seconds(self, nodes: int, calls: int) -> float:
        """Charge a step of so many nodes, root included, and draft calls."""
        beside = self._beside_tree if calls else self._beside_plain
        return step_seconds(nodes, calls, self._target, self._draft, beside)

    def told(self) -> stree.rehearsal.StepTimes:
        """Write them as the controller takes them, which knows no width of a call."""
        tree = [self._target.at(nodes) + self._beside_tree for nodes in self._target.nodes]
        tree_ms = 1e3 * np.maximum.accumulate(tree)
        nodes = np.array(self._target.nodes, dtype=float)
        return stree.rehearsal.StepTimes(1e3 * self.seconds(1, 0), nodes, tree_ms, 1e3 * self._draft.at(WIDTH))


def auto_row(
    pair: Pair,
    prompts: Mapping[Key, Sequence[int]],
    plain: Mapping[Key, float],
    new_tokens: int,
    temperature: float,
    times: ShapeTimes,
) -> Record:
    """Run the controller on every prompt, and set what its steps take beside plain decoding.

    Args:
        pair: the measured one.
        prompts: tokens of each.
        plain: seconds of plain decoding at the same shape, of the same prompts.
        new_tokens: of every text.
        temperature: of target and draft.
        times: of the shape.

    Returns:
        tau, milliseconds a step, how many steps and how many of them plain, and ``over_plain``: (value, low, high) of a
        paired bootstrap.
    """
    steps = {key: _sizes_of(pair, prompt, new_tokens, temperature, times) for key, prompt in prompts.items()}
    seconds = {key: sum(times.seconds(*size) for size in sizes) for key, sizes in steps.items()}
    sizes = [size for found in steps.values() for size in found]
    return {
        "method": "auto", "is_best": False, "tau": len(steps) * (new_tokens - 1) / max(len(sizes), 1),
        "step_ms": 1e3 * sum(seconds.values()) / max(len(sizes), 1), "plain_steps": sum(n == 1 for n, _ in sizes),
        "steps": len(sizes), "over_plain": speedup([plain[key] for key in prompts], [seconds[key] for key in prompts]),
    }  # fmt: skip


class _Noted(AutoSize):
    """Notes the size that every step turned out to have."""

    def __init__(self, found: list[tuple[int, int]], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._found = found

    def observe(self, draft: Draft, acceptance: Acceptance) -> None:
        """Note it."""
        self._found.append((draft.tree.tokens.shape[1], draft.num_calls))
        super().observe(draft, acceptance)


def _sizes_of(
    pair: Pair, prompt: Sequence[int], new_tokens: int, temperature: float, times: ShapeTimes
) -> list[tuple[int, int]]:
    """List nodes and draft calls of the steps of one text."""
    assert pair.drafter is not None
    lm, drafter, sampling = pair.target, ModelDrafter(pair.drafter), Sampling(temperature)
    engine, found = engine_of(lm), list[tuple[int, int]]()

    def steered(sizes: Sizes) -> Steering:
        own = step_times(
            lm, drafter, sizes, 1, prompt, sampling=sampling, verifier="auto", engine=engine, processor=None
        )  # fmt: skip
        return _Noted(found, sizes, times.told(), experience=own.experience, is_padded=engine is not None)

    run(
        lm, [prompt], drafter, growth=None, budget="auto", verifier="auto", sampling=sampling,
        max_new_tokens=new_tokens, stop_token_ids=None, processor=None, seed=0, streamer=None, steered=steered,
    )  # fmt: skip
    return found
