"""Comparison of what a caller's objects return with what their interfaces document: shapes, dtypes and devices.

No value of a tensor is read, so a check costs a microsecond and works while a step is captured or traced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stree.kernels.checks import describe

__all__ = ["check_kind", "check_returned", "is_ours", "wrong_return"]

KINDS: dict[str, tuple[torch.dtype, ...]] = {
    "bool": (torch.bool,),
    "float": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    "integers": (torch.int32, torch.int64, torch.int8, torch.int16, torch.uint8),
    "int32": (torch.int32,),
    "int64": (torch.int64,),
}


def is_ours(policy: object) -> bool:
    """Whether the class of a policy is of this package, whose tests cover what it returns."""
    return type(policy).__module__.startswith("stree.")


def check_returned(
    owner: object, method: str, value: Any, kind: str, device: torch.device | None = None, *, part: str = "",
    **axes: int,
) -> None:  # fmt: skip
    """Refuse what is no tensor of the documented dtype and shape.

    Args:
        owner: the object whose method was called.
        method: its name.
        value: what it returned, or a part of it.
        kind: a key of ``KINDS``.
        device: that it must be on; None for any.
        part: name of the part, with a space behind it.
        axes: sizes by name.

    Raises:
        TypeError: no tensor, or one of another dtype.
        ValueError: another shape or device.
    """
    has_kind = isinstance(value, Tensor) and value.dtype in KINDS[kind]
    if not has_kind or value.shape != (*axes.values(),):
        error = wrong_return(owner, method, f"{part}{kind}[{', '.join(axes)}] = {[*axes.values()]}", value)
        raise ValueError(str(error)) if has_kind else error
    if device is not None and value.device != device:
        raise ValueError(f"{type(owner).__name__}.{method} must return {part}on {device}, got {value.device}")


def check_kind(owner: object, method: str, value: Any, kind: type | tuple[type, ...], wanted: str) -> None:
    """Refuse an object of another class than the documented one.

    Raises:
        TypeError: of another class; the message says what was ``wanted``.
    """
    if not isinstance(value, kind):
        raise wrong_return(owner, method, wanted, value)


def wrong_return(owner: object, method: str, wanted: str, value: Any) -> TypeError:
    """Make the error that names the method, what it must return and what it returned; values are not read."""
    if isinstance(value, Tensor):
        found = describe(value)
    elif isinstance(value, (tuple, list)):
        kinds = (describe(part) if isinstance(part, Tensor) else type(part).__name__ for part in value)
        found = f"{type(value).__name__} of {', '.join(kinds)}"
    else:
        found = type(value).__name__
    return TypeError(f"{type(owner).__name__}.{method} must return {wanted}, got {found}")
