"""Tokens a step of a masked-diffusion drafter (SpecDiff) by denoising steps, beside other drafters.

Run: python -m benchmarks.studies.denoising --suite NAME=FILE,... --drafters model=bundled,diffusion=FOLDER

All prompts of a drafter are one batch; tau and its 95 % interval are over prompts.  Draft calls are those of
a step: layers of a tree for a draft model, one for a one-shot head, denoising steps for a masked-diffusion drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import stree
from benchmarks.report import study
from stree.bench.pair import Pair
from stree.bench.plan import read_suites
from stree.bench.prompts import parse_suites
from stree.bench.summary import sum_ratio
from stree.bench.tables import ratio_text
from stree.drafters import Drafter, HeadDrafter
from stree.heads import MaskedDiffusion, OneShotHead
from stree.inputs import locate

__all__ = ["TITLES", "cells", "drafters_of", "measure"]

TITLES = ("drafter", "method", "draft calls", "tau, T 0", "tau, T 0.8")
TEMPERATURES = (0.0, 0.8)


def drafters_of(name: str, source: str, steps: Sequence[int], lm: stree.TreeLM) -> dict[str, Drafter]:
    """Load a drafter, a masked-diffusion model once for each number of denoising steps."""
    drafter = stree.drafters.load(source, lm)
    if not (isinstance(drafter, HeadDrafter) and isinstance(drafter.head, MaskedDiffusion)):
        return {name: drafter}
    head = drafter.head
    return {
        f"{name}, {count} {'steps' if count > 1 else 'step'}": HeadDrafter(head.with_steps(count)) for count in steps
    }


def measure(
    lm: stree.TreeLM, drafter: Drafter, method: str, prompts: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, Any]:
    """Generate at both temperatures; ``method`` is "chain:4", or "calibrated:16" as deep as one pass of drafts is."""
    head = drafter.head if isinstance(drafter, HeadDrafter) else None
    depth = head.num_drafted if isinstance(head, OneShotHead | MaskedDiffusion) else 4
    growth = stree.growth.Chain(4) if method == "chain:4" else stree.growth.Calibrated(depth=depth)
    row: dict[str, Any] = {"method": method if method == "chain:4" else f"{method}x{depth}", "tau": {}}
    for temperature in TEMPERATURES:
        stats = stree.generate(
            lm, prompts, drafter, growth=growth, budget=5 if method == "chain:4" else 16,
            sampling=stree.Sampling(temperature), max_new_tokens=new_tokens, ignore_eos=True, max_batch=len(prompts),
        ).stats  # fmt: skip
        taus: Any = stats["rows"]
        row["tau"][f"{temperature:g}"] = sum_ratio(
            *zip(*((one["tau"] * one["steps"], one["steps"]) for one in taus), strict=True)
        )
        row["draft_calls"] = round(float(stats["draft_calls"]) / float(stats["steps"]), 1)
    return row


def cells(row: dict[str, Any]) -> list[str]:
    """Write a row of the table under ``TITLES``."""
    return [row["drafter"], row["method"], f"{row['draft_calls']:.1f}", *map(ratio_text, row["tau"].values())]


def records(
    suite: str, drafters: str, steps: str = "1,2,4", methods: str = "calibrated:16,chain:4", limit: int = 6,
    new_tokens: int = 64,
) -> list[dict[str, Any]]:  # fmt: skip
    """Measure all drafters, in one record.

    Args:
        suite: NAME=FILE, separated by commas.
        drafters: NAME=SOURCE, separated by commas.
        steps: denoising steps, separated by commas.
        methods: one of these, or both.
        limit: prompts of each suite.
        new_tokens: of each prompt.
    """
    pair, suites = Pair.load(device="cpu"), read_suites(parse_suites(suite), limit)
    prompts, rows = [pair.encode(one.turns[:1]) for suite in suites for one in suite.prompts], list[dict[str, Any]]()
    for part in drafters.split(","):
        name, _, source = part.partition("=")
        counts = [int(count) for count in steps.split(",")]
        for label, drafter in drafters_of(name, locate(source, "drafter"), counts, pair.target).items():
            for method in methods.split(","):
                rows.append({"drafter": label, **measure(pair.target, drafter, method, prompts, new_tokens)})
                print(*cells(rows[-1]), sep=" | ", flush=True)
    names = [one.name for one in suites]
    params = {"limit": limit, "new_tokens": new_tokens, "suites": names, "batch": len(prompts)}
    return [{"bench": "denoising", "params": params, "rows": rows}]


if __name__ == "__main__":
    study(records, TITLES, cells)
