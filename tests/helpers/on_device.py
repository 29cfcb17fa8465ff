"""Tensors of the CPU treated as a GPU's until a test ends; within a block use `stree.kernels.dispatch.as_on_device`."""

from __future__ import annotations

from collections.abc import Container
from contextvars import ContextVar

import pytest

from stree.kernels import dispatch

__all__ = ["treat_as_on_device"]


def treat_as_on_device(
    monkeypatch: pytest.MonkeyPatch,
    *,
    triton: bool = False,
    host_can_read: bool = False,
    operations: Container[str] = (),
) -> None:
    """Let a GPU's code run on the CPU until the test ends, by default without its kernels."""
    behaviour = dispatch.Behaviour(triton, host_can_read, operations)
    monkeypatch.setattr(dispatch, "_behaviour", ContextVar("behaviour", default=behaviour))
