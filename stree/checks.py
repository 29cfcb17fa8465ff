"""Checks of numbers and objects that callers pass, shared by growths, drafters and the loop."""

from __future__ import annotations

import operator
from typing import Any

__all__ = ["check_counts", "check_flags", "check_object", "check_shares", "check_sizes", "integers"]


def check_counts(**counts: Any) -> None:
    """Refuse numbers that are no integers of at least 1.

    Raises:
        TypeError: something else than an integer.
        ValueError: a number below 1.
    """
    for name, count in counts.items():
        try:
            number = operator.index(count)
        except TypeError:  # also an array of several numbers
            raise TypeError(f"{name} must be an integer, got {type(count).__name__}") from None
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def check_flags(**flags: Any) -> None:
    """Refuse what is neither True nor False.

    Raises:
        TypeError: something else.
    """
    for name, flag in flags.items():
        if type(flag).__name__ not in ("bool", "bool_"):  # Python's and numpy's
            raise TypeError(f"{name} must be True or False, got {flag!r:.80}")


def check_sizes(**sizes: Any) -> None:
    """``check_counts`` for numbers that may be None."""
    check_counts(**{name: size for name, size in sizes.items() if size is not None})


def integers(name: str, values: Any) -> tuple[int, ...]:
    """Return Python's own integers.

    Raises:
        TypeError: something else than a list of integers.
    """
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise TypeError(f"{name} must be a list of integers, got {values!r:.80}") from None


def check_shares(**shares: float) -> None:
    """Refuse numbers outside [0, 1].

    Raises:
        TypeError: something else than a number.
        ValueError: one is outside.
    """
    for name, share in shares.items():
        if isinstance(share, str) or not hasattr(share, "__float__"):
            raise TypeError(f"{name} must be a number in [0, 1], got {share!r:.80}")
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
