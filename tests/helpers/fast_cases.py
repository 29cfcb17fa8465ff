"""Parameters of a test of which some are run by default and the rest only with ``-m slow``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

__all__ = ["slow_unless"]


def slow_unless(is_fast: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """Mark the cases as slow for which ``is_fast(*case)`` is false; a case that is no tuple is one argument."""
    marked = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=[] if is_fast(*values) else pytest.mark.slow))
    return marked
