"""Measure recorded rows again, drawn at random, and compare the 95 % intervals of their speed over plain decoding."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.evidence.parts import Part
from benchmarks.evidence.running import Evidence, execute, option
from stree.bench.records import Record, read
from stree.bench.summary import Ratio, summarise
from stree.bench.tables import interval_text, table

__all__ = ["Claim", "agree", "claims", "draw", "repeated"]

BENCH = "stree bench run "
TITLES = ("part", "suite", "T", "method", "recorded", "again", "intervals overlap")


@dataclass(frozen=True, slots=True)
class Claim:
    """A row of a recorded run.

    Attributes:
        part: that made it.
        command: of the run.
        suite: of the row.
        temperature: likewise.
        method: likewise.
        over_plain: its speed over plain decoding, with the 95 % interval.
    """

    part: Part
    command: str
    suite: str
    temperature: float
    method: str
    over_plain: Ratio


def claims(evidence: Evidence, parts: Sequence[Part]) -> Iterator[Claim]:
    """List the rows of recorded runs that have an interval."""
    for part in parts:
        for command in part.commands:
            path = evidence.path(command)
            if command.startswith(BENCH):
                for row in _rows(path):
                    ratio = row.get("over_plain")
                    if row["method"] != "plain" and ratio and ratio[1] is not None:
                        yield Claim(part, command, row["suite"], row["temperature"], row["method"], ratio)


def _rows(run: Path) -> list[Record]:
    """Read the rows of a run; none where it has not begun."""
    return summarise(read(run / "results.jsonl"))


def repeated(claim: Claim, out: str) -> str:
    """Write the command that measures a row alone, with plain decoding, into another folder."""
    command = claim.command
    suite = next(one for one in option(command, "--suite").split(",") if one.startswith(f"{claim.suite}="))
    values = {"suite": suite, "temperature": f"{claim.temperature:g}", "methods": f"plain,{claim.method}", "out": out}
    words = command.split()
    for name, value in values.items():
        words[words.index(f"--{name}") + 1] = value
    return " ".join([*words, "--force"])


def agree(first: Ratio, second: Ratio) -> bool:
    """Whether two intervals overlap; one that is missing is its value."""
    lows, highs = ([one[0] if (end := one[place]) is None else end for one in (first, second)] for place in (1, 2))
    return max(lows) <= min(highs)


def draw(evidence: Evidence, parts: Sequence[Part], count: int, seed: int) -> int:
    """Measure rows again and print a table; 1 where intervals do not overlap.

    Raises:
        ValueError: fewer rows are recorded than are to be drawn, or a command fails.
    """
    known = list(claims(evidence, parts))
    if len(known) < count:
        raise ValueError(f"--draw must be at most the {len(known)} rows recorded, got {count}")
    rows = []
    for number, claim in enumerate(random.Random(seed).sample(known, count)):
        again = repeated(claim, f"{{work}}/draw-{number}")
        before = [one for one in claim.part.commands if not one.startswith(BENCH) and not evidence.path(one).exists()]
        for command in (*before, again):
            if execute(evidence.words(command)):
                raise ValueError(f"cannot measure again: {command}")
        (row,) = (row for row in _rows(evidence.path(again)) if row["method"] == claim.method)
        ratios = claim.over_plain, row["over_plain"]
        cells = [claim.part.name, claim.suite, f"{claim.temperature:g}", claim.method]
        rows.append([*cells, *(interval_text(*ratio, digits=2) for ratio in ratios), agree(*ratios)])
    print(table(TITLES, rows))
    return int(not all(row[-1] for row in rows))
