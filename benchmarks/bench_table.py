"""From the pair's records to a table: sums over prompts, paired bootstrap intervals, the bars, rich and Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from bench_records import Record
from numpy.typing import NDArray
from rich.table import Table
from scipy.stats import bootstrap

PARTS = ("draft", "verify", "accept", "commit")
HEADINGS = (
    "method", "tau", "draft calls", "nodes", "ms a step: " + " / ".join(PARTS), "tokens/s", "distinct 4-grams",
    "over plain [95%]", "over best chain [95%]", "acceptance by depth", "lossless",
)  # fmt: skip


def interval(base: Sequence[float], other: Sequence[float]) -> tuple[float, float, float] | None:
    """Estimate how many times faster ``other`` is than ``base``: seconds for the same prompts, in one order.

    Returns:
        The ratio of sums and its 95 % interval by a paired percentile bootstrap over prompts; None below two prompts.
    """
    if len(base) < 2:
        return None

    def ratio(a: NDArray[Any], b: NDArray[Any], axis: int = -1) -> NDArray[Any]:
        return np.asarray(a.sum(axis) / b.sum(axis))

    found = bootstrap(
        (np.asarray(base), np.asarray(other)), ratio, paired=True, vectorized=True, method="percentile", rng=0
    ).confidence_interval
    return float(sum(base) / sum(other)), float(found.low), float(found.high)


def summarise(records: Sequence[Record]) -> list[Record]:
    """Turn records into rows, one a (suite, temperature, method), in the order in which they were first met."""
    groups: dict[tuple[str, float, str], dict[int, Record]] = defaultdict(dict)
    for record in records:
        params = record["params"]
        if record["metric"] == "tokens_per_s":
            groups[params["suite"], params["temperature"], record["provider"]][params["index"]] = record  # the last one
    rows = [_row(*key, [by_index[i] for i in sorted(by_index)]) for key, by_index in groups.items()]
    for key, by_index in groups.items():
        row = next(row for row in rows if (row["suite"], row["temperature"], row["method"]) == key)
        for name, other in (("over_plain", "plain"), ("over_chain", best(rows, *key[:2], "chain"))):
            row[name] = _speedup(groups.get((*key[:2], other), {}) if other else {}, by_index)
    for (suite, method), record in failures(records).items():
        rows.append({"suite": suite, "temperature": 0.0, "method": method, "lossless": False, "failed": record})
    return rows


def failures(records: Iterable[Record]) -> dict[tuple[str, str], Record]:
    """Find the (suite, method) whose last check before timing failed."""
    last = {(r["params"]["suite"], r["provider"]): r for r in records if r["metric"] == "lossless"}
    return {key: record for key, record in last.items() if not record["lossless"]}


def best(rows: Sequence[Record], suite: str, temperature: float, kind: str) -> str | None:
    """Name the fastest method of a kind."""
    of_kind = [
        row
        for row in rows
        if (row["suite"], row["temperature"], row["method"].partition(":")[0]) == (suite, temperature, kind)
        and "tokens_per_s" in row
    ]
    return str(max(of_kind, key=lambda row: row["tokens_per_s"])["method"]) if of_kind else None


def _speedup(base: Mapping[int, Record], other: Mapping[int, Record]) -> tuple[float, float, float] | None:
    """Compare over the prompts that both have run; both emit equally many tokens, so seconds a token compare."""
    both = sorted(base.keys() & other.keys())
    return interval([1 / base[i]["p50"] for i in both], [1 / other[i]["p50"] for i in both])


def _row(suite: str, temperature: float, method: str, records: Sequence[Record]) -> Record:
    """Sum one method's records over prompts."""
    steps = sum(record["steps"] for record in records)
    reached: list[int] = []
    for record in records:
        counts = record["reached"]
        reached += [0] * (len(counts) - len(reached))
        reached = [old + new for old, new in zip(reached, counts + [0] * (len(reached) - len(counts)), strict=True)]
    row: Record = {
        "suite": suite,
        "temperature": temperature,
        "method": method,
        "verifier": records[0]["verifier"],
        "prompts": len(records),
        "tau": sum(record["tau"] * record["steps"] for record in records) / max(steps, 1),
        "draft_calls_per_step": sum(record["draft_calls"] for record in records) / max(steps, 1),
        "nodes_per_step": sum(record["nodes"] for record in records) / max(steps, 1),
        "tokens_per_s": len(records) / sum(1 / record["p50"] for record in records),
        "distinct_4grams": float(np.mean([record["distinct_4grams"] for record in records])),
        "acceptance_by_depth": [after / before for before, after in zip(reached, reached[1:], strict=False)],
        "lossless": _all_lossless(records),
    }
    for part in PARTS:
        row[f"{part}_ms"] = 1e3 * sum(record[f"{part}_s"] for record in records) / max(steps, 1)
    return row


