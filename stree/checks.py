"""Checks of numbers and objects that callers pass, shared by growths, drafters and the loop."""

from __future__ import annotations

from typing import Any

__all__ = ["check_counts", "check_object", "check_shares", "check_sizes"]


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


def check_object(name: str, value: Any, method: str, example: str) -> None:
    """Refuse what is no object with a method.

    Args:
        name: of the parameter.
        value: what was passed.
        method: that objects of the right kind have.
        example: of such an object, for the message.

    Raises:
        TypeError: another object, or a class.
    """
    if isinstance(value, type) or not hasattr(value, method):
        raise TypeError(f"{name} must be an object such as {example}, got {value!r:.80}")
