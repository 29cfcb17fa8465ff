"""Draw one decode step: draft tree, ancestor mask of its verification, committed path.

``python -m benchmarks.studies.figure_step`` writes ``docs/step.svg``.
"""

from __future__ import annotations

from benchmarks import ROOT
from benchmarks.studies.svg import BLUE, GREEN, GREY, INK, MINT, PALE, PAPER, SKY, box, line, sheet
from stree.bench.svg import text

__all__ = ["OUT", "draw"]

OUT = ROOT / "docs" / "step.svg"
# Token and parent of each node, and the height at which it is drawn, in rows.
TOKENS = ("costs", "$", "two", "5", "2", "dollars", "each")
PARENTS = (-1, 0, 0, 1, 1, 2, 3)
ROWS = (1.25, 0.5, 2.0, 0.0, 1.0, 2.0, 0.0)
ACCEPTED = (0, 1, 3)
RECOVERED = "per"  # sampled by the target where it rejects "each"
COLUMN, ROW, WIDTH = 76, 46, 60  # distances between nodes, width of their boxes
LEFT, TOP = (24, 348, 640), 100

Point = tuple[float, float]


def path_to(node: int) -> list[int]:
    """List a node and its ancestors, the root last."""
    return [node] if PARENTS[node] < 0 else [node, *path_to(PARENTS[node])]


def places(left: float) -> list[Point]:
    """Return the left end and the middle of every node's box."""
    return [(left + COLUMN * (len(path_to(node)) - 1), TOP + ROW * row) for node, row in enumerate(ROWS)]


def token(place: Point, words: str, fill: str, stroke: str, ink: str, more: str = ' rx="6"') -> list[str]:
    """Draw a token in its box."""
    x, y = place
    return [
        box(x, y - 14, WIDTH, 28, fill, stroke, more),
        text(x + WIDTH / 2, y + 4.5, words, 13, ink, anchor="middle"),
    ]


def edge(start: Point, end: Point, stroke: str, width: float = 1.5) -> str:
    """Draw a curve from a parent's box to its child's."""
    (x, y), bend = (start[0] + WIDTH, start[1]), (COLUMN - WIDTH) / 2
    return line([(x, y), (x + bend, y), (end[0] - bend, end[1]), end], stroke, width)


def draft() -> list[str]:
    """Draw the whole tree, its root marked."""
    nodes = places(LEFT[0])
    parts = [edge(nodes[PARENTS[node]], nodes[node], GREY) for node in range(1, len(TOKENS))]
    for node, place in enumerate(nodes):
        parts += token(place, TOKENS[node], *((SKY, BLUE, BLUE) if node == 0 else (PAPER, GREY, INK)))
    return parts


def mask(cell: float = 21) -> list[str]:
    """Draw, in a row for each node, the nodes that its output depends on."""
    left, top, parts = LEFT[1] + 84, TOP - 18, []
    for row, words in enumerate(TOKENS):
        parts.append(text(left - 8, top + cell * (row + 0.5) + 4, words, 12, INK, anchor="end"))
        for column in range(len(TOKENS)):
            fill = BLUE if column in path_to(row) else PAPER
            parts.append(box(left + cell * column, top + cell * row, cell, cell, fill, PALE, ""))
    return parts


def commit() -> list[str]:
    """Draw the tree with its accepted path marked, and the token that the target adds."""
    nodes = places(LEFT[2])
    parts = []
    for node in sorted(range(1, len(TOKENS)), key=ACCEPTED.__contains__):  # accepted edges on top
        parts.append(edge(nodes[PARENTS[node]], nodes[node], *((GREEN, 2.5) if node in ACCEPTED else (PALE, 1.5))))
    added = (LEFT[2] + 3 * COLUMN, TOP + ROW)
    parts.append(edge(nodes[ACCEPTED[-1]], added, GREEN, 2.5))
    for node, place in enumerate(nodes):
        parts += token(place, TOKENS[node], *((MINT, GREEN, GREEN) if node in ACCEPTED else (PAPER, PALE, "#afb8c1")))
    return [*parts, *token(added, RECOVERED, PAPER, GREEN, GREEN, ' rx="6" stroke-dasharray="4 3"')]


def draw() -> str:
    """Draw the three parts beside each other, with a heading and two lines below each."""
    words = (
        ("1  Draft a tree", "a small model proposes what may follow",
         "one draft call for each depth,", "however many branches"),
        ("2  Verify it in one pass", "each node depends on its own ancestors",
         "each layer reads its state once", "and keeps no state per node"),
        ("3  Commit a path", "accepted tokens, then one of the target’s own",
         "3 new tokens from one pass;", "the state advances along the path"),
    )  # fmt: skip
    parts = [*draft(), *mask(), *commit()]
    for left, (title, subtitle, *below) in zip(LEFT, words, strict=True):
        parts += [text(left, 36, title, 16, INK, more=' font-weight="600"'), text(left, 57, subtitle, 12.5, GREY)]
        parts += [text(left, 254 + 18 * number, line_, 12.5, GREY) for number, line_ in enumerate(below)]
    parts += [line([(left - 18, 24), (left - 18, 272)], PALE, 1) for left in LEFT[1:]]
    return sheet(
        960, 292, "One decode step: draft a token tree, verify it in one pass, commit the accepted path", parts
    )


if __name__ == "__main__":
    OUT.write_text(draw(), encoding="utf-8")
