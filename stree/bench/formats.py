"""Rows of runs as CSV, as a LaTeX table, and as a table of acceptance by position."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Any

from stree.bench.records import Record
from stree.bench.tables import interval_note, ratio_text, table
from stree.bench.verdict import verdict_text

__all__ = ["acceptance_table", "csv_rows", "latex"]

RATIOS = {"over_plain": "over_plain", "over_chain": "over_chain", "tau": "tau_interval", "step_ms": "step_ms"}
COLUMNS = (
    "suite", "temperature", "method", "status", "unfinished", "prompts", "samples", "tokens_per_s", "user_tokens_per_s",
    "perfect_over_plain", "draft_calls", "verified", "draft_ms", "verify_ms", "accept_ms", "commit_ms", "ttft_ms",
    "distinct_4grams", "drafter", "growth", "budget", "verifier", "lossless", "p_value",
)  # fmt: skip
SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def csv_rows(named: Sequence[tuple[str, Sequence[Record]]]) -> str:
    """Write the rows of named runs as CSV; a ratio has three columns: NAME, NAME_low and NAME_high of its interval."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    ends = [f"{name}{end}" for name in RATIOS for end in ("", "_low", "_high")]
    writer.writerow(["run", *COLUMNS, *ends, "acceptance_by_depth", "output"])
    for run, rows in named:
        for row in rows:
            ratios = [end for name in RATIOS.values() for end in row.get(name) or (None, None, None)]
            depths = " ".join(f"{share:.4f}" for share in row.get("acceptance_by_depth", ()))
            writer.writerow([run, *(row.get(name) for name in COLUMNS), *ratios, depths, verdict_text(row)])
    return file.getvalue().rstrip("\n")


def latex(rows: Sequence[Record], command: str, made_on: str = "") -> str:
    """Write rows as a LaTeX table (package booktabs): speed and tau with 95 % intervals.

    Comments have the command, what it was ``made_on``, why there are no intervals, and whose distribution is untested.
    """
    note = interval_note(rows).strip()
    untested = sorted({row["method"] for row in rows if "untested" in verdict_text(row)})
    notes = [
        command,
        made_on,
        note,
        f"distribution untested (--test-distribution): {', '.join(untested)}" * bool(untested),
    ]
    interval = "" if note else r" [95\,\%]"
    lines = [*(f"% {one}" for one in notes if one), r"\begin{tabular}{lllllll}", r"\toprule"]
    heading = rf"suite & $T$ & method & tokens/s & over plain{interval} & if all right & $\tau${interval} \\"
    lines += [heading, r"\midrule"]
    place: Any = None
    for row in rows:
        if place is not None and place != (row["suite"], row["temperature"]):
            lines.append(r"\addlinespace")
        place = row["suite"], row["temperature"]
        cells = [_escaped(row["suite"]), f"{row['temperature']:g}", _escaped(row["method"])]
        if row["status"] == "ok":
            mark = "*" if row.get("unfinished") else ""
            perfect = None if row["perfect_over_plain"] is None else (row["perfect_over_plain"], None, None)
            ratios = [ratio_text(ratio) for ratio in (row["over_plain"], perfect, row["tau_interval"])]
            cells += [f"{row['tokens_per_s']:.0f}{mark}", *("--" if ratio == "-" else ratio for ratio in ratios)]
        else:
            cells.append(rf"\multicolumn{{4}}{{l}}{{{_escaped(verdict_text(row))}}}")
        lines.append(" & ".join(cells) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    if any(row.get("unfinished") for row in rows):
        lines.append("% * unfinished: not all prompts have run")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Escape what LaTeX would read."""
    return re.sub(r"[\\~^&%$#_{}]", lambda found: SPECIAL.get(found[0], rf"\{found[0]}"), text)


def acceptance_table(rows: Sequence[Record]) -> str:
    """Show what SPEED-Bench reports: acceptance length (tau), speeds, conditional acceptance by position."""
    rows = [row for row in rows if row["status"] == "ok"]
    positions = range(max((len(row["acceptance_by_depth"]) for row in rows), default=0))
    titles = ["suite", "T", "method", "tau [95%]", "output tokens/s", "user tokens/s", *(str(d + 1) for d in positions)]
    lines = []
    for row in rows:
        shares = [f"{share:.2f}" for share in row["acceptance_by_depth"]]
        user = row["user_tokens_per_s"]
        lines.append([
            row["suite"], f"{row['temperature']:g}", row["method"], ratio_text(row["tau_interval"]),
            f"{row['tokens_per_s']:.0f}", "-" if user is None else f"{user:.0f}",
            *shares, *["-"] * (len(positions) - len(shares)),
        ])  # fmt: skip
    return table(titles, lines)
