"""Composite speeds: the steps that one pair was measured to need, at the step times that other shapes take.

A composite figure says what the measured trees would bring if a pair of these shapes agreed as often as the measured
pair does.  It is a calculation from two measurements, and is labelled so wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stree.bench.records import Record
from stree.bench.summary import Ratio, sum_ratio, tau_of

__all__ = ["Blocks", "Key", "StepTimes", "composite_rows", "overhead_s", "pooled", "ratios", "seconds_of", "tau"]

NO_TREES = ("plain", "transformers")

Array = NDArray[np.float64]
Key = tuple[str, int, int]  # suite, batch of prompts, turn
Blocks = Mapping[Key, Record]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a whole step (verify and commit) by nodes, measured at some sizes, ascending."""

    nodes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def by_model(cls, records: Sequence[Record], provider: str, batch: int, context: int) -> dict[str, StepTimes]:
        """Step times of every model that has any, from records of ``steps.py``."""
        asked, found = {"batch": batch, "context": context}, dict[str, dict[int, float]]()
        for record in records:
            params = record["params"]
            if record.get("provider") == provider and "p50" in record and asked.items() <= params.items():
                found.setdefault(params["model"], {})[params["n"]] = 1e-6 * record["p50"]
        return {model: cls(*map(tuple, zip(*sorted(times.items()), strict=True))) for model, times in found.items()}

    def at(self, nodes: float) -> float:
        """Interpolate between sizes; beyond the largest the last slope goes on."""
        if nodes > self.nodes[-1] and len(self.nodes) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.nodes[-1] - self.nodes[-2])
            return self.seconds[-1] + max(slope, 0.0) * (nodes - self.nodes[-1])
        return float(np.interp(nodes, self.nodes, self.seconds))


def pooled(records: Sequence[Record], temperature: float) -> dict[str, dict[Key, Record]]:
    """Gather timed records of a run by method and prompt, all suites together.

    A method that is not lossless on every prompt, or lacks prompts that plain decoding has, is left out.
    """
    methods: dict[str, dict[Key, Record]] = {}
    for record in records:
        params = record["params"]
        if record["metric"] == "tokens_per_s" and params["temperature"] == temperature:
            blocks = methods.setdefault(record["provider"], {})
            blocks[params["suite"], params["batch"], params["turn"]] = record
    whole = methods.get("plain", {}).keys()
    return {
        name: blocks
        for name, blocks in methods.items()
        if blocks.keys() >= whole and all(block["lossless"] is not False for block in blocks.values())
    }


def overhead_s(blocks: Blocks, new_tokens: int, target: StepTimes, draft: StepTimes) -> float:
    """Estimate seconds a step outside the models' forwards: all that a run took less its steps and draft calls.

    Args:
        blocks: of one method, as measured, one repeat each.
        new_tokens: that every sequence emitted.
        target: the measured pair's own.
        draft: likewise.
    """
    took: float = sum(len(b["params"]["prompts"]) * new_tokens / b["p50"] - b["prefill_s"] for b in blocks.values())
    steps: int = sum(b["steps"] for b in blocks.values())
    forwards = sum(seconds_of(b, target, draft, 0.0) for b in blocks.values())
    return max(0.0, took - forwards) / max(steps, 1)


def seconds_of(block: Record, target: StepTimes, draft: StepTimes, overhead: float) -> float:
    """Compute what the steps of a measured block take at given step times.

    Its steps count as equal ones, of as many nodes and draft calls as they had on average.
    """
    steps = max(block["steps"], 1)
    each = step_seconds(block["verified"] / steps, block["draft_calls"] / steps, target, draft, overhead)
    return float(block["steps"] * each)


def step_seconds(nodes: float, calls: float, target: StepTimes, draft: StepTimes, overhead: float) -> float:
    """Compute what a step of ``nodes``, root included, and draft calls takes: seconds, ``overhead`` of them.

    A draft call is a whole step of the drafter of as many nodes as a call drafts on average, its commit included,
    though most calls have none.
    """
    drafting = calls * draft.at(max(1.0, (nodes - 1) / calls)) if calls else 0.0
    return target.at(nodes) + overhead + drafting


def composite_rows(
    methods: Mapping[str, Blocks], overheads: Mapping[str, float], target: StepTimes, draft: StepTimes
) -> list[Record]:
    """Compute the composite speed of every method, and of the best tree over the best chain and over plain decoding.

    "Best" is the least total time over the measured prompts, for chains and trees alike.

    Args:
        methods: blocks of each, of one temperature; "plain" among them.  Methods whose sizes followed the clock of the
            measured pair ("auto") or that are no draft model's are left out.
        overheads: seconds a step outside the forwards, by method, as `overhead_s` has them.
        target: step times of the shape.
        draft: step times of its drafter.

    Returns:
        A record a method, with ``over_plain``, and ``over_chain`` for trees: (value, low, high).
    """
    kept = {
        name: blocks
        for name, blocks in methods.items()
        if name == "plain" or (name != "auto" and next(iter(blocks.values()))["params"]["drafter"] == "model")
    }
    keys = sorted(kept["plain"])
    seconds = {
        name: [seconds_of(blocks[key], target, draft, overheads[name]) for key in keys] for name, blocks in kept.items()
    }
    best = best_of(seconds)
    rows = []
    for name, blocks in kept.items():
        whole = sum(seconds[name])
        steps = sum(blocks[key]["steps"] for key in keys)
        rows.append(
            {
                "method": name,
                "is_best": name in best,
                "tau": tau({key: blocks[key] for key in keys}),
                "step_ms": 1e3 * whole / steps,
                "outside_forwards": steps * overheads[name] / whole,
                **ratios(seconds, name),
            }
        )
    return rows


def best_of(seconds: Mapping[str, Sequence[float]]) -> list[str | None]:
    """The fastest chain and the fastest tree, from seconds of each method by prompt; None where there is none."""
    chains = [name for name in seconds if name.startswith("chain")]
    trees = [name for name in seconds if name not in chains and name not in NO_TREES]
    return [min(kind, key=lambda name: sum(seconds[name]), default=None) for kind in (chains, trees)]


def tau(blocks: Blocks) -> Ratio | None:
    """Tokens a step of a method, with an interval over prompts."""
    return tau_of({(key[:2], key[2]): block for key, block in blocks.items()})


def ratios(seconds: Mapping[str, Sequence[float]], method: str) -> Record:
    """Speed of a method over plain decoding, and of a tree over the fastest chain, which is named."""
    chain, _ = best_of(seconds)
    row: Record = {"over_plain": sum_ratio(seconds["plain"], seconds[method])}
    if chain is not None and not method.startswith("chain") and method not in NO_TREES:
        row |= {"chain": chain, "over_chain": sum_ratio(seconds[chain], seconds[method])}
    return row
