"""Parts of a figure on white: lines, boxes, and the sheet that they are put on; text is that of ``stree.bench.svg``."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from stree.bench.svg import FONT

__all__ = ["BLUE", "GREEN", "GREY", "INK", "MINT", "PALE", "PAPER", "SKY", "box", "line", "sheet"]

INK, GREY, PALE, PAPER = "#1f2328", "#656d76", "#d0d7de", "#ffffff"
GREEN, MINT, BLUE, SKY = "#1a7f37", "#dafbe1", "#0969da", "#ddf4ff"


def line(points: Iterable[tuple[float, float]], stroke: str, width: float = 1.5, more: str = "") -> str:
    """Draw a straight line through points, or a Bezier curve where there are four of them."""
    first, *rest = (f"{x:g} {y:g}" for x, y in points)
    path = f"M{first}{'C' if len(rest) == 3 else 'L'}{' '.join(rest)}"
    return f'<path d="{path}" stroke="{stroke}" stroke-width="{width:g}"{more}/>'


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str, more: str = ' rx="6"') -> str:
    """Draw a rectangle, with round corners unless ``more`` holds other attributes."""
    size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {size} fill="{fill}" stroke="{stroke}"{more}/>'


def sheet(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Put parts on a white sheet, so that they can also be read on a dark page."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    background = box(0.5, 0.5, width - 1, height - 1, PAPER, PALE)
    lines = [f'{head} role="img" font-family="{FONT}" fill="none">', f"<title>{escape(title)}</title>", background]
    return "\n".join([*lines, *parts, "</svg>\n"])
