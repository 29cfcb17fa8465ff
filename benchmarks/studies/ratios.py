"""Print the ratios of pairs of methods of a run, over the prompts of all its suites, with paired bootstrap intervals.

python -m benchmarks.studies.ratios benchmarks/results/smollm2 suffix/transformers-lookup:10 plain/transformers
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.report import table
from stree.bench.records import read
from stree.bench.summary import compare, interval_text


def main() -> None:
    """Print a row a pair and temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("pairs", nargs="+", help="METHOD/METHOD")
    options = parser.parse_args()
    records, lines = read(options.run / "results.jsonl"), []
    if not records:
        parser.error(f"{options.run} holds no results")
    try:
        for pair in options.pairs:
            method, _, base = pair.partition("/")
            for row in compare(records, method, base):
                ratios = (interval_text(*row[name], digits=2) for name in ("speed", "tokens_per_step"))
                lines.append([method, base, f"{row['temperature']:g}", *ratios])
    except ValueError as error:
        parser.error(str(error))
    print(table(["method", "over", "T", "speed", "tokens a step"], lines))


if __name__ == "__main__":
    main()
