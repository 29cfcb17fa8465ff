"""Compare recipes of head training on the bundled target: train what is missing, run the bench, print a table.

    python -m benchmarks.training.recipes --minutes 8 --limit 6 --out runs/recipes \
        --suite humaneval=HumanEval.jsonl,gsm8k=test.jsonl,mt_bench=question.jsonl

The same command goes on where it was interrupted; ``--report`` only prints the table of what is there.  tau is tokens a
step over all prompts of all suites, with a percentile bootstrap over prompts; its ratio to the first head's is paired.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import interval_text, table
from stree.bench.records import Record, read
from stree.bench.summary import interval, sum_ratio
from stree.cli import main as stree
from stree.distill.settings import RECIPES

__all__ = ["recipe_table"]

METHODS = "chain:4,calibrated:16x4"
TITLES = ("head", "recipe", "method", "T", "prompts", "tau", "over the first")
Prompts = dict[tuple[str, int], tuple[float, float]]  # (suite, number) -> tokens and steps


def recipe_table(folders: Sequence[Path]) -> str:
    """Write one row a method, temperature and run of the bench, named KIND-RECIPE, in Markdown."""
    runs = {folder.name: _prompts(read(folder / "results.jsonl")) for folder in folders}
    rows, first = [], next(iter(runs.values()))
    for method, temperature in first:
        for name, run in runs.items():
            own, base = run.get((method, temperature), {}), first[method, temperature]
            both = sorted(own.keys() & base.keys())
            if not both:
                continue
            samples = [[prompts[key][part] for key in both] for prompts in (own, base) for part in (0, 1)]
            tau = sum_ratio(*samples[:2])
            ratio = interval(lambda a, b, c, d, axis: a.sum(axis) * d.sum(axis) / b.sum(axis) / c.sum(axis), *samples)
            parts = [method, f"{temperature:g}", len(both), interval_text(*tau, digits=2)]
            rows.append([*name.split("-"), *parts, "1" if own is base else interval_text(*ratio)])
    return table(TITLES, rows)


def _prompts(records: Sequence[Record]) -> dict[tuple[str, float], Prompts]:
    """Sum tokens and steps over the turns of each prompt, by method and temperature."""
    found: dict[tuple[str, float], Prompts] = defaultdict(dict)
    for record in records:
        if record["metric"] == "tokens_per_s":
            params, steps = record["params"], record["sequence_steps"]
            prompts, key = found[record["provider"], params["temperature"]], (params["suite"], params["batch"])
            tokens, before = prompts.get(key, (0.0, 0.0))
            prompts[key] = (tokens + record["tau"] * steps, before + steps)
    return dict(found)


def train(kind: str, recipe: str, args: argparse.Namespace, folder: Path) -> None:
    """Train a head in a process of its own, or go on with it; one that is finished is left alone."""
    if (folder / "config.json").exists():
        return
    command = [sys.executable, "-m", "benchmarks.training.heads", "--kind", kind, "--recipe", recipe, "--resume"]
    for name in ("minutes", "threads", "runs"):
        command += [f"--{name}", str(getattr(args, name))]
    subprocess.run([*command, "--out", str(folder)], check=True)


def measure(args: argparse.Namespace, folder: Path, run: Path) -> None:
    """Run the bench with a head, or go on with it."""
    options = {"drafter": folder, "suite": args.suite, "out": run, "methods": METHODS, "temperature": "0,0.8"}
    options |= {"limit": args.limit, "threads": args.threads, "max-new-tokens": args.max_new_tokens}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    if status := stree(["bench", "run", *words]):
        raise SystemExit(status)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--suite", help="as of stree bench run")
    parser.add_argument("--kinds", nargs="+", default=["mtp"], choices=RECIPES)
    parser.add_argument("--minutes", type=float, default=8.0, help="of training, each")
    parser.add_argument("--limit", type=int, default=6, help="prompts of a suite")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs/bundled"), help="encoded text")
    parser.add_argument("--report", action="store_true", help="only print the table")
    args = parser.parse_args(arguments)
    if not (args.report or args.suite):
        parser.error("--suite is needed but for --report")
    names = [(kind, recipe) for kind in args.kinds for recipe in RECIPES[kind]]
    for kind, recipe in names if not args.report else ():
        head = args.out / "heads" / f"{kind}-{recipe}"
        train(kind, recipe, args, head)
        measure(args, head, args.out / "bench" / head.name)
    print(recipe_table([args.out / "bench" / f"{kind}-{recipe}" for kind, recipe in names]))


if __name__ == "__main__":
    main()
