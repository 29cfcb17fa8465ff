"""Compare drafters by runs of ``stree bench run``: tokens a step and milliseconds of drafting, pooled over the suites.

    stree bench run --drafter FOLDER --suite ... --methods chain:4,calibrated:16x4 --temperature 0,0.8 --out runs/mtp
    python -m benchmarks.studies.heads runs/mtp runs/eagle3

Steps of all prompts count alike.  The ratio is that of a method's tokens a step to those of the first one, by suite.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from stree.bench.report import load_runs
from stree.bench.summary import PARTS
from stree.bench.tables import table

__all__ = ["heads_table"]

TITLES = ("drafter", "method", "T", "tau by suite", "tau", "over the first", "draft calls", "draft ms", "step ms")


def heads_table(folders: Sequence[Path]) -> str:
    """Write one row a folder, method and temperature in Markdown."""
    rows = []
    for run in load_runs(folders):
        first: dict[float, float] = {}
        for row in sorted(run.pooled, key=lambda row: row["temperature"]):
            method, temperature = row["method"], row["temperature"]
            taus = [r["tau"] for r in run.rows if (r["method"], r["temperature"]) == (method, temperature)]
            tau = sum(taus) / len(taus)
            over = tau / first.setdefault(temperature, tau)
            whole = sum(row[f"{part}_ms"] for part in PARTS)
            names = [run.name, method, f"{temperature:g}", " / ".join(f"{one:.2f}" for one in taus)]
            figures = [f"{one:.1f}" for one in (row["draft_calls"], row["draft_ms"], whole)]
            rows.append([*names, f"{tau:.2f}", f"{over:.2f}", *figures])
    return table(TITLES, rows)


def main() -> None:
    """Print the table of some runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    print(heads_table(parser.parse_args().folders))


if __name__ == "__main__":
    main()
