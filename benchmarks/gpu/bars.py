"""Compare what was measured on a GPU with the project's bars: one line a bar and place, with its verdict.

Run: python -m benchmarks.gpu.bars DIR   (the output of the other commands; what is not there is "not measured")

This measures nothing.
"""

from __future__ import annotations

import argparse
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stree.bench.records import Record, read_lines
from stree.bench.tables import table

LARGE = ("mamba2-2.7b", "Nemotron-H-8B", "Bamba-9B")
LEAST, MOST = operator.ge, operator.le

Figure = tuple[str, float]  # where, value
Find = Callable[[Sequence[Record]], Iterator[Figure]]


@dataclass(frozen=True)
class Bar:
    """A bar on some figures.

    Attributes:
        what: the figure.
        side: LEAST or MOST.
        limit: the figure is at least, or at most, this.
        find: yields the figures from all records.
    """

    what: str
    side: Callable[[float, float], bool]
    limit: float
    find: Find


def main() -> int:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with records in JSON lines, *.jsonl")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"there is no folder {options.folder}")
    records = [record for file in sorted(options.folder.glob("*.jsonl")) for record in read_lines(file)]
    cards: dict[str, list[Record]] = {}
    for record in records:
        cards.setdefault(record.get("env", {}).get("device", "unknown device"), []).append(record)
    for card, own in (cards or {"no records": []}).items():
        print(f"{card}\n\n{table(['bar', 'limit', 'where', 'measured', 'verdict'], rows(own))}\n")
    return 0


def rows(records: Sequence[Record]) -> Iterator[Sequence[str]]:
    """Lines of a table of all bars."""
    for bar in BARS:
        limit = f"{'>=' if bar.side is LEAST else '<='} {bar.limit:.3g}"
        figures = [*bar.find(records)]
        if not figures:
            yield bar.what, limit, "", "", "not measured"
        for where, value in figures:
            yield bar.what, limit, where, f"{value:.3f}", "met" if bar.side(value, bar.limit) else "missed"


def _steps(records: Sequence[Record], n: int, provider: str = "graph") -> dict[str, Record]:
    """Timed whole steps of the large shapes, by place."""
    found = {}
    for record in records:
        params = record.get("params", {})
        is_step = record.get("bench") == "step" and record.get("provider") == provider and "p50" in record
        if is_step and params.get("n") == n and params.get("model") in LARGE:
            found[f"{params['model']}, batch {params['batch']}, context {params['context']}"] = record
    return found


def _over_one_node(n: int) -> Find:
    """A step of ``n`` nodes over one of one node, batch 1."""

    def find(records: Sequence[Record]) -> Iterator[Figure]:
        ones = _steps(records, 1)
        for place, record in _steps(records, n).items():
            if record["params"]["batch"] == 1 and place in ones:
                yield place, record["p50"] / ones[place]["p50"]

    return find


def _of_bound(records: Sequence[Record]) -> Iterator[Figure]:
    """The bandwidth bound of one-token steps over the time that they take, batch 1."""
    for place, record in _steps(records, 1).items():
        if record["params"]["batch"] == 1 and "of_bound" in record:
            yield place, record["of_bound"]


def _over_mamba_ssm(records: Sequence[Record]) -> Iterator[Figure]:
    peers = _steps(records, 1, "mamba_ssm")
    for place, record in _steps(records, 1).items():
        if place in peers:
            yield place, record["p50"] / peers[place]["p50"]


def _over_snapshots(op: str, n: int) -> Find:
    """Our kernel over SGLang's sequential one with its scatter."""

    def find(records: Sequence[Record]) -> Iterator[Figure]:
        timed = [r for r in records if r.get("bench") == op and "p50" in r and r["params"].get("n") == n]
        ours = {str(r["params"]): r["p50"] for r in timed if r["provider"] == "triton"}
        for record in timed:
            if record["provider"] == "sglang" and (key := str(record["params"])) in ours:
                params = record["params"]
                yield f"{params['model']}, batch {params['batch']}", ours[key] / record["p50"]

    return find


def _of_loop(share: str) -> Find:
    """A share of replayed steps."""

    def find(records: Sequence[Record]) -> Iterator[Figure]:
        for record in records:
            if record.get("bench") == "loop" and record.get("replayed"):
                params = record["params"]
                size = f"{params['growth']} {params['budget']}, T {params['temperature']:g}"
                yield f"{params['model']}, batch {params['batch']}, {size}", record["replayed"][share]

    return find


def _failures(records: Sequence[Record]) -> Iterator[Figure]:
    """Numbers of failed tests, lost cases, other texts and wrong outputs."""
    by_bench = {"test": "tests on the device", "fault": "cases that crashed or hung", "text": "texts of the CPU"}
    for bench, what in by_bench.items():
        found = [record for record in records if record.get("bench") == bench]
        if found:
            failed = sum(record.get("outcome", "failed") not in ("passed", "skipped") for record in found)
            yield f"{len(found)} {what}", float(failed)
    compared = [record for record in records if "correct" in record]
    if compared:
        yield f"{len(compared)} comparisons with float64", float(sum(not r["correct"] for r in compared))


BARS = (
    Bar("what failed", MOST, 0, _failures),
    Bar("verify of 16 nodes / one-token step", MOST, 1.15, _over_one_node(16)),
    Bar("verify of 64 nodes / one-token step", MOST, 1.35, _over_one_node(64)),
    Bar("our one-token step / mamba-ssm's", MOST, 1.0, _over_mamba_ssm),
    Bar("bandwidth bound / one-token step", LEAST, 0.7, _of_bound),
    Bar("Mamba-2 tree kernel / sequential snapshots, 32 nodes", MOST, 1 / 3, _over_snapshots("ssd_step", 32)),
    *(
        Bar(f"gated delta tree kernel / sequential snapshots, {n} nodes", MOST, 1 / times,
            _over_snapshots("gated_delta_step", n))
        for n, times in ((16, 1.5), (32, 2.7), (64, 4.6))
    ),
    Bar("a step outside the models' forwards", MOST, 0.05, _of_loop("outside_forwards")),
    Bar("device idle between steps", MOST, 0.03, _of_loop("idle")),
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
