"""Compare drafters by runs of ``stree bench run``: tokens a step and milliseconds of drafting, pooled over the suites.

    stree bench run --drafter FOLDER --suite ... --methods chain:4,calibrated:16x4 --temperature 0,0.8 --out runs/mtp
    python -m benchmarks.studies.heads runs/mtp runs/eagle3

Steps of all prompts count alike.  The ratio is that of a method's tokens a step to those of the first one, by suite.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from stree.bench.records import Record, read

__all__ = ["table"]


def table(folders: Sequence[Path]) -> str:
    """Write one row a folder, method and temperature in Markdown."""
    rows = ["| drafter | method | T | tau by suite | tau | over the first | draft calls | draft ms | step ms |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for folder in folders:
        records = [one for one in read(folder / "results.jsonl") if one["metric"] == "tokens_per_s"]
        methods = dict.fromkeys(one["provider"] for one in records)
        for temperature in sorted({one["params"]["temperature"] for one in records}):
            first: list[float] = []
            for method in methods:
                own = [
                    one for one in records if one["provider"] == method and one["params"]["temperature"] == temperature
                ]
                if own:
                    first = first or _taus(own)
                    rows.append(_row(folder.name, method, temperature, own, first))
    return "\n".join(rows)


def _taus(records: Sequence[Record]) -> list[float]:
    """Mean tokens a step of each suite."""
    suites = dict.fromkeys(one["params"]["suite"] for one in records)
    groups = [[one for one in records if one["params"]["suite"] == suite] for suite in suites]
    return [_mean(group, "tau") for group in groups]


def _mean(records: Sequence[Record], name: str) -> float:
    """Average a figure over steps."""
    return float(sum(one[name] * one["steps"] for one in records) / sum(one["steps"] for one in records))


def _row(drafter: str, method: str, temperature: float, records: Sequence[Record], first: Sequence[float]) -> str:
    steps = sum(one["steps"] for one in records)
    taus = _taus(records)
    ratio = sum(taus) / sum(first)
    calls, draft = (sum(one[name] for one in records) / steps for name in ("draft_calls", "draft_s"))
    parts = ("draft_s", "verify_s", "accept_s", "commit_s")
    whole = 1e3 * sum(sum(one[part] for part in parts) for one in records) / steps
    by_suite = " / ".join(f"{tau:.2f}" for tau in taus)
    mean = sum(taus) / len(taus)
    return (
        f"| {drafter} | {method} | {temperature:g} | {by_suite} | {mean:.2f} | {ratio:.2f} | {calls:.1f} "
        f"| {1e3 * draft:.1f} | {whole:.1f} |"
    )


def main() -> None:
    """Print the table of some runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    print(table(parser.parse_args().folders))


if __name__ == "__main__":
    main()
