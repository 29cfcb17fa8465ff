"""Graphs and their memory pools: none is captured into once its graphs are gone, and what is released is free at once.

Run: python -m pytest tests/decode/test_graph_pools.py
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.captured import TapeError, TapeRecorder, captured, generate, launched, near_drafter

import stree
from stree.budget.policy import AutoBudget
from stree.drafters import SuffixDrafter
from stree.sampling import Sampling


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Let objects go by their reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_recorder_refuses_a_pool_whose_graphs_are_gone_as_torch_does() -> None:
    value = torch.ones(2)
    recorder = TapeRecorder(renews_pools=False)
    recorder.capture(lambda: value + 1)
    with pytest.raises(TapeError, match="all graphs of this pool are gone"):
        recorder.capture(lambda: value + 1)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"budget": "auto", "sampling": Sampling(0.8)}, {"budget": 8}], ids=str)
def test_every_step_is_captured_whatever_graphs_went_before(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, no_collection: None
) -> None:
    lm = captured(monkeypatch)
    for _ in range(3):
        out = generate(lm, near_drafter(), max_new_tokens=30, **options)
        assert not out.stats["graphs"]["not_captured"]
    lm.cache["step_cache"].release()
    out = generate(lm, near_drafter(), max_new_tokens=30, **options)
    assert out.stats["graphs"]["replays"] and not out.stats["graphs"]["not_captured"]


@pytest.mark.parametrize("drafter", [near_drafter(), SuffixDrafter()], ids=["model", "suffix"])
def test_released_steps_free_their_states_at_once(
    drafter: Any, monkeypatch: pytest.MonkeyPatch, no_collection: None
) -> None:
    lm, states = captured(monkeypatch), list[Any]()
    new_state = lm.new_state

    def noted(*sizes: int) -> Any:
        states.append(new_state(*sizes))
        return states[-1]

    monkeypatch.setattr(lm, "new_state", noted)
    generate(lm, drafter, budget=8)
    references = [weakref.ref(state) for state in states]
    states.clear()
    assert any(reference() is not None for reference in references), "the kept step has a state"
    lm.cache["step_cache"].release()
    assert not any(reference() is not None for reference in references)


@pytest.mark.slow
def test_auto_learns_from_replays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[float | None] = []
    observe = AutoBudget.observe

    def noted(self: AutoBudget, num_emitted: Any, seconds: float | None) -> None:
        timed.append(seconds)
        observe(self, num_emitted, seconds)

    monkeypatch.setattr(AutoBudget, "observe", noted)
    out = generate(captured(monkeypatch), near_drafter(), budget="auto", max_new_tokens=40)
    replays = out.stats["graphs"]["replays"]
    assert timed[:3] == [None] * 3  # two runs of the first size, and its capture, which is replayed at once
    assert 0 < sum(seconds is not None for seconds in timed) == replays - out.stats["graphs"]["graphs"]
    assert stree.generate(launched(), [[5, 6]], near_drafter(), budget="auto").stats["steps"]
