"""Numbers that count something, as callers hand them over."""

from __future__ import annotations

from typing import Any

__all__ = ["check_counts", "check_sizes"]


def check_counts(**counts: Any) -> None:
    """Refuse numbers that are no integers of at least 1.

    Raises:
        TypeError: something else than an integer.
        ValueError: a number below 1.
    """
    for name, count in counts.items():
        if not hasattr(count, "__index__"):
            raise TypeError(f"{name} must be an integer, got {type(count).__name__}")
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def check_sizes(**sizes: Any) -> None:
    """Do the same for numbers that may be left open: None stands for none."""
    check_counts(**{name: size for name, size in sizes.items() if size is not None})
