"""The plots of ``stree bench report``, one for each claim, from the rows of ``summarise`` and ``pool``.

Every function returns None where its rows are missing, so that a page shows what its runs have measured.  The label
of a figure is the name of its file.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from stree.bench import drawing
from stree.bench.methods import PEERS
from stree.bench.records import Record
from stree.bench.summary import Ratio

__all__ = ["acceptance", "batch", "context", "speed", "step_time_by_nodes", "tau", "tau_by_nodes"]

MOST_LINES = 5  # in one panel
LEAST_JUDGED = 5  # prompts, below which no difference has a colour
HEIGHT, TITLE_AND_AXIS, ROW = 2.7, 0.65, 0.21  # of a panel of lines; of one of dots, and of each of its rows, in inches
SIZED = re.compile(r"([^:@]+):\d+(?:x(\d+))?(@\w+)?")  # a method whose name ends in its number of nodes, or in a depth
SUITE = re.compile(r"(.+)-(\d+)")  # a suite whose name ends in the tokens of its prompts
INTERVALS = "with 95 % intervals over n prompts, or batches of prompts"

Lines = dict[str, list[tuple[float, Ratio]]]  # name -> abscissa, and value with its interval
Place = tuple[str, float]  # name of a line, abscissa


class Quantity(NamedTuple):
    """What one row of panels shows."""

    title: str
    unit: str  # quantities of one unit share their ordinate
    value: Callable[[Record], Ratio | None]  # of a row of ``summarise``, or None where it is not known
    base: float = 0.0  # at which the ordinate begins, unless values are below it
    reference: float | None = None  # ordinate of plain decoding, where it is the same everywhere


TAU = Quantity("tokens a step (tau)", "tokens", lambda row: row["tau_interval"], 1.0, 1.0)
OVER_PLAIN = Quantity("tokens/s over plain", "ratio", lambda row: row["over_plain"], 0.0, 1.0)
STEP = Quantity("whole step in plain steps", "plain steps", lambda row: row["step_over_plain"], 0.0, 1.0)
VERIFY = Quantity("verification in plain steps", "plain steps", lambda row: row["verify_over_plain"], 0.0, 1.0)
STEP_MS = Quantity("ms a step", "ms", lambda row: row["step_ms"])
ACCEPTED = Quantity("acceptance by depth", "share", lambda row: (row["share"], None, None))
TOTAL = Quantity("tokens/s of the batch", "tokens/s", lambda row: (row["tokens_per_s"], None, None))


def speed(rows: Sequence[Record]) -> Figure | None:
    """Draw tokens/s over plain of every method: a panel for each suite and temperature, a row for each method."""
    caption = (
        f"Ratio of tokens per second to plain decoding of the same prompts, {INTERVALS}: blue is faster than plain, "
        f"orange slower, grey an interval that holds 1 or fewer than {LEAST_JUDGED} prompts."
    )
    return _dots("speed", "Tokens per second over plain decoding", caption, rows, "over_plain", "×")


def tau(rows: Sequence[Record]) -> Figure | None:
    """Draw tokens a step of every method: a panel for each suite and temperature, a row for each method."""
    caption = f"Tokens a step (tau), {INTERVALS}; plain decoding has 1."
    return _dots("tau", "Tokens a step", caption, rows, "tau_interval", "")


def _dots(name: str, title: str, caption: str, rows: Sequence[Record], value: str, unit: str) -> Figure | None:
    """Draw one value of every method but plain decoding, with its interval."""
    groups: dict[tuple[str, float], dict[str, Ratio | None]] = defaultdict(dict)
    samples: dict[tuple[str, float], int] = {}
    for row in rows:
        at = row["suite"], row["temperature"]
        if row["status"] == "failed":
            groups[at][row["method"]] = None
        elif row["status"] == "ok" and row["method"] != "plain" and row[value] is not None:
            groups[at][row["method"]] = row[value]
            samples[at] = row["samples"]
    ends = [end for at in samples for ratio in groups[at].values() for end in ratio or () if end is not None]
    limits = min([0.9, *(0.97 * end for end in ends)]), max([1.1, *(1.03 * end for end in ends)])
    panels = [
        partial(
            drawing.dots,
            f"{suite}, T {temperature:g} (n = {n})",
            groups[suite, temperature],
            limits,
            unit=unit,
            is_judged=n >= LEAST_JUDGED and unit == "×",
        )  # fmt: skip
        for (suite, temperature), n in samples.items()
    ]
    height = TITLE_AND_AXIS + ROW * max((len(groups[at]) for at in samples), default=0)
    return _figure(name, title, caption, panels, rows, height)


def tau_by_nodes(rows: Sequence[Record]) -> Figure | None:
    """Draw tokens a step by nodes a step, a line for chains and one for each growth of trees; rows are of ``pool``."""
    panels = _line_panels(rows, _node_places(rows), "nodes a step, root included", [TAU])
    caption = (
        f"Tokens a step by nodes a step, over the prompts of all suites, {INTERVALS}; plain decoding has one node."
    )
    return _figure("tau-by-nodes", "Tokens a step by nodes a step", caption, panels, rows)


def step_time_by_nodes(rows: Sequence[Record]) -> Figure | None:
    """Draw the time of a step, and of its verification, in steps of plain decoding; rows are of ``pool``."""
    panels = _line_panels(rows, _node_places(rows), "nodes a step, root included", [STEP, VERIFY])
    caption = (
        "Time of a step and of its verification alone by nodes a step, as a multiple of a whole step of plain decoding "
        f"of the same prompts, prefill excluded, {INTERVALS}."
    )
    return _figure("step-time-by-nodes", "Time of a step over a plain step by nodes", caption, panels, rows)


def acceptance(rows: Iterable[Record]) -> Figure | None:
    """Draw acceptance by depth (docs/glossary.md), a line for each method that drafts; rows are of ``pool``."""
    shown = [
        {**row, "depth": depth, "share": share}
        for row in rows
        if row["status"] == "ok"
        for depth, share in enumerate(row["acceptance_by_depth"], 1)
    ]
    panels = _line_panels(shown, _place("depth"), "depth of the accepted node", [ACCEPTED])
    caption = (
        "Share of the steps whose path reached the depth before, also at a leaf, that accepted a node at this depth, "
        "over the prompts of all suites."
    )
    return _figure("acceptance-by-depth", "Acceptance by depth", caption, panels, shown)


def batch(pooled: Mapping[int, Iterable[Record]]) -> Figure | None:
    """Draw speed by batch size; each method is compared with plain decoding of the same batch.

    Args:
        pooled: rows of ``pool`` by batch size.
    """
    rows = [{**row, "batch_size": size} for size in sorted(pooled) for row in pooled[size]]
    panels = _line_panels(rows, _place("batch_size"), "sequences in the batch", [OVER_PLAIN, TOTAL])
    caption = (
        "Tokens per second, prefill included, by batch size: over plain decoding of the same batches, "
        f"{INTERVALS}, and of all sequences together; a sequence's seconds a token are the batch size divided by these."
    )
    return _figure("batch", "Tokens per second by batch size", caption, panels, rows)


def context(rows: Iterable[Record]) -> Figure | None:
    """Draw tau, time of a step and speed by tokens of the prompts, from suites named ``NAME-TOKENS``."""
    long: dict[str, list[Record]] = defaultdict(list)
    for row in rows:
        if sized := SUITE.fullmatch(row["suite"]):
            long[sized[1]].append({**row, "tokens": int(sized[2])})
    panels = []
    for name, group in long.items():
        panels += _line_panels(group, _place("tokens"), "tokens of the prompt", (TAU, STEP_MS, OVER_PLAIN), f"{name}: ")
    caption = (
        "Tokens a step, time of a step (prefill excluded) and tokens per second over plain decoding (prefill included) "
        f"by tokens of the prompt, {INTERVALS}."
    )
    every = [row for group in long.values() for row in group]
    return _figure("context", "Tokens a step, time and speed by context", caption, panels, every)


def _place(name: str) -> Callable[[Record], Place]:
    """Draw a line for each method, by a number of its rows."""
    return lambda row: (row["method"], row[name])


def _node_places(rows: Iterable[Record]) -> Callable[[Record], Place | None]:
    """Name the line of each method whose name ends in a size: its growth, with a depth if nodes alone are ambiguous."""
    groups: dict[str, dict[str, tuple[int, str | None]]] = defaultdict(dict)
    for row in rows:
        if (sized := SIZED.fullmatch(row["method"])) and row["status"] == "ok" and row["drafter"] not in PEERS:
            groups[sized[1] + (sized[3] or "")][row["method"]] = row["budget"], sized[2]
    places: dict[str, Place] = {"plain": ("plain", 1)}
    for growth, methods in groups.items():
        is_ambiguous = len({nodes for nodes, _ in methods.values()}) < len(methods)
        for method, (nodes, depth) in methods.items():
            places[method] = f"{growth}:Nx{depth}" if is_ambiguous and depth else growth, nodes
    return lambda row: places.get(row["method"])


def _line_panels(
    rows: Iterable[Record],
    place: Callable[[Record], Place | None],
    x_name: str,
    quantities: Sequence[Quantity],
    prefix: str = "",
) -> list[drawing.Panel]:
    """Make a row of panels for each quantity, and for each group of names if they are too many for one panel.

    ``place`` names the line and abscissa of a row, if it is drawn.  There are no panels where no line has two points.
    """
    placed = [(row, where) for row in rows if row["status"] == "ok" and (where := place(row)) is not None]
    drawn = [(quantity, found) for quantity in quantities if (found := _lines(placed, quantity))]
    panels: list[drawing.Panel] = []
    for quantity, by_temperature in drawn:
        names = list(dict.fromkeys(name for lines in by_temperature.values() for name in lines if name != "plain"))
        of_unit = [lines for other, found in drawn if other.unit == quantity.unit for lines in found.values()]
        points = [point for lines in of_unit for line in lines.values() for point in line]
        abscissae = [x for x, _ in points]
        ends = [quantity.base, *(end for _, ratio in points for end in ratio if end is not None)]
        limits = (min(abscissae), max(abscissae)), (min(ends), max(ends))
        for group in _groups(names):
            colours = dict(zip(group, drawing.COLOURS, strict=False)) | {"plain": drawing.SOFT}
            for temperature, lines in by_temperature.items():
                counts = {row["samples"] for row, _ in placed if row["temperature"] == temperature}
                n = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
                title = f"{prefix}{quantity.title}, T {temperature:g} (n = {n})"
                if shown := {name: lines[name] for name in ("plain", *group) if name in lines}:
                    panels.append(partial(drawing.lines, title, x_name, shown, colours, *limits, quantity.reference))
    return panels


def _lines(placed: Sequence[tuple[Record, Place]], quantity: Quantity) -> dict[float, Lines]:
    """Collect the lines of each temperature: those of at least two points, and plain decoding beside them."""
    lines: dict[float, Lines] = defaultdict(lambda: defaultdict(list))
    for row, (name, x) in sorted(placed, key=lambda pair: pair[1][1]):
        if (value := quantity.value(row)) is not None:
            lines[row["temperature"]][name].append((x, value))
    shown = {
        temperature: {name: points for name, points in at.items() if name == "plain" or len(points) > 1}
        for temperature, at in sorted(lines.items())
    }
    return {temperature: at for temperature, at in shown.items() if at.keys() - {"plain"}}


def _groups(names: Sequence[str]) -> list[list[str]]:
    """Divide names into groups of at most ``MOST_LINES`` with plain decoding; chains are in every group."""
    chain = [name for name in names if name == "chain"]
    others = [name for name in names if name != "chain"]
    parts = np.array_split(others, math.ceil(len(others) / (MOST_LINES - 1 - len(chain))) or 1)
    return [chain + part.tolist() for part in parts]


def _figure(
    name: str, title: str, caption: str, panels: Sequence[drawing.Panel], rows: Iterable[Record], height: float = HEIGHT
) -> Figure | None:
    """Draw panels, if there are any: a column for each temperature, at least two and at most three."""
    if not panels:
        return None
    columns = min(max(len({row["temperature"] for row in rows}), 2), 3, len(panels))
    figure = drawing.draw(title, panels, columns, height)
    drawing.describe(figure, caption)
    figure.set_label(name)
    return figure
