"""Sentences that a text does not depend on batch, budget or other requests say where that holds.

Run: python -m pytest tests/test_claims.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import stree

ROOT = Path(__file__).parents[1]
CLAIM = re.compile(
    r"names a text|token-identical|text( of a request)? depends on (it|nothing)|depends on its own request|"
    r"token for token, the text"
)
PLACES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def unbounded(text: str) -> list[str]:
    """List the paragraphs and points of a list with such a sentence that do not name float32."""
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n|\n- ", text))
    return [part for part in paragraphs if CLAIM.search(part) and "float32" not in part]


@pytest.mark.parametrize("path", PLACES, ids=lambda path: path.name)
def test_documents(path: Path) -> None:
    assert not unbounded(path.read_text())


def test_docstrings() -> None:
    for object_ in (stree.generate, stree.Engine):
        text = object_.__doc__ or ""
        assert CLAIM.search(" ".join(text.split())) and "float32 on a CPU" in " ".join(text.split())


def test_a_sentence_without_its_bounds_is_found() -> None:
    assert unbounded("Under a number a seed names\n a text.\n\nOther text.") == ["Under a number a seed names a text."]
