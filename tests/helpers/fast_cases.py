"""Parameters of a test of which some are run by default and the rest only with ``-m slow``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

__all__ = ["slow_unless"]


def slow_unless(
    is_fast: Callable[..., bool], cases: Iterable[Any], *, in_ci: Callable[..., bool] = lambda *case: True
) -> list[Any]:
    """Mark the cases as slow for which ``is_fast(*case)`` is false; a case that is no tuple is one argument.

    Those of them for which ``in_ci(*case)`` is false are also marked as exhaustive.
    """
    marked = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        slow = [pytest.mark.slow] if in_ci(*values) else [pytest.mark.slow, pytest.mark.exhaustive]
        marked.append(pytest.param(*values, marks=[] if is_fast(*values) else slow))
    return marked
