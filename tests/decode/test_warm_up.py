"""``stree.warm_up`` captures steps before the first text; a tape takes the place of CUDA graphs."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
from helpers.captured import TEXTS, captured, generate, launched, near_drafter

import stree
from stree.drafters import Drafter, NoDrafter, SuffixDrafter
from stree.kernels.clock import compiling
from stree.sampling import Sampling


def drafter_named(name: str) -> Drafter:
    every: dict[str, Drafter] = {"model": near_drafter(), "suffix": SuffixDrafter(), "none": NoDrafter()}
    return every[name]


@pytest.mark.parametrize("drafts", [pytest.param("model", marks=pytest.mark.slow), "suffix"])
@pytest.mark.slow
def test_warming_up_captures_before_the_first_text(drafts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"sampling": Sampling(0.8), "stop_token_ids": [1]}
    chosen = drafter_named(drafts)
    expected = generate(launched(), chosen, budget=4, **options).sequences
    lm = captured(monkeypatch)
    warm: dict[str, Any] = {"max_length": 120, "shows_progress": False, **options}
    reports = stree.warm_up(lm, chosen, budgets=(1, 4), batch_sizes=(1, 2), **warm)
    assert len(reports) == 4 and all(report["graphs"] for report in reports)
    found = generate(lm, chosen, budget=4, max_length=120, **options)
    assert found.sequences == expected
    assert drafts != "model" or found.stats["graphs"]["replays"] == found.stats["steps"]


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["model", "suffix", "none"])
def test_warming_up_captures_what_auto_chooses_from(drafts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"sampling": Sampling(0.8), "verifier": "match", "stop_token_ids": [1]}
    expected = generate(launched(), NoDrafter(), budget=1, **options).sequences
    lm, chosen = captured(monkeypatch), drafter_named(drafts)
    warm: dict[str, Any] = {"max_length": 120, "shows_progress": False, "prompt": TEXTS[0], **options}
    (report,) = stree.warm_up(lm, chosen, budgets=("auto",), batch_sizes=(2,), **warm)
    assert not report["not_captured"] and report["graphs"] >= (1 if drafts == "none" else 2)
    found = generate(lm, chosen, budget="auto", max_length=120, **options)
    assert found.sequences == expected
    assert drafts == "suffix" or found.stats["graphs"]["replays"] == found.stats["steps"], "whatever it chose"
    if drafts != "none":
        with pytest.raises(ValueError, match="max_length 7 leaves no room for a step behind 6 tokens"):
            stree.warm_up(lm, chosen, budgets=("auto",), **{**warm, "max_length": 7})


def test_a_warm_up_without_room_or_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="steps are captured on a single CUDA device"):
        stree.warm_up(launched(), near_drafter(), max_length=20)
    lm = captured(monkeypatch)
    with pytest.raises(ValueError, match="max_length must be above 25 to capture steps of 4 nodes, got 25"):
        stree.warm_up(lm, near_drafter(), max_length=25, budgets=(4,))


class Waiting:
    """A streamer that takes a while over every token."""

    def __init__(self, is_compiling: bool) -> None:
        self.is_compiling = is_compiling

    def put(self, value: Any) -> None:
        with compiling() if self.is_compiling else nullcontext():
            time.sleep(0.1)

    def end(self) -> None:
        pass


def test_compilation_is_reported_apart_from_the_time_of_a_text() -> None:
    began = time.perf_counter()
    stats = stree.generate(launched(), [TEXTS[0]], streamer=Waiting(True), max_new_tokens=3, ignore_eos=True).stats
    wall_s = time.perf_counter() - began
    assert stats["warm_up_s"] >= 0.3
    assert stats["total_s"] <= wall_s - stats["warm_up_s"]
    assert stats["tokens_per_s"] == pytest.approx(3 / stats["total_s"])
    assert sum(stats[part] for part in ("prefill_s", "draft_s", "verify_s", "accept_s", "commit_s")) <= stats["total_s"]
    stats = stree.generate(launched(), [TEXTS[0]], streamer=Waiting(False), max_new_tokens=3, ignore_eos=True).stats
    assert stats["warm_up_s"] < 0.3 <= stats["total_s"]
