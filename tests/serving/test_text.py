"""Text of tokens as they come: whole characters, cut at stop strings.

Run: python -m pytest tests/serving/test_text.py
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from stree.inputs import ASSETS, load_tokenizer
from stree.serving.text import IncrementalText

TEXTS = ["plain words, and more", "naïve café — 日本語 🙂🙂 end", "\n\n  indented\tcode()\n", "ÿþ ünï", "🙂"]


@cache
def tokenizer() -> Any:
    """Load a tokenizer whose tokens may be parts of characters."""
    return load_tokenizer(str(ASSETS / "target"))


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text_and_never_part_of_a_character(text: str) -> None:
    ids = tokenizer()("Start:" + text)["input_ids"]
    prompt = tokenizer()("Start:")["input_ids"]
    assert ids[: len(prompt)] == prompt
    for seed in range(5):
        chooser, place, out, pieces = random.Random(seed), len(prompt), IncrementalText(tokenizer(), prompt), []
        while place < len(ids):
            count = chooser.randint(1, 4)
            pieces.append(out.push(ids[place : place + count]))
            place += count
        pieces.append(out.push([], is_last=True))
        assert "".join(pieces) == out.text == text
        assert not any("�" in piece for piece in pieces)


def test_bytes_that_never_become_a_character_are_written_at_the_end() -> None:
    ids = tokenizer()("🙂")["input_ids"]
    assert len(ids) > 1, "several tokens"
    out = IncrementalText(tokenizer(), [])
    assert out.push(ids[:-1]) == "" and "�" in out.push([], is_last=True)


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["END"], "one two "), (["zzz"], "one two END three"), (["two", "one"], ""), (["E", "END t"], "one two "),
        (["three!"], "one two END three"), (["e two END thre"], "on"),
    ],
)  # fmt: skip
def test_text_is_cut_at_the_first_stop_string(stops: list[str], expected: str) -> None:
    ids = tokenizer()("one two END three")["input_ids"]
    out = IncrementalText(tokenizer(), [], stops)
    pieces = [out.push([token]) for token in ids]
    for count in range(len(pieces)):
        assert expected.startswith("".join(pieces[: count + 1])), "what was given out stays"
    out.push([], is_last=True)
    assert out.text == expected and out.is_stopped == (expected != "one two END three")
    assert out.push(ids) == "" or not out.is_stopped
