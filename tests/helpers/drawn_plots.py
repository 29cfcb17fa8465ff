"""Rows that plots are drawn from, and what a drawn one shows."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

Row = dict[str, Any]
BUDGETS = {"plain": 1, "chain:1": 2, "chain:3": 4}


def row(method: str, value: float = 1.0, **own: Any) -> Row:
    """A row of ``summarise`` in which every quantity has one value, with an interval of a fifth around it."""
    ratio = (value, 0.9 * value, 1.1 * value)
    names = ("over_plain", "tau_interval", "step_over_plain", "verify_over_plain", "step_ms")
    known = {"suite": "code", "temperature": 0.0, "method": method, "status": "ok", "drafter": "model", "samples": 8}
    return {**known, "budget": 1, "tokens_per_s": 100 * value, **dict.fromkeys(names, ratio), **own}


def record(
    suite: str, batch: int, method: str, seconds: float, steps: int, temperature: float = 0.0, **own: Any
) -> Row:
    """A timed record of 20 tokens."""
    params = {"suite": suite, "batch": batch, "turn": 0, "temperature": temperature, "prompts": [batch]}
    params |= {"drafter": "none" if method == "plain" else "model", "budget": BUDGETS.get(method, 16)}
    times = {"prefill_s": 1.0, "draft_s": 0.0, "verify_s": 0.5 * steps, "accept_s": 0.0, "commit_s": 0.0}
    known = {"metric": "tokens_per_s", "provider": method, "params": params, "verifier": "greedy", "lossless": True}
    known |= {"draft_calls": 0, "verified": 1.0 * steps, "ttft_s": 1.0, "distinct_4grams": 1.0, "tokens": [[[0] * 20]]}
    return {**known, "p50": 20 / seconds, "steps": steps, "sequence_steps": steps, "tau": 20 / steps, **times, **own}


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
