"""The plots of ``stree bench report``, one for each claim, from the rows of ``summarise`` and ``pool``.

Every function returns None where its rows are missing, so that a page shows what its runs have measured.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from stree.bench.methods import PEERS
from stree.bench.records import Record
from stree.bench.summary import Ratio
from stree.bench.svg import COLOURS, Axes, Panel, dots_panel, lines_panel

__all__ = ["Figure", "batch", "context", "speed", "step_time_by_nodes", "tau_by_nodes"]

MOST_LINES = 5  # in one panel
GREY = "var(--soft)"  # of plain decoding
SIZED = re.compile(r"([^:@]+):\d+(?:x(\d+))?(@\w+)?")  # a method whose name ends in its number of nodes, or in a depth
SUITE = re.compile(r"(.+)-(\d+)")  # a suite whose name ends in the tokens of its prompts
INTERVALS = "with 95 % intervals by bootstrap over n prompts, or batches of prompts"

Lines = dict[str, list[tuple[float, Ratio]]]  # name -> abscissa, and value with its interval
Place = tuple[str, float]  # name of a line, abscissa


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot.

    Attributes:
        name: of its file, without the ending.
        title: what is shown, a few words.
        caption: how to read it, one sentence.
        panels: row by row; a column for each temperature, if there are several.
        columns: panels in a row, at most three.
    """

    name: str
    title: str
    caption: str
    panels: Sequence[Panel]
    columns: int


@dataclass(frozen=True, slots=True)
class Quantity:
    """What one row of panels shows.

    Attributes:
        title: of the panels.
        unit: quantities of one unit share their ordinate.
        value: of a row of ``summarise``, or None where that is not known.
        base: ordinate at which the axis begins, unless values are below it.
        reference: ordinate of plain decoding, where it is the same everywhere.
    """

    title: str
    unit: str
    value: Callable[[Record], Ratio | None]
    base: float = 0.0
    reference: float | None = None


TAU = Quantity("tokens a step (tau)", "tokens", lambda row: row["tau_interval"], 1.0, 1.0)
OVER_PLAIN = Quantity("tokens/s over plain", "ratio", lambda row: row["over_plain"], 0.0, 1.0)
STEP = Quantity("whole step in plain steps", "plain steps", lambda row: row["step_over_plain"], 0.0, 1.0)
VERIFY = Quantity("verification in plain steps", "plain steps", lambda row: row["verify_over_plain"], 0.0, 1.0)
STEP_MS = Quantity("ms a step", "ms", lambda row: row["step_ms"])
TOTAL = Quantity("tokens/s of the batch", "tokens/s", lambda row: (row["tokens_per_s"], None, None))


def speed(rows: Iterable[Record]) -> Figure | None:
    """Draw tokens/s over plain of every method: a panel for each suite and temperature, a row for each method."""
    groups: dict[tuple[str, float], dict[str, Ratio | None]] = defaultdict(dict)
    samples: dict[tuple[str, float], int] = {}
    known = list(rows)
    for row in known:
        at = row["suite"], row["temperature"]
        if row["status"] == "failed":
            groups[at][row["method"]] = None
        elif row["status"] == "ok" and row["method"] != "plain" and row["over_plain"] is not None:
            groups[at][row["method"]] = row["over_plain"]
            samples[at] = row["samples"]
    ends = [end for at in samples for ratio in groups[at].values() for end in ratio or () if end is not None]
    limits = min([0.9, *(0.97 * end for end in ends)]), max([1.1, *(1.03 * end for end in ends)])
    panels = [
        dots_panel(f"{suite}, T {temperature:g} (n = {n})", groups[suite, temperature], limits)
        for (suite, temperature), n in samples.items()
    ]
    caption = (
        f"Ratio of tokens per second to plain decoding of the same prompts, {INTERVALS}: blue is faster than plain, "
        "orange slower, grey an interval that holds 1."
    )
    return _figure("speed", "Tokens per second over plain decoding", caption, panels, known)


def tau_by_nodes(pooled: Iterable[Record]) -> Figure | None:
    """Draw tokens a step by nodes a step, a line for chains and one for each growth of trees."""
    rows = list(pooled)
    panels = _line_panels(rows, _node_places(rows), "nodes a step, root included", [TAU])
    caption = (
        f"Tokens a step by nodes a step, over the prompts of all suites, {INTERVALS}; plain decoding has one node."
    )
    return _figure("tau-by-nodes", "Tokens a step by nodes a step", caption, panels, rows)


