"""Set what was measured on a GPU beside the project's bars: one line a bar and place, with its verdict.

Run: python -m benchmarks.gpu.bars DIR   (what the other commands wrote to DIR; what is not there is "not measured")

A ratio with an interval is met or missed where the whole interval is, else open.  It measures nothing.
"""

from __future__ import annotations

import argparse
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stree.bench.records import Record, read_lines

FILES = ("gpu_suite.jsonl", "gpu_loops.jsonl", "end_to_end.jsonl", "gpu_sanitizer.jsonl")
LARGE = ("mamba2-2.7b", "Nemotron-H-8B", "Bamba-9B")
LEAST, MOST = operator.ge, operator.le


@dataclass(frozen=True)
class Line:
    """What was measured at one place.

    Attributes:
        where: the place.
        value: the figure.
        low: of its interval; the figure itself where it has none.
        high: likewise.
    """

    where: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Bar:
    """What a figure must be.

    Attributes:
        what: it says.
        side: the figure is on this side of the limit, LEAST or MOST.
        limit: it.
        find: gives the figures from all records.
    """

    what: str
    side: Callable[[float, float], bool]
    limit: float
    find: Callable[[Sequence[Record]], Iterator[Line]]

    def verdict(self, line: Line) -> str:
        """Say whether a figure meets the bar, by its whole interval."""
        sides = {self.side(line.low, self.limit), self.side(line.high, self.limit)}
        return "open" if len(sides) == 2 else "met" if True in sides else "missed"


def main() -> int:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with " + ", ".join(FILES))
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"there is no folder {options.folder}")
    print("\n".join(table([record for name in FILES for record in read_lines(options.folder / name)])))
    return 0


def table(records: Sequence[Record]) -> Iterator[str]:
    """Give the lines of a table of all bars."""
    yield "| bar | limit | where | measured | verdict |"
    yield "| --- | --- | --- | --- | --- |"
    for bar in BARS:
        limit = f"{'>=' if bar.side is LEAST else '<='} {bar.limit:.3g}"
        lines = [*bar.find(records)]
        if not lines:
            yield f"| {bar.what} | {limit} | | | not measured |"
        for line in lines:
            interval = "" if line.low == line.high else f" [{line.low:.3f}, {line.high:.3f}]"
            yield f"| {bar.what} | {limit} | {line.where} | {line.value:.3f}{interval} | {bar.verdict(line)} |"


def _plain(where: Any, value: float) -> Line:
    """Make a line of a figure without an interval."""
    return Line(where, value, value, value)


def _steps(records: Sequence[Record], n: int, provider: str = "graph") -> Iterator[Record]:
    """List timed whole steps of the large shapes."""
    for record in records:
        params = record.get("params", {})
        is_step = record.get("bench") == "step" and record.get("provider") == provider and "p50" in record
        if is_step and params.get("n") == n and params.get("model") in LARGE:
            yield record


def _place(record: Record) -> str:
    """Name a step's place."""
    params = record["params"]
    return f"{params['model']}, batch {params['batch']}, context {params['context']}"


def _over_one_node(n: int) -> Callable[[Sequence[Record]], Iterator[Line]]:
    """Find verifications of ``n`` nodes over a one-token step, batch 1."""

    def find(records: Sequence[Record]) -> Iterator[Line]:
        for record in _steps(records, n):
            if record["params"]["batch"] == 1 and "over_one_node" in record:
                yield _plain(_place(record), record["over_one_node"])

    return find


def _over_mamba_ssm(records: Sequence[Record]) -> Iterator[Line]:
    """Find our one-token step over mamba-ssm's."""
    peers = {_place(record): record["p50"] for record in _steps(records, 1, "mamba_ssm")}
    for record in _steps(records, 1):
        if _place(record) in peers:
            yield _plain(_place(record), record["p50"] / peers[_place(record)])


def _of_bound(records: Sequence[Record]) -> Iterator[Line]:
    """Find the bound of a one-token step's bytes over its time, batch 1."""
    for record in _steps(records, 1):
        if record["params"]["batch"] == 1 and "of_bound" in record:
            yield _plain(_place(record), record["of_bound"])


def _over_snapshots(op: str, n: int) -> Callable[[Sequence[Record]], Iterator[Line]]:
    """Find our kernel over SGLang's sequential one with its scatter."""

    def find(records: Sequence[Record]) -> Iterator[Line]:
        timed = [r for r in records if r.get("bench") == op and "p50" in r and r["params"].get("n") == n]
        ours = {str(r["params"]): r["p50"] for r in timed if r["provider"] == "triton"}
        for record in timed:
            if record["provider"] == "sglang" and (key := str(record["params"])) in ours:
                params = record["params"]
                yield _plain(f"{params['model']}, batch {params['batch']}", ours[key] / record["p50"])

    return find


def _of_loop(share: str) -> Callable[[Sequence[Record]], Iterator[Line]]:
    """Find a share of replayed steps."""

    def find(records: Sequence[Record]) -> Iterator[Line]:
        for record in records:
            if record.get("bench") == "loop" and record.get("replayed"):
                params = record["params"]
                size = f"{params['growth']} {params['budget']}, T {params['temperature']:g}"
                yield _plain(f"{params['model']}, batch {params['batch']}, {size}", record["replayed"][share])

    return find


def _end_to_end(part: str, ratio: str, *, is_auto: bool) -> Callable[[Sequence[Record]], Iterator[Line]]:
    """Find ratios of whole generations: of the default budget, or of the best tree."""

    def find(records: Sequence[Record]) -> Iterator[Line]:
        for record in records:
            if record.get("bench") != "end_to_end" or record["part"] != part or ratio not in record:
                continue
            if (record["method"] == "auto") if is_auto else record.get("is_best"):
                params = record["params"]
                shape = f"{params['target']}, " if "target" in params else ""
                value, low, high = record[ratio]
                place = f"{shape}batch {params['batch']}, T {params['temperature']:g}, {record['method']}"
                yield Line(place, value, value if low is None else low, value if high is None else high)

    return find


def _best_tree_over_plain(records: Sequence[Record]) -> Iterator[Line]:
    """Find the best tree over plain decoding; the best chain is no tree."""
    trees = [record for record in records if "over_chain" in record]
    return _end_to_end("b", "over_plain", is_auto=False)(trees)


def _failures(records: Sequence[Record]) -> Iterator[Line]:
    """Count what failed: tests, what was compared and was wrong, what the sanitizer found."""
    for record in records:
        if record.get("bench") == "tests":
            yield _plain("tests on the device", float(record["exit"] != 0))
        if record.get("bench") == "sanitizer" and "unavailable" not in record:
            yield _plain(record["tool"], float(1 if record["errors"] is None else record["errors"]))
    compared = [record for record in records if "correct" in record]
    if compared:
        yield _plain(f"{len(compared)} comparisons with float64", float(sum(not r["correct"] for r in compared)))


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
    Bar("best tree / best chain, composite", LEAST, 1.25, _end_to_end("b", "over_chain", is_auto=False)),
    Bar("best tree / plain, composite", LEAST, 2.0, _best_tree_over_plain),
    Bar("auto / plain, measured", LEAST, 0.97, _end_to_end("a", "over_plain", is_auto=True)),
    Bar("auto / plain, composite", LEAST, 0.97, _end_to_end("b", "over_plain", is_auto=True)),
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
