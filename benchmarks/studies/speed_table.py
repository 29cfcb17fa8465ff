"""Print the speed of each method over plain decoding, with intervals, as the Markdown table of README.md.

``python -m benchmarks.studies.speed_table`` reads ``benchmarks/results/speed``; ``stree bench report
benchmarks/results/speed --markdown --plots docs/plots`` draws the same figures.
"""

from __future__ import annotations

from benchmarks import ROOT
from benchmarks.report import interval_text, table
from stree.bench.report import load_runs

__all__ = ["RUN", "speed_table"]

RUN = ROOT / "benchmarks" / "results" / "speed"
SUITES = {"humaneval": "HumanEval", "gsm8k": "GSM8K", "mt_bench": "MT-Bench"}
METHODS = ("transformers", "chain:4", "calibrated:16x4", "suffix", "fused", "auto")


def speed_table() -> str:
    """Write the figures as a Markdown table, a line for each suite and temperature."""
    (run,) = load_runs([RUN])
    found = {(row["suite"], row["temperature"], row["method"]): row for row in run.rows}
    lines = []
    for suite, name in SUITES.items():
        for temperature in run.config["temperatures"]:
            ratios = (interval_text(*found[suite, temperature, method]["over_plain"], digits=2) for method in METHODS)
            plain = f"{found[suite, temperature, 'plain']['tokens_per_s']:.0f}"
            lines.append([name, f"{temperature:g}", plain, *ratios])
    return table(["prompts", "T", "plain, tokens/s", *METHODS], lines)


if __name__ == "__main__":
    print(speed_table())
