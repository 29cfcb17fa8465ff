"""Parts of SVG plots: panels of dots and of lines, and the sheet that holds panels.

Colours are CSS variables that follow the light or dark scheme of the reader, on a transparent background, so that one
file works inside an HTML page and as an image.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap

from stree.bench.summary import Ratio

__all__ = ["COLOURS", "FONT", "STYLE", "WIDTH", "Axes", "Panel", "dots_panel", "lines_panel", "sheet", "text"]

FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
WIDTH, GAP = 380, 28  # of a panel, between panels, in the units of a sheet: pixels unless it is scaled
LETTER, MOST_LETTERS = 7.0, 24  # width of an average letter of 13 px; of a name, which is cut there
COLOURS = ("var(--blue)", "var(--orange)", "var(--green)", "var(--purple)", "var(--pink)")
INK, SOFT, LINE = "var(--ink)", "var(--soft)", "var(--line)"
STYLE = (
    f".plot {{ --ink: #1f2328; --soft: #59636e; --line: #d8dee4; --blue: #0969da; --orange: #bc4c00; --green: #1a7f37; "
    f"--purple: #8250df; --pink: #bf3989; font: 13px {FONT}; fill: none; }}\n"
    "@media (prefers-color-scheme: dark) { .plot { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --blue: #58a6ff; "
    "--orange: #f0883e; --green: #3fb950; --purple: #bc8cff; --pink: #f778ba; } }"
)
RATIO_TICKS = (1, 2, 0.5, 4, 0.25, 8, 0.125, 1.5, 0.75, 3, 16, 6, 12)  # of a logarithmic axis, the important ones first
TOP, HEIGHT, BOTTOM, ROW = 34, 190, 46, 21  # above the first row or axis, of a line panel's axis, below it, of a row

Points = Sequence[tuple[float, Ratio]]  # abscissa, and value with its interval


@dataclass(frozen=True, slots=True)
class Panel:
    """A part of a plot, ``WIDTH`` wide: its title, height, and SVG elements."""

    title: str
    height: float
    parts: Sequence[str]

    @property
    def body(self) -> str:
        """The elements as SVG text, the title first."""
        return "\n".join([text(0, 15, self.title, more=' font-weight="600"'), *self.parts])


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes that the panels of lines of one quantity share.

    Attributes:
        x_name: what the logarithmic abscissa counts.
        x_limits: its ends, powers of two.
        y_ticks: of the linear ordinate, evenly spaced, ends included.
        reference: ordinate of a stronger line, if any.
    """

    x_name: str
    x_limits: tuple[float, float]
    y_ticks: Sequence[float]
    reference: float | None

    @classmethod
    def around(cls, x_name: str, points: Points, base: float, reference: float | None) -> Axes:
        """Choose limits that hold all points with their intervals, and the ordinate ``base``."""
        logs = [math.log2(x) for x, _ in points]
        top = max([base, *(value if high is None else high for _, (value, _, high) in points)])
        bottom = min([base, *(value if low is None else low for _, (value, low, _) in points)])
        size = 10 ** math.floor(math.log10(max(top - bottom, 1e-9)))
        step = next(size * k for k in (0.2, 0.25, 0.5, 1.0, 2.0, 2.5) if (top - bottom) / (size * k) <= 5)
        first, last = math.floor(bottom / step + 1e-9), math.ceil(top / step - 1e-9)
        ticks = [round(step * number, 9) for number in range(first, max(last, first + 1) + 1)]
        return cls(x_name, (2.0 ** math.floor(min(logs)), 2.0 ** math.ceil(max(logs))), ticks, reference)


def text(
    x: float, y: float, words: str, size: float = 13, fill: str = INK, *, anchor: str = "start", more: str = ""
) -> str:
    """Write one line of text; ``more`` holds further attributes."""
    place = f'x="{round(x, 1):g}" y="{round(y, 1):g}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"'
    return f"<text {place}{more}>{escape(words)}</text>"


