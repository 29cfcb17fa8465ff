"""Checks of numbers and objects that callers pass, shared by growths, drafters and the loop."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any, NoReturn

__all__ = [
    "NotCopied",
    "check_counts",
    "check_flags",
    "check_numbers",
    "check_object",
    "check_one_of",
    "check_shares",
    "check_sizes",
    "integer",
    "integers",
    "real_numbers",
]


class NotCopied:
    """Base of what cannot be copied or pickled, since something else, such as a thread, holds the object itself."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be copied or pickled")


def check_counts(*, below: int = 1 << 63, **counts: Any) -> None:
    """Refuse numbers that are no integers of at least 1 and less than ``below``.

    Raises:
        TypeError: something else than an integer.
        ValueError: a number outside that range.
    """
    for name, count in counts.items():
        try:
            number = operator.index(count)
        except TypeError:  # also an array of several numbers
            raise TypeError(f"{name} must be an integer, got {type(count).__name__}") from None
        if not 1 <= number < below:
            raise ValueError(f"{name} must be {'at least 1' if number < 1 else f'below {below}'}, got {count}")


def check_flags(**flags: Any) -> None:
    """Refuse what is neither True nor False.

    Raises:
        TypeError: something else.
    """
    for name, flag in flags.items():
        if type(flag).__name__ not in ("bool", "bool_"):  # Python's and numpy's
            raise TypeError(f"{name} must be True or False, got {flag!r:.80}")


def check_sizes(*, below: int = 1 << 63, **sizes: Any) -> None:
    """``check_counts`` for numbers that may be None."""
    check_counts(below=below, **{name: size for name, size in sizes.items() if size is not None})


def check_numbers(**numbers: Any) -> None:
    """Refuse what is no real number of Python or numpy.

    Raises:
        TypeError: something else, such as a string or a tensor.
    """
    for name, number in numbers.items():
        if not isinstance(number, Real):
            raise TypeError(f"{name} must be a number, got {number!r:.80}")


def check_one_of(name: str, value: Any, names: Sequence[str]) -> None:
    """Refuse what is none of some names.

    Raises:
        TypeError: no string.
        ValueError: another string.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {', '.join(names)}, got {value!r:.80}")
    if value not in names:
        raise ValueError(f"{name} must be one of {', '.join(names)}, got {value!r}")


def real_numbers(name: str, values: Any) -> tuple[float, ...]:
    """Return a list of numbers as a tuple.

    Raises:
        TypeError: something else.
    """
    if isinstance(values, Sequence) and all(isinstance(value, Real) for value in values):
        return tuple(values)
    raise TypeError(f"{name} must be a list of numbers, got {values!r:.80}")


def integer(name: str, value: Any) -> int:
    """Return Python's own integer.

    Raises:
        TypeError: something else.
    """
    try:
        return operator.index(value)
    except TypeError:  # also an array of several numbers
        raise TypeError(f"{name} must be an integer, got {value!r:.80}") from None


def integers(name: str, values: Any) -> tuple[int, ...]:
    """Return Python's own integers.

    Raises:
        TypeError: something else than a list of integers.
    """
    try:
        return tuple(map(operator.index, values))
    except (TypeError, RuntimeError):  # torch raises the latter for rows of a matrix
        raise TypeError(f"{name} must be a list of integers, got {values!r:.80}") from None


def check_shares(**shares: float) -> None:
    """Refuse numbers outside [0, 1].

    Raises:
        TypeError: something else than a number.
        ValueError: one is outside.
    """
    for name, share in shares.items():
        if not isinstance(share, Real):
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
