"""How many tokens of a prompt run between two steps.

Run: python -m pytest tests/serving/test_prefill_chunk.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.captured import launched

import stree
from stree.decode.memory import Extent, needed_bytes
from stree.drafters import NoDrafter
from stree.serving.prefill import default_chunk


def test_on_cuda_a_prompt_runs_at_once_as_far_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, extent = launched(), Extent(2, 8192, 64, prompt_length=8192, single_rows=1)
    needed_bytes(lm, NoDrafter(), extent)  # states are measured on the device that is there, and not again
    assert default_chunk(lm, NoDrafter(), extent) == 512
    monkeypatch.setattr(stree.TreeLM, "device", torch.device("cuda"))
    whole, part = (needed_bytes(lm, NoDrafter(), replace(extent, chunk=chunk)) for chunk in (8192, 1024))
    assert part < whole
    for free, chunk in ((whole, 8192), (part, 1024), (0, 512)):
        monkeypatch.setattr("stree.decode.memory.free_bytes", lambda _, free=free: free)
        assert default_chunk(lm, NoDrafter(), extent) == chunk


def test_the_engine_runs_so_many_tokens_of_a_prompt_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, lengths = launched(), list[int]()
    prefill = stree.TreeLM.prefill

    def noted(*given: Any, **options: Any) -> Any:
        lengths.append(given[2].shape[1])
        return prefill(*given, **options)

    monkeypatch.setattr(stree.TreeLM, "prefill", noted)
    monkeypatch.setattr("stree.serving.engine.default_chunk", lambda *_: 700)
    for chunk in (None, 20):
        with stree.Engine(lm, NoDrafter(), budget=1, max_batch=1, max_length=1000, prefill_chunk=chunk) as engine:
            engine.submit([5] * 650, max_new_tokens=1).result(100)
    assert [length for length in lengths if length > 1] == [650, 20]  # the rows begin with an empty text of one token
