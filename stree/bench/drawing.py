"""Drawing with matplotlib: panels of dots and of lines, the figure that holds panels, and its SVG text."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, MaxNLocator

from stree.bench.summary import Ratio

__all__ = ["COLOURS", "MARKERS", "ON_DARK", "SOFT", "describe", "dots", "draw", "lines", "svg"]

ON_DARK = {  # a colour -> what takes its place on a dark page
    "#1f2328": "#e6edf3", "#59636e": "#9198a1", "#d8dee4": "#3d444d",
    "#0969da": "#58a6ff", "#bc4c00": "#f0883e", "#332288": "#ccff99", "#661100": "#ff7b72", "#0b5394": "#88ccee",
}  # fmt: skip
INK, SOFT, LINE, *COLOURS = ON_DARK
BLUE, ORANGE, *_ = COLOURS
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "stree",
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 9,
    "text.color": INK, "text.parse_math": False,
    "axes.titlelocation": "left", "axes.titlesize": "medium", "axes.titleweight": "bold", "axes.labelcolor": SOFT,
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")}, "grid.color": LINE,
    **{f"{axis}tick.{name}": value for axis in "xy" for name, value in {"major.size": 0, "color": SOFT}.items()},
}  # fmt: skip
PAPER = "#fff", "#0d1117"  # light and dark
MARKERS = "osD^v"  # of the lines of a panel, in the order of their colours
WIDTH, MOST_LETTERS = 4.0, 24  # of a panel, in inches; of a name, which is cut there

Points = Sequence[tuple[float, Ratio]]  # abscissa, and value with its interval
Limits = tuple[float, float]
Panel = Callable[[Axes], None]  # draws into its axes


def _short(name: str) -> str:
    """Cut a long name."""
    return name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 1]}…"


def _dot(
    axes: Axes, name: str, colour: str, x: float, y: float, ratio: Ratio, ends: Sequence[Limits], marker: str = "o"
) -> None:
    """Draw a dot and its interval, if it is known; ``svg`` shows name and figures under the pointer."""
    value, *interval = (f"{number:.3g}" for number in ratio if number is not None)
    words = f"{name}: {value} [{', '.join(interval)}]" if interval else f"{name}: {value}"
    if interval:
        axes.plot(*zip(*ends, strict=True), c=colour, lw=3, alpha=0.45, solid_capstyle="round")
    axes.plot(x, y, marker, c=colour, ms=6, gid=f"dot {words}")


def dots(
    title: str, rows: Mapping[str, Ratio | None], limits: Limits, axes: Axes, *, unit: str = "×", is_judged: bool = True
) -> None:
    """Draw a row for each ratio: name, dot with interval on a logarithmic axis, and the ratio in figures.

    A ratio whose interval is above 1 is blue, below 1 orange, and grey where the interval holds 1 or is unknown; all
    are grey if not ``is_judged``.  None is a method whose output is wrong.
    """
    axes.set_title(title)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(2, (1.0, 1.5) if limits[1] < 5 * limits[0] else (1.0,), numticks=8))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda ratio, _: "plain" if ratio == 1 else f"{ratio:g}{unit}")
    axes.set(xlim=limits, ylim=(len(rows) - 0.4, -0.6))
    axes.set_yticks(range(len(rows)), [_short(name) for name in rows], color=INK)
    axes.grid(axis="x")
    axes.axvline(1, c=SOFT, lw=1)
    place = axes.get_yaxis_transform()
    for y, (name, ratio) in enumerate(rows.items()):
        if ratio is None:
            axes.text(0, y, "output differs, not shown", color=ORANGE, va="center", transform=place)
            continue
        value, low, high = ratio
        colour = BLUE if low is not None and low > 1 else ORANGE if high is not None and high < 1 else SOFT
        colour = colour if is_judged else SOFT
        _dot(axes, name, colour, value, y, ratio, [(end, y) for end in (low, high) if end is not None])
        axes.text(1.03, y, f"{value:.2f}", va="center", transform=place)


def lines(title: str, x_name: str, named: Mapping[str, Points], colours: Mapping[str, str], x_limits: Limits,
          y_limits: Limits, reference: float | None, axes: Axes) -> None:  # fmt: skip
    """Draw a line with the intervals of its points for each name, which is written at its right end.

    ``reference`` is the ordinate of a stronger horizontal line, if any.
    """
    (left, right), (bottom, top) = x_limits, y_limits
    span, height = right / left, top - bottom or 1.0
    axes.set_title(title)
    axes.set_xlabel(x_name)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(2, numticks=7 if right < 2**14 else 4))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=(1, 2, 2.5, 5, 10)))
    axes.set(xlim=(left / span**0.06, right * span**0.06), ylim=(bottom - 0.04 * height, top + 0.04 * height))
    axes.grid(axis="y")
    if reference is not None:
        axes.axhline(reference, c=SOFT, lw=1)
    last = {}
    for number, (name, points) in enumerate(named.items()):
        aside = span ** (0.014 * (number - (len(named) - 1) / 2))  # intervals at one abscissa are beside each other
        axes.plot([x * aside for x, _ in points], [ratio[0] for _, ratio in points], c=colours[name], lw=1.5)
        marker = dict(zip(COLOURS, MARKERS, strict=True)).get(colours[name], "o")
        for x, ratio in points:
            ends = [(x * aside, end) for end in ratio[1:] if end is not None]
            _dot(axes, f"{name}, {x:g}", colours[name], x * aside, ratio[0], ratio, ends, marker)
        last[name] = points[-1][0] * aside, points[-1][1][0]
    names = sorted(last, key=lambda name: last[name][1])
    least = 0.09 * height * np.arange(len(names))  # distances at which labels do not overlap
    ordinates = np.array([last[name][1] for name in names]) - least
    ordinates = least + (np.maximum.accumulate(ordinates) + np.minimum.accumulate(ordinates[::-1])[::-1]) / 2
    for name, y in zip(names, ordinates, strict=True):
        axes.annotate(
            _short(name), last[name], (1.06, y), textcoords=axes.get_yaxis_transform(), va="center",
            color=colours[name], annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colours[name], "linestyle": ":", "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip


@rc_context(STYLE)
def draw(title: str, panels: Sequence[Panel], columns: int, height: float) -> Figure:
    """Draw panels of one height, in inches, in rows of ``columns`` below a title."""
    rows = math.ceil(len(panels) / columns)
    figure = Figure((WIDTH * columns, height * rows + 0.4), layout=ConstrainedLayoutEngine(wspace=0.08, hspace=0.06))
    figure.suptitle(title, x=0.01, ha="left", size="x-large", weight="bold")
    for number, panel in enumerate(panels, 1):
        panel(figure.add_subplot(rows, columns, number))
    return figure


@rc_context(STYLE)
def describe(figure: Figure, words: str) -> None:
    """Add sentences below the panels of a figure."""
    written = fill(words, int(14 * figure.get_figwidth()))
    figure.set_figheight(figure.get_figheight() + 0.15 * (written.count("\n") + 1))
    figure.supxlabel(f"{figure.get_supxlabel()}\n{written}".strip(), x=0.01, ha="left", color=SOFT, size="medium")


@rc_context(STYLE)
def svg(figure: Figure) -> str:
    """Write a figure as SVG text, which has no date; its colours follow the reader's light or dark scheme.

    It has its own background, so that it is legible on a page that is white in both.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    written = file.getvalue()
    text = written[written.index("<svg") :].replace("font-family: 'DejaVu Sans', sans-serif; ", "")
    for light in ON_DARK:
        text = text.replace(light, f"var(--{light[1:]},{light})")
    dark = "".join(f"--{light[1:]}:{dark};" for light, dark in ON_DARK.items())
    style = (
        f"text{{font-family:system-ui,sans-serif}}svg{{background:{PAPER[0]}}}"
        f"@media(prefers-color-scheme:dark){{svg{{background:{PAPER[1]};{dark}}}}}"
    )
    text = text.replace("<defs>", f"<style>{style}</style>\n<defs>", 1)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(figure.get_suptitle())}" ', 1)
    text = re.sub(r'<g id="dot ([^"]*)">', r"<g><title>\1</title>", text)
    text = re.sub(r"\s*\n\s*(?!\s|<)", " ", text)  # a path in one line
    text = re.sub(r'(?<=\n) +| transform="rotate\(-0 [^"]*"', "", text)
    return re.sub(r"(\.\d\d)\d\d+", r"\1", text)  # two decimals of a point are enough
