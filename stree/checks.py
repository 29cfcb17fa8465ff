"""Checks of numbers that callers pass, shared by growths, drafters and the loop."""

from __future__ import annotations

from typing import Any

__all__ = ["check_counts", "check_shares", "check_sizes"]


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
    """``check_counts`` for numbers that may be None."""
    check_counts(**{name: size for name, size in sizes.items() if size is not None})


def check_shares(**shares: float) -> None:
    """Refuse numbers outside [0, 1].

    Raises:
        ValueError: one is outside.
    """
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {share}")
