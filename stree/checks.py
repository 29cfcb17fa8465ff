"""Checks of counts that users pass."""

from __future__ import annotations

from typing import Any

__all__ = ["check_counts", "check_sizes"]


def check_counts(**counts: Any) -> None:
    """Check that every named value is an integer of at least 1.

    Raises:
        TypeError: a value is not an integer.
        ValueError: a value is below 1.
    """
    for name, count in counts.items():
        if not hasattr(count, "__index__"):
            raise TypeError(f"{name} must be an integer, got {type(count).__name__}")
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def check_sizes(**sizes: Any) -> None:
    """Check the named values that are not None, as ``check_counts`` does."""
    check_counts(**{name: size for name, size in sizes.items() if size is not None})