def _all_lossless(records: Sequence[Record]) -> bool | None:
    """Tell whether every checked output was; None where none was checked (rejection sampling: only its law is)."""
    checked = [record["lossless"] for record in records if record["lossless"] is not None]
    return all(checked) if checked else None


def bars(rows: Sequence[Record], code_suite: str = "humaneval") -> Record:
    """Hold the figures against the bars: value and whether it is met, at temperature 0."""
    out: Record = {}
    table = {(row["suite"], row["method"]): row for row in rows if row["temperature"] == 0 and "tau" in row}
    for suite in dict.fromkeys(suite for suite, _ in table):
        plain, own = table.get((suite, "plain")), table.get((suite, "transformers"))
        if plain and own:
            cost = own["tokens_per_s"] / plain["tokens_per_s"]
            out[f"{suite}: cost of budget 1 over transformers (<= 1.05)"] = [cost, cost <= 1.05]
        chain, tree = (best(rows, suite, 0.0, kind) for kind in ("chain", "dyspec"))
        if chain and tree:
            ratio = table[suite, tree]["tokens_per_s"] / table[suite, chain]["tokens_per_s"]
            out[f"{suite}: {tree} over {chain} in tokens/s (>= 1.0)"] = [ratio, ratio >= 1]
            calls = round(table[suite, tree]["draft_calls_per_step"])
            equal = table.get((suite, f"chain:{calls}"))
            if equal:
                more = table[suite, tree]["tau"] / equal["tau"]
                out[f"{suite}: tau of {tree} over chain:{calls}, equal draft calls (> 1)"] = [more, more > 1]
    fast = [row for row in rows if row["suite"] == code_suite and row["temperature"] == 0 and row.get("over_plain")]
    fast = [row for row in fast if row["method"] not in ("plain", "transformers")]
    if fast:
        top = max(fast, key=lambda row: row["over_plain"][0])
        out[f"{code_suite}: {top['method']} over plain (>= 1.3)"] = [top["over_plain"][0], top["over_plain"][0] >= 1.3]
    return out


def cells(row: Record) -> list[str]:
    """Write a row's cells under ``HEADINGS``."""
    if "tau" not in row:
        gap = row["failed"].get("logit_gap")
        return [row["method"], "not timed: output differs", *[""] * 8, "NO" if gap is None else f"NO (gap {gap:.2g})"]
    parts = " / ".join(f"{row[f'{part}_ms']:.1f}" for part in PARTS) if row["method"] != "transformers" else "-"
    by_depth = " ".join(f"{share:.2f}" for share in row["acceptance_by_depth"][:8]) or "-"
    shown = {True: "yes", False: "NO", None: "by law"}[row["lossless"]] + f" ({row['verifier']})"
    if row["method"] == "transformers":
        shown = "the reference"
    return [
        row["method"], f"{row['tau']:.2f}", f"{row['draft_calls_per_step']:.1f}", f"{row['nodes_per_step']:.1f}", parts,
        f"{row['tokens_per_s']:.0f}", f"{row['distinct_4grams']:.2f}", _ratio(row.get("over_plain")),
        _ratio(row.get("over_chain")), by_depth, shown,
    ]  # fmt: skip


def _ratio(value: Sequence[float] | None) -> str:
    """Write a ratio with its interval."""
    return "-" if value is None else f"{value[0]:.2f} [{value[1]:.2f}, {value[2]:.2f}]"


def rich_tables(rows: Sequence[Record]) -> list[Table]:
    """Make a table for every suite and temperature."""
    tables = []
    for suite, temperature in _sections(rows):
        table = Table(title=f"{suite}, temperature {temperature:g}", title_justify="left")
        for heading in HEADINGS:
            table.add_column(heading, justify="left" if heading == "method" else "right")
        for row in _section(rows, suite, temperature):
            table.add_row(*cells(row))
        tables.append(table)
    return tables


def markdown(rows: Sequence[Record]) -> str:
    """Write the README's table: of every kind of method the fastest, or the one that failed."""
    lines = ["| suite | T | " + " | ".join(HEADINGS) + " |", "| --- | --- |" + " --- |" * len(HEADINGS)]
    for suite, temperature in _sections(rows):
        section = _section(rows, suite, temperature)
        kinds = dict.fromkeys(row["method"].partition(":")[0] for row in section)
        chosen = {best(section, suite, temperature, kind) for kind in kinds}
        for row in section:
            if row["method"] in chosen or "tau" not in row:
                lines.append(f"| {suite} | {temperature:g} | " + " | ".join(cells(row)) + " |")
    return "\n".join(lines)


def _sections(rows: Sequence[Record]) -> list[tuple[str, float]]:
    """List suites and temperatures."""
    return list(dict.fromkeys((row["suite"], row["temperature"]) for row in rows))


def _section(rows: Sequence[Record], suite: str, temperature: float) -> list[Record]:
    """Take the rows of one suite and temperature."""
    return [row for row in rows if (row["suite"], row["temperature"]) == (suite, temperature)]
