"""Fixtures of the adapter tests."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from helpers.family_states import rebind_float32
from helpers.fast_cases import slow_unless
from helpers.on_device import count_fused_launches


@pytest.fixture(
    params=slow_unless(lambda chosen: chosen is torch.float64, [torch.float32, torch.float64]),
    ids=["float32", "float64"],
)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Return a dtype of models that are compared with fresh forwards."""
    chosen: torch.dtype = request.param
    if chosen == torch.float64:
        rebind_float32(monkeypatch)
    return chosen


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run traces as they are: inductor takes ten times as long, and what it is given is what is tested."""
    monkeypatch.setattr("stree.models.compiled_function.standalone_compile", lambda graph, inputs, **_: graph)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Run fused layers in Triton on the CPU and count their launches by operation."""
    return count_fused_launches(monkeypatch)