def _path(points: Iterable[tuple[float, float]], stroke: str, width: float = 1, more: str = "") -> str:
    """Draw straight lines from point to point."""
    steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{steps}" stroke="{stroke}" stroke-width="{width:g}"{more}/>'


def _interval(ends: Sequence[tuple[float, float]], stroke: str) -> list[str]:
    """Draw an interval, if it is known."""
    return [_path(ends, stroke, 3, ' stroke-linecap="round" stroke-opacity="0.45"')] if ends else []


def _dot(x: float, y: float, fill: str, words: str) -> str:
    """Draw a dot that shows words under the pointer."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}"><title>{escape(words)}</title></circle>'


def _log_scale(limits: tuple[float, float], ends: tuple[float, float], value: float) -> float:
    """Place a value on a logarithmic axis whose limits are drawn at ``ends``."""
    low, high = map(math.log, limits)
    return ends[0] + (math.log(value) - low) / (high - low) * (ends[1] - ends[0])


def _short(name: str) -> str:
    """Cut a long name."""
    return name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 1]}…"


def _written(ratio: Ratio) -> str:
    """Write a value with its interval, three digits each."""
    value, low, high = (None if number is None else f"{number:.3g}" for number in ratio)
    return f"{value}" if low is None else f"{value} [{low}, {high}]"


def dots_panel(title: str, rows: Mapping[str, Ratio | None], limits: tuple[float, float]) -> Panel:
    """Draw a row for each ratio: name, dot with interval on a logarithmic axis, and the ratio in figures.

    A ratio whose interval is above 1 is blue, below 1 orange, and grey where the interval holds 1 or is unknown; None
    is a method whose output is wrong.
    """
    ends = (max(len(_short(name)) for name in rows) * LETTER + 10, WIDTH - 44)
    bottom, parts, labelled = TOP + ROW * len(rows) - 8, [], list[float]()
    for tick in (tick for tick in RATIO_TICKS if limits[0] <= tick <= limits[1]):
        x = _log_scale(limits, ends, tick)
        if all(abs(x - other) >= 36 for other in labelled):
            labelled.append(x)
            parts.append(_path([(x, TOP - 10), (x, bottom)], SOFT if tick == 1 else LINE))
            words = "plain" if tick == 1 else f"{tick:g}×"
            parts.append(text(x, bottom + 17, words, 12.5, SOFT, anchor="middle"))
    for number, (name, ratio) in enumerate(rows.items()):
        y = TOP + ROW * number + 2
        parts.append(text(0, y + 4.5, _short(name)))
        if ratio is None:
            parts.append(text(ends[0], y + 4.5, "output differs, not shown", fill=COLOURS[1]))
            continue
        value, low, high = ratio
        colour = COLOURS[0] if low is not None and low > 1 else COLOURS[1] if high is not None and high < 1 else SOFT
        parts += _interval([(_log_scale(limits, ends, end), y) for end in (low, high) if end is not None], colour)
        parts.append(_dot(_log_scale(limits, ends, value), y, colour, f"{name}: {_written(ratio)}"))
        parts.append(text(WIDTH, y + 4.5, f"{value:.2f}", anchor="end"))
    return Panel(title, bottom + 26, parts)


def lines_panel(title: str, lines: Mapping[str, Points], axes: Axes, colours: Mapping[str, str]) -> Panel:
    """Draw a line with the intervals of its points for each name, which is written at its right end."""
    ends = (38.0, WIDTH - max(len(_short(name)) for name in lines) * LETTER - 14)
    (first, *_, last), bottom = axes.y_ticks, TOP + HEIGHT

    def abscissa(x: float) -> float:
        return _log_scale(axes.x_limits, (ends[0] + 12, ends[1] - 12), x)

    def ordinate(y: float) -> float:
        return bottom - (y - first) / (last - first) * HEIGHT

    parts = []
    for tick in axes.y_ticks:
        parts.append(_path([(end, ordinate(tick)) for end in ends], LINE))
        parts.append(text(ends[0] - 8, ordinate(tick) + 4.5, f"{tick:g}", 12.5, SOFT, anchor="end"))
    if axes.reference is not None:
        parts.append(_path([(end, ordinate(axes.reference)) for end in ends], SOFT))
    for exponent in _exponents(axes.x_limits):
        parts.append(text(abscissa(2.0**exponent), bottom + 18, f"{2**exponent}", 12.5, SOFT, anchor="middle"))
    parts.append(text(sum(ends) / 2, bottom + 36, axes.x_name, 12.5, SOFT, anchor="middle"))
    line_ends = {}
    for number, (name, points) in enumerate(lines.items()):
        aside = 4 * (number - (len(lines) - 1) / 2)  # so that the intervals at one abscissa are beside each other
        middles = [(abscissa(x) + aside, ordinate(ratio[0])) for x, ratio in points]
        parts.append(_path(middles, colours[name], 2))
        for (x, y), (at, ratio) in zip(middles, points, strict=True):
            parts += _interval([(x, ordinate(end)) for end in ratio[1:] if end is not None], colours[name])
            parts.append(_dot(x, y, colours[name], f"{name}, {at:g}: {_written(ratio)}"))
        line_ends[name] = middles[-1]
    return Panel(title, bottom + BOTTOM, [*parts, *_end_labels(line_ends, ends[1], colours)])


def _exponents(limits: tuple[float, float]) -> range:
    """Choose the powers of two that are labelled: at most seven, or four if they have up to five digits."""
    low, high = (round(math.log2(limit)) for limit in limits)
    return range(low, high + 1, max(1, math.ceil((high - low) / (6 if high < 14 else 3))))


def _end_labels(line_ends: Mapping[str, tuple[float, float]], right: float, colours: Mapping[str, str]) -> list[str]:
    """Write the names of lines right of the axes, without overlap, each joined to its line's end."""
    names = sorted(line_ends, key=lambda name: line_ends[name][1])
    heights = [line_ends[name][1] for name in names]
    for _ in range(100):  # labels that are too near push each other away
        for upper in range(len(names) - 1):
            push = max(16 - (heights[upper + 1] - heights[upper]), 0) / 2
            heights[upper : upper + 2] = heights[upper] - push, heights[upper + 1] + push
        heights[-1] = min(heights[-1], TOP + HEIGHT)
    parts = []
    for name, y in zip(names, heights, strict=True):
        x, end = line_ends[name]
        parts.append(_path([(x, end), (right + 6, y)], colours[name], 1, ' stroke-dasharray="1 3"'))
        parts.append(text(right + 10, y + 4.5, _short(name), fill=colours[name]))
    return parts


def sheet(panels: Sequence[Panel], columns: int, title: str, subtitle: str = "") -> str:
    """Write an SVG file of panels in rows of ``columns``, below a title and a subtitle."""
    width = columns * (WIDTH + GAP) - GAP
    below = wrap(subtitle, int(width / LETTER * 1.05))
    parts = [text(0, 18, title, 16, more=' font-weight="600"')]
    parts += [text(0, 38 + 18 * number, words, fill=SOFT) for number, words in enumerate(below)]
    y = 38.0 + 18 * len(below)
    for first in range(0, len(panels), columns):
        row = panels[first : first + columns]
        for number, panel in enumerate(row):
            parts.append(f'<g transform="translate({number * (WIDTH + GAP)} {y:g})">\n{panel.body}\n</g>')
        y += max(panel.height for panel in row) + GAP / 2
    size = f'viewBox="0 0 {width} {y:g}" width="{width}" height="{y:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" {size} role="img" aria-label="{escape(title)}">'
    return "\n".join([head, f"<style>\n{STYLE}\n</style>", *parts, "</svg>\n"])
