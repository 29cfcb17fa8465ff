"""The table that the GPU suite prints last: what was measured, and ours against each other provider."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from rich.table import Table

from stree.bench.records import Record

__all__ = ["table"]


def table(records: Sequence[Record]) -> Table:
    """Lay records out."""
    found = Table(
        "operation", "model", "batch", "nodes", "provider", "us", "of bandwidth", "of rate", "MiB", "ours / it"
    )
    for line in _rows(records):
        found.add_row(*line)
    return found


def _rows(records: Sequence[Record]) -> Iterator[list[str]]:
    """Give its lines."""
    ours = {_key(r): r["p50"] for r in records if r.get("provider") == "triton" and "p50" in r}
    for record in records:
        if "p50" not in record or "provider" not in record:
            continue
        params, mine = record["params"], ours.get(_key(record))
        yield [
            record["bench"], params["model"], str(params["batch"]), str(params.get("n", 1)), record["provider"],
            f"{record['p50']:.1f}", *(_share(record, f"{name}_share") for name in ("bandwidth", "rate")),
            f"{record['peak_bytes'] / 2**20:.1f}" if "peak_bytes" in record else "-",
            f"{mine / record['p50']:.2f}" if mine else "-",
        ]  # fmt: skip


def _share(record: Record, name: str) -> str:
    """Write a share, or a dash where none was measured."""
    return f"{record[name]:.2f}" if name in record else "-"


def _key(record: Record) -> str:
    """Name a case."""
    return json.dumps([record["bench"], record["params"], record["dtype"]])
