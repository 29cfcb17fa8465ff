"""Figures and tables as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["interval_note", "interval_text", "ratio_text", "table"]


def interval_text(value: float, low: float | None, high: float | None, *, digits: int = 3) -> str:
    """Write a value with its interval, where it has one."""
    if low is None or high is None or low == high:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def ratio_text(ratio: tuple[float, float | None, float | None] | None) -> str:
    """Write a value with its interval to two digits, or "-" where it is not known."""
    return "-" if ratio is None else interval_text(*ratio, digits=2)


def interval_note(rows: Iterable[Mapping[str, Any]]) -> str:
    """Say under a table of rows of ``summarise`` why some have no intervals; "" where all have them."""
    least = min((row["samples"] for row in rows if row["status"] == "ok"), default=3)
    return (
        "" if least > 2 else f"\n\nIntervals need at least 3 prompts of a suite (or batches of prompts); here: {least}."
    )


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Lay rows out as a Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
