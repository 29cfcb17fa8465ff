"""Draw the speed of each method over plain decoding, with intervals, from a recorded run.

``python -m benchmarks.studies.figure_speed`` writes ``docs/speed.svg`` from ``benchmarks/results/cpu-5`` and prints the
same figures as the table of README.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks import ROOT
from benchmarks.report import interval_text, table
from benchmarks.studies.svg import BLUE, GREEN, GREY, INK, PALE, circle, line, sheet, text
from stree.bench.records import Record
from stree.bench.report import LoadedRun, load_runs

__all__ = ["OUT", "draw", "speed_table"]

RUN, OUT = ROOT / "benchmarks" / "results" / "cpu-5", ROOT / "docs" / "speed.svg"
COLOURS = {"chain:4": "#8250df", "calibrated:16x4": BLUE, "suffix": "#bc4c00", "fused": GREEN, "auto": INK}
SUITES = {"humaneval": "HumanEval", "gsm8k": "GSM8K", "mt_bench": "MT-Bench"}
TICKS = (0.75, 1, 1.5, 2, 3, 4)
TOP, ROW, GROUP = 104, 19, 5 * 19 + 18  # first row, distance of rows, distance of suites
PANELS = {0.0: (210, 540), 0.8: (610, 940)}


def abscissa(value: float, limits: tuple[float, float], ends: tuple[float, float]) -> float:
    """Place a ratio on a logarithmic axis."""
    low, high = map(math.log, limits)
    return round(ends[0] + (math.log(value) - low) / (high - low) * (ends[1] - ends[0]), 1)


def ordinate(suite: str, method: str) -> float:
    """Return the height of a method's row."""
    return TOP + GROUP * list(SUITES).index(suite) + ROW * list(COLOURS).index(method)


def panel(rows: Sequence[Record], ends: tuple[float, float], limits: tuple[float, float]) -> list[str]:
    """Draw the rows of one temperature: a dot and an interval each, and the ratio at the right end."""
    bottom, right = TOP + GROUP * len(SUITES) - ROW, ends[1]
    ends = (ends[0], right - 46)
    parts = []
    for tick in (tick for tick in TICKS if limits[0] <= tick <= limits[1]):
        x = abscissa(tick, limits, ends)
        parts.append(line([(x, TOP - 14), (x, bottom)], GREY if tick == 1 else "#eaeef2", 1))
        parts.append(text(x, bottom + 17, "plain" if tick == 1 else f"{tick:g}×", 12, GREY, anchor="middle"))
    for row in rows:
        (value, low, high), y = row["over_plain"], ordinate(row["suite"], row["method"])
        colour = COLOURS[row["method"]]
        interval = [(abscissa(end, limits, ends), y) for end in (low, high)]
        parts.append(line(interval, colour, 3, ' stroke-linecap="round" stroke-opacity="0.4"'))
        parts.append(circle(abscissa(value, limits, ends), y, 4.5, colour))
        parts.append(text(right, y + 4.5, f"{value:.2f}", 12.5, anchor="end"))
    return parts


def subtitle(run: LoadedRun) -> str:
    """Describe the conditions of a run as it recorded them."""
    config, prompts = run.config, {suite["prompts"] for suite in run.config["suites"].values()}
    return (
        f"Bundled pair (6 M and 0.6 M parameters), {config['dtype']}, {config['threads']} cores of a CPU, batch 1, "
        f"{'/'.join(map(str, sorted(prompts)))} prompts a set, {config['max_new_tokens']} new tokens, 95 % intervals"
    )


def draw() -> str:
    """Draw both temperatures beside each other."""
    (run,) = load_runs([RUN])
    rows = [row for row in run.rows if row["method"] in COLOURS]
    limits = min(row["over_plain"][1] for row in rows) * 0.97, max(row["over_plain"][2] for row in rows) * 1.03
    parts = [text(24, 34, "Tokens per second over plain decoding", 16, more=' font-weight="600"')]
    parts.append(text(24, 55, subtitle(run), 12.5, GREY))
    for temperature, ends in PANELS.items():
        parts.append(text(ends[0], 81, f"temperature {temperature:g}", 13, GREY))
        parts += panel([row for row in rows if row["temperature"] == temperature], ends, limits)
    for suite, name in SUITES.items():
        parts.append(text(24, ordinate(suite, "chain:4") + 4.5, name, 13, more=' font-weight="600"'))
        for method, colour in COLOURS.items():
            parts.append(text(196, ordinate(suite, method) + 4.5, method, 12.5, colour, anchor="end"))
    parts += [line([(24, y), (940, y)], PALE, 1) for y in (TOP - 14 + GROUP * number for number in (1, 2))]
    return sheet(960, TOP + GROUP * len(SUITES) + 18, "Speed of each method over plain decoding", parts)


def speed_table() -> str:
    """Write the figures as a Markdown table, a line for each suite and temperature."""
    (run,) = load_runs([RUN])
    found = {(row["suite"], row["temperature"], row["method"]): row for row in run.rows}
    lines = []
    for suite, name in SUITES.items():
        for temperature in PANELS:
            ratios = (interval_text(*found[suite, temperature, method]["over_plain"], digits=2) for method in COLOURS)
            plain = f"{found[suite, temperature, 'plain']['tokens_per_s']:.0f}"
            lines.append([name, f"{temperature:g}", plain, *ratios])
    return table(["prompts", "T", "plain, tokens/s", *COLOURS], lines)


if __name__ == "__main__":
    OUT.write_text(draw(), encoding="utf-8")
    print(speed_table())
