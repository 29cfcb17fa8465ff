"""What the scripts share to report: Markdown tables, JSON lines of a failure, ratios with intervals."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from stree.bench.records import Record, write
from stree.bench.summary import interval_text

__all__ = ["failure", "finish", "interval_text", "table"]


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Lay rows out as a Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def finish(
    records: Sequence[Record], out: Path | None, titles: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    """Write records to a file, if any, print their table, and all of them in JSON as the last line."""
    if out:
        write(out, records)
    print(table(titles, rows))
    print(json.dumps(records))


def failure(problem: Exception) -> Record:
    """The part of a record that says what failed."""
    return {"problem": f"{type(problem).__name__}: {problem}"[:500]}
