"""Draw one decode step: draft tree, ancestor mask of its verification, committed path.

``python -m benchmarks.studies.figure_step`` writes ``docs/step.svg``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path

from benchmarks import ROOT
from stree.bench.drawing import BLUE, GREEN, INK, LINE, SOFT, STYLE, svg

__all__ = ["OUT", "draw"]

OUT = ROOT / "docs" / "step.svg"
# Token and parent of each node, and the height at which it is drawn, in rows.
TOKENS = ("costs", "$", "two", "5", "2", "dollars", "each")
PARENTS = (-1, 0, 0, 1, 1, 2, 3)
ROWS = (1.25, 0.5, 2.0, 0.0, 1.0, 2.0, 0.0)
ACCEPTED = (0, 1, 3)
RECOVERED = "per"  # sampled by the target where it rejects "each"
COLUMN, ROW, WIDTH, CELL = 76, 46, 60, 21  # distances between nodes, width of their boxes, side of the mask's cells
LEFT, TOP, SIZE = (24, 348, 640), 100, (960, 292)
WORDS = (  # of each part: heading and two lines below it
    ("1  Draft a tree", "a small model proposes what may follow",
     "one draft call for each depth,\nhowever many branches"),
    ("2  Verify it in one pass", "each node depends on its own ancestors",
     "each layer reads its state once\nand keeps no state per node"),
    ("3  Commit a path", "accepted tokens, then one of the target’s own",
     "3 new tokens from one pass;\nthe state advances along the path"),
)  # fmt: skip

Point = tuple[float, float]


def path_to(node: int) -> list[int]:
    """List a node and its ancestors, the root last."""
    return [node] if PARENTS[node] < 0 else [node, *path_to(PARENTS[node])]


def places(left: float) -> list[Point]:
    """Return the left end and the middle of every node's box."""
    return [(left + COLUMN * (len(path_to(node)) - 1), TOP + ROW * row) for node, row in enumerate(ROWS)]


def token(axes: Axes, place: Point, words: str, colour: str, ink: str, *, is_filled: bool = False, **more: Any) -> None:
    """Draw a token in its box."""
    x, y = place
    fill = (colour, 0.12) if is_filled else "none"
    shape = f"round,pad=0,rounding_size={ROW / 8}"
    axes.add_patch(FancyBboxPatch((x, y - 14), WIDTH, 28, boxstyle=shape, fc=fill, ec=colour, lw=1.2, **more))
    axes.text(x + WIDTH / 2, y, words, size=13, color=ink, ha="center", va="center")


def edge(axes: Axes, start: Point, end: Point, colour: str, width: float = 1.5) -> None:
    """Draw a curve from a parent's box to its child's."""
    (x, y), bend = (start[0] + WIDTH, start[1]), (COLUMN - WIDTH) / 2
    curve = Path([(x, y), (x + bend, y), (end[0] - bend, end[1]), end], [Path.MOVETO, *3 * [Path.CURVE4]])
    axes.add_patch(PathPatch(curve, fc="none", ec=colour, lw=width))


def draft(axes: Axes, left: float) -> None:
    """Draw the whole tree, its root marked."""
    nodes = places(left)
    for node, place in enumerate(nodes):
        token(axes, place, TOKENS[node], *((SOFT, INK) if node else (BLUE, BLUE)), is_filled=node == 0)
        if node:
            edge(axes, nodes[PARENTS[node]], place, SOFT)


def mask(axes: Axes, left: float) -> None:
    """Draw, in a row for each node, the nodes that its output depends on."""
    ends, count = CELL * np.arange(len(TOKENS) + 1), range(len(TOKENS))
    depends = [[column in path_to(row) for column in count] for row in count]
    colours = ListedColormap(["none", BLUE])
    axes.pcolormesh(left + 84 + ends, TOP - 18 + ends, depends, cmap=colours, edgecolors=LINE, linewidth=1)
    for row, words in enumerate(TOKENS):
        axes.text(left + 76, TOP - 18 + CELL * (row + 0.5), words, size=12, ha="right", va="center")


def commit(axes: Axes, left: float) -> None:
    """Draw the tree with its accepted path marked, and the token that the target adds."""
    nodes = places(left)
    for node in sorted(range(len(TOKENS)), key=ACCEPTED.__contains__):  # accepted edges on top
        is_in = node in ACCEPTED
        token(axes, nodes[node], TOKENS[node], *((GREEN, GREEN) if is_in else (LINE, SOFT)), is_filled=is_in)
        if node:
            edge(axes, nodes[PARENTS[node]], nodes[node], *((GREEN, 2.5) if is_in else (LINE, 1.5)))
    added = (left + 3 * COLUMN, TOP + ROW)
    edge(axes, nodes[ACCEPTED[-1]], added, GREEN, 2.5)
    token(axes, added, RECOVERED, GREEN, GREEN, linestyle="--")


@rc_context(STYLE)
def draw() -> Figure:
    """Draw the three parts beside each other, with a heading and two lines below each."""
    figure = Figure((SIZE[0] / 72, SIZE[1] / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    axes.set(xlim=(0, SIZE[0]), ylim=(SIZE[1], 0))
    for part, left, (title, subtitle, below) in zip((draft, mask, commit), LEFT, WORDS, strict=True):
        part(axes, left)
        axes.text(left, 36, title, size=16, weight="bold")
        axes.text(left, 57, subtitle, size=12, color=SOFT)
        axes.text(left, 242, below, size=12, color=SOFT, va="top", linespacing=1.4)
    axes.vlines([left - 18 for left in LEFT[1:]], 24, 272, colors=LINE, lw=1)
    return figure


if __name__ == "__main__":
    OUT.write_text(svg(draw()), encoding="utf-8")
