"""Rows that plots are drawn from, and what a drawn one shows."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

Row = dict[str, Any]


def row(method: str, value: float = 1.0, **own: Any) -> Row:
    """A row of ``summarise`` in which every quantity has one value, with an interval of a fifth around it."""
    ratio = (value, 0.9 * value, 1.1 * value)
    names = ("over_plain", "tau_interval", "step_over_plain", "verify_over_plain", "step_ms")
    known = {"suite": "code", "temperature": 0.0, "method": method, "status": "ok", "drafter": "model", "samples": 8}
    return {**known, "budget": 1, "tokens_per_s": 100 * value, **dict.fromkeys(names, ratio), **own}


def texts(figure: Figure) -> list[Text]:
    """Texts of one line that are drawn."""
    renderer, found = FigureCanvasAgg(figure).get_renderer(), list[Text]()

    def draw_text(*_: Any, mtext: Text | None = None, **__: Any) -> None:
        found.extend([mtext] if mtext else [])

    renderer.draw_text = draw_text
    figure.draw(renderer)
    return found


def drawn(figure: Figure | None) -> Figure:
    """A figure in which no words overlap or are cut at its edge."""
    assert figure is not None
    shown = [(text.get_text(), Text.get_window_extent(text)) for text in texts(figure)]  # without a label's arrow
    for (one, box), (other, its_box) in combinations(shown, 2):
        assert not box.overlaps(its_box), f"{one} and {other}"
    for one, box in shown:
        assert figure.bbox.containsx(box.x0) and figure.bbox.containsx(box.x1), one
        assert figure.bbox.containsy(box.y0) and figure.bbox.containsy(box.y1), one
    return figure
