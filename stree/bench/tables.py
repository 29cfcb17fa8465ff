"""Rows as text: a terminal table, CSV, and the Markdown of the README."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Mapping, Sequence

from rich.table import Table

from stree.bench.measures import PARTS
from stree.bench.records import Record
from stree.bench.summary import Section, best

__all__ = ["HEADINGS", "REST", "SHORT", "cells", "csv_text", "markdown", "rich_tables", "title", "verdict_text"]

HEADINGS = {  # column -> heading
    "method": "method",
    "output": "output",
    "tau": "tau",
    "accepted": "accepted drafts a step",
    "draft_calls": "draft calls",
    "nodes": "nodes drafted / verified",
    "parts": "ms a step: " + " / ".join(PARTS),
    "tokens_per_s": "tokens/s",
    "over_plain": "over plain [95%]",
    "over_chain": "over best chain [95%]",
    "distinct": "distinct 4-grams",
    "equal_nodes": "tau over chain, equal nodes",
    "equal_calls": "tau over chain, equal draft calls",
    "by_rank": "accepted by sibling rank",
    "ttft_ms": "first token, ms",
    "peak_mib": "peak MiB",
    "state_kib": "state KiB",
}
SHORT = (
    "method", "tokens_per_s", "over_plain", "over_chain", "tau", "draft_calls", "nodes", "parts", "distinct", "output"
)  # fmt: skip
HEADING_WIDTH = 16  # characters, in the terminal
AGAINST = ("method", "equal_nodes", "equal_calls", "over_chain")
REST = ("method", "accepted", "by_rank", "equal_nodes", "equal_calls", "ttft_ms", "peak_mib", "state_kib")


def verdict_text(row: Record) -> str:
    """Say how an output was checked and with what result."""
    if row["status"] == "unavailable":
        return f"cannot run: {row['reason']}"
    if row["status"] == "failed":
        if "logit_gap" in row:
            return f"FAILS: differs, logit gap {row['logit_gap']:.2g} of {row['logit_scale']:.2g}"
        return f"FAILS: p = {row['p_value']:.1g}" if "p_value" in row else "FAILS: differs"
    if row["method"].startswith("lossy"):
        return f"LOSSY by design ({row['verifier']})"
    if row["drafter"] == "transformers":
        return "the reference" if row["temperature"] == 0 else "own random numbers"
    if row["lossless"] is None and row["drafter"] == "none":
        return "the reference"
    if row["lossless"] is None:
        return f"{'greedy identical' if row['greedy_twin'] else 'not checked'}, law untested ({row['verifier']})"
    if row["p_value"] is not None:
        return f"target's law, p = {row['p_value']:.2g} ({row['verifier']})"
    if row["near_ties"]:
        return f"near-ties, gap <= {row['largest_gap']:.0e} of scale ({row['verifier']})"
    return f"identical ({row['verifier']})"


def cells(row: Record) -> Mapping[str, str]:
    """Write a row's cells by column; a row without figures has the first two."""
    if row["status"] != "ok":
        return {"method": row["method"], "output": verdict_text(row)}
    has_parts = row["drafter"] not in ("transformers", "mamba-ssm")
    return {
        "method": row["method"],
        "output": verdict_text(row),
        "tau": f"{row['tau']:.2f}",
        "accepted": f"{row['accepted']:.2f}",
        "draft_calls": f"{row['draft_calls']:.1f}",
        "nodes": f"{row['drafted']:.1f} / {row['verified']:.1f}",
        "parts": " / ".join(f"{row[f'{part}_ms']:.1f}" for part in PARTS) if has_parts else "-",
        "tokens_per_s": f"{row['tokens_per_s']:.0f}",
        "over_plain": _ratio(row["over_plain"]),
        "over_chain": _ratio(row["over_chain"]),
        "distinct": f"{row['distinct_4grams']:.2f}",
        "equal_nodes": _against(row, "equal_nodes"),
        "equal_calls": _against(row, "equal_calls"),
        "by_rank": " ".join(f"{share:.2f}" for share in row["acceptance_by_rank"][:4]) or "-",
        "ttft_ms": _number(row["ttft_ms"], "{:.1f}"),
        "peak_mib": _number(row["peak_mib"], "{:.0f}"),
        "state_kib": _number(row["state_bytes"] and row["state_bytes"] / 1024, "{:.0f}"),
    }


def _ratio(value: Sequence[float | None] | None) -> str:
    """Write a ratio with its interval."""
    if value is None:
        return "-"
    middle, low, high = value
    return f"{middle:.2f}" if low is None else f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def _against(row: Record, name: str) -> str:
    """Write a ratio and with what."""
    return "-" if row[name] is None else f"{_ratio(row[name])} {row[f'{name}_with']}"


def _number(value: float | None, form: str) -> str:
    """Write a number that may be unknown."""
    return "-" if value is None else form.format(value)


def title(section: Section) -> str:
    """Name a section."""
    return f"{section.run}: {section.suite}, temperature {section.temperature:g}"


def rich_tables(section: Section) -> list[Table | str]:
    """Make the tables of a section, and a line for every method without figures."""
    speed = Table(title=title(section), title_justify="left")
    against = Table(title="the same number of nodes, of draft calls, of seconds", title_justify="left")
    for table, names in ((speed, SHORT), (against, AGAINST)):
        for name in names:
            heading = textwrap.fill(HEADINGS[name], HEADING_WIDTH)
            table.add_column(heading, justify="left" if name in ("method", "output") else "right", no_wrap=True)
    lines = []
    for row in section.rows:
        written = cells(row)
        if row["status"] != "ok":
            lines.append(f"{row['method']}: {written['output']}")
            continue
        speed.add_row(*(written[name] for name in SHORT))
        if row["equal_nodes"] or row["equal_calls"]:
            against.add_row(*(written[name] for name in AGAINST))
    return [speed, *lines, *([against] if against.row_count else [])]


def csv_text(sections: Sequence[Section]) -> str:
    """Write every figure of every row."""
    lines = [{"run": section.run, **_flat(row)} for section in sections for row in section.rows]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(name for line in lines for name in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _flat(row: Record) -> Record:
    """Give ratios and their intervals columns of their own, and write lists with spaces."""
    flat: Record = {}
    for name, value in row.items():
        if name in ("over_plain", "over_chain", "equal_nodes", "equal_calls"):
            flat |= dict(zip((name, f"{name}_low", f"{name}_high"), value or (None,) * 3, strict=True))
        else:
            flat[name] = " ".join(f"{v:.4f}" for v in value) if isinstance(value, list) else value
    return flat


def markdown(sections: Sequence[Section], *, every: bool = False) -> str:
    """Write one table of all sections: the fastest of every kind and what failed, or every method."""
    names = [HEADINGS[name] for name in SHORT]
    lines = ["| suite | T | " + " | ".join(names) + " |", "| --- | --- |" + " --- |" * len(names)]
    for section in sections:
        kinds = dict.fromkeys(row["method"].split(":")[0].split("@")[0] for row in section.rows)
        chosen = [best(section.rows, kind) for kind in kinds]
        for row in section.rows:
            if every or row in chosen or row["status"] == "failed":
                written = cells(row)
                values = [written.get(name, "") for name in SHORT]
                lines.append(f"| {section.suite} | {section.temperature:g} | " + " | ".join(values) + " |")
    return "\n".join(lines)