def step_time_by_nodes(pooled: Iterable[Record]) -> Figure | None:
    """Draw the time of a step, and of its verification, by nodes a step, in steps of plain decoding."""
    rows = list(pooled)
    panels = _line_panels(rows, _node_places(rows), "nodes a step, root included", [STEP, VERIFY])
    caption = (
        "Time of a step and of its verification alone by nodes a step, as a multiple of a whole step of plain decoding "
        f"of the same prompts, prefill excluded, {INTERVALS}."
    )
    return _figure("step-time-by-nodes", "Time of a step over a plain step by nodes", caption, panels, rows)


def batch(pooled: Mapping[int, Iterable[Record]]) -> Figure | None:
    """Draw speed by batch size; each method is compared with plain decoding of the same batch.

    Args:
        pooled: rows of ``pool`` by batch size.
    """
    rows = [{**row, "batch_size": size} for size in sorted(pooled) for row in pooled[size]]

    def place(row: Record) -> Place:
        return row["method"], row["batch_size"]

    panels = _line_panels(rows, place, "sequences in the batch", [OVER_PLAIN, TOTAL])
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

    def place(row: Record) -> Place:
        return row["method"], row["tokens"]

    quantities, panels = (TAU, STEP_MS, OVER_PLAIN), list[Panel]()
    for name, group in long.items():
        panels += _line_panels(group, place, "tokens of the prompt", quantities, f"{name}: ")
    caption = (
        "Tokens a step, time of a step (prefill excluded) and tokens per second over plain decoding (prefill included) "
        f"by tokens of the prompt, {INTERVALS}."
    )
    every = [row for group in long.values() for row in group]
    return _figure("context", "Tokens a step, time and speed by context", caption, panels, every)


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
) -> list[Panel]:
    """Draw a row of panels for each quantity, and for each group of names if they are too many for one panel.

    Args:
        rows: of ``summarise``.
        place: line and abscissa of a row, or None where it is not drawn.
        x_name: what abscissae count.
        quantities: what is drawn.
        prefix: of the titles.

    Returns:
        none where no line has two points.
    """
    placed = [(row, where) for row in rows if row["status"] == "ok" and (where := place(row)) is not None]
    drawn = [(quantity, lines) for quantity in quantities if (lines := _lines(placed, quantity))]
    panels = []
    for quantity, lines in drawn:
        names = list(dict.fromkeys(name for at in lines.values() for name in at if name != "plain"))
        of_unit = [at for other, theirs in drawn if other.unit == quantity.unit for at in theirs.values()]
        points = [point for at in of_unit for line in at.values() for point in line]
        axes = Axes.around(x_name, points, quantity.base, quantity.reference)
        for group in _groups(names):
            colours = dict(zip(group, COLOURS, strict=False)) | {"plain": GREY}
            for temperature, at in lines.items():
                counts = {row["samples"] for row, _ in placed if row["temperature"] == temperature}
                n = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
                title = f"{prefix}{quantity.title}, T {temperature:g} (n = {n})"
                if shown := {name: at[name] for name in ("plain", *group) if name in at}:
                    panels.append(lines_panel(title, shown, axes, colours))
    return panels


def _lines(placed: Sequence[tuple[Record, Place]], quantity: Quantity) -> dict[float, Lines]:
    """Collect the lines of each temperature: those of at least two points, and plain decoding beside them."""
    lines: dict[float, Lines] = defaultdict(lambda: defaultdict(list))
    for row, (name, x) in sorted(placed, key=lambda pair: pair[1][1]):
        if (value := quantity.value(row)) is not None:
            lines[row["temperature"]][name].append((x, value))
    for temperature, at in sorted(lines.items()):
        names = {name for name, points in at.items() if len(points) > 1 and name != "plain"}
        lines[temperature] = {name: points for name, points in at.items() if name in names | {"plain"} and names}
    return {temperature: lines[temperature] for temperature in sorted(lines) if lines[temperature]}


def _groups(names: Sequence[str]) -> list[list[str]]:
    """Divide names into groups of at most ``MOST_LINES`` with plain decoding; chains are in every group."""
    chain = [name for name in names if name == "chain"]
    others = [name for name in names if name not in ("plain", "chain")]
    count = math.ceil(len(others) / (MOST_LINES - 1 - len(chain))) or 1
    size = math.ceil(len(others) / count) or 1
    return [chain + others[size * number : size * (number + 1)] for number in range(count)]


def _figure(name: str, title: str, caption: str, panels: Sequence[Panel], rows: Iterable[Record]) -> Figure | None:
    """Make a figure of panels, if there are any."""
    columns = max(len({row["temperature"] for row in rows}), 2)
    return Figure(name, title, caption, panels, min(columns, 3, len(panels))) if panels else None
