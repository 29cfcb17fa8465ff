"""Tokens a step of a masked-diffusion drafter (SpecDiff) by denoising steps, beside other drafters.

Run: python -m benchmarks.studies.denoising --suite NAME=FILE,... --drafters model=bundled,diffusion=FOLDER

All prompts of a drafter are one batch; tau and its 95 % interval are over prompts.  Draft calls are those of
a step: layers of a tree for a draft model, one for a one-shot head, denoising steps for a masked-diffusion drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import stree
from benchmarks.report import command_line, finish
from stree.bench.prompts import parse_suites, read_suite
from stree.bench.summary import sum_ratio
from stree.bench.tables import ratio_text
from stree.drafters import Drafter, HeadDrafter
from stree.heads import MaskedDiffusion, OneShotHead
from stree.inputs import load_tokenizer, locate

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


def main() -> None:
    """Measure and print; append the record to a file."""
    parser = command_line(__doc__, "file of JSON lines to which the record is appended")
    parser.add_argument("--suite", required=True, help="NAME=FILE, separated by commas")
    parser.add_argument("--drafters", required=True, help="NAME=SOURCE, separated by commas")
    parser.add_argument("--steps", default="1,2,4", help="denoising steps, separated by commas")
    parser.add_argument("--methods", default="calibrated:16,chain:4", help="one of these, or both")
    parser.add_argument("--limit", type=int, default=6, help="prompts of each suite")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each prompt")
    options = parser.parse_args()
    lm = stree.TreeLM.from_pretrained(locate("bundled", "target"), "cpu")
    tokenizer, steps = load_tokenizer(locate("bundled", "target")), [int(count) for count in options.steps.split(",")]
    suites = parse_suites(options.suite)
    texts = [prompt.turns[0] for name, path in suites.items() for prompt in read_suite(name, path, options.limit)]
    prompts, rows = [tokenizer(text)["input_ids"] for text in texts], list[dict[str, Any]]()
    for part in options.drafters.split(","):
        name, _, source = part.partition("=")
        for label, drafter in drafters_of(name, locate(source, "drafter"), steps, lm).items():
            for method in options.methods.split(","):
                rows.append({"drafter": label, **measure(lm, drafter, method, prompts, options.new_tokens)})
                print(*cells(rows[-1]), sep=" | ", flush=True)
    params = {"limit": options.limit, "new_tokens": options.new_tokens, "suites": [*suites], "batch": len(prompts)}
    finish([{"bench": "denoising", "params": params, "rows": rows}], options.out, TITLES, map(cells, rows))


if __name__ == "__main__":
    main()
