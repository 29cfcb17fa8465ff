"""A plot as a file: its words are text, and it follows the dark scheme."""

from __future__ import annotations

from xml.etree import ElementTree

from helpers.drawn_plots import drawn, row

from stree.bench import plots
from stree.bench.drawing import svg


def test_a_file_shows_words_as_text_and_follows_the_dark_scheme() -> None:
    name = f"unrolled:static:{','.join('2' * 40)}"
    figure = drawn(plots.speed([row(name, 1.2)]))
    text = svg(figure)
    assert svg(drawn(plots.speed([row(name, 1.2)]))) == text, "without a date"
    root = ElementTree.fromstring(text)
    shown = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"unrolled:static:2,2,2,2…", "1.20", "plain", "code, T 0 (n = 8)"} <= set(shown), "a long name is cut"
    hover = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert hover == [f"{name}: 1.2 [1.08, 1.32]"] and "prefers-color-scheme:dark" in text
    assert "svg{background:#fff}" in text and "svg{background:#0d1117;" in text, "legible on a page of one colour"
