"""``stree bench profile``: the parts of a step make up the step, replayed steps are timed beside launched ones."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.captured import captured
from helpers.tiny_models import patched, tiny_model
from rich.console import Console

from stree.bench.profile import Shape, bytes_moved, profile, profile_tables
from stree.growth import Chain

SHAPE = Shape(growth=Chain(2), budget=3, batch=2, context=8, new_tokens=8, temperature=0.0)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stree.bench.profile.COPIED", 1 << 20)


def pair(*, drafts: bool = True) -> Any:
    drafter = patched(tiny_model("mamba2", seed=1)) if drafts else None
    return SimpleNamespace(target=patched(tiny_model("bamba")), drafter=drafter)


def text_of(record: dict[str, Any]) -> str:
    console = Console(width=160, file=io.StringIO())
    console.print(*profile_tables(record))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert "whole step" in text and "roofline" in text
    return text


@pytest.mark.parametrize("drafts", [False, True])
def test_the_parts_of_a_step_make_up_the_step(drafts: bool) -> None:
    both = pair(drafts=drafts)
    record = profile(both, SHAPE if drafts else Shape(None, 4, 1, 8, 8, 0.0))
    assert sum(record["ms"].values()) == pytest.approx(record["step_ms"])
    assert all(ms >= 0 for ms in record["ms"].values())
    kinds = {"verify: Mamba-2", "verify: attention", "verify: output head", "verify: the rest", "accept", "commit"}
    assert kinds <= set(record["ms"]) and (record["ms"]["draft model"] > 0) == drafts
    assert all(record["ms"][name] > 0 for name in kinds)
    assert record["bound_ms"] == pytest.approx(1e3 * sum(record["bytes"].values()) / record["bytes_per_s"])
    assert record["replayed"] is None and "replayed" not in text_of(record)


def test_bytes_grow_with_what_they_count() -> None:
    lm = pair().target
    one, more = (bytes_moved(lm, batch=batch, length=10, nodes=4) for batch in (1, 3))
    assert more["weights"] == one["weights"] and more["stash, written"] == 3 * one["stash, written"]
    longer = bytes_moved(lm, batch=1, length=20, nodes=4)
    assert longer["keys and values"] == 2 * one["keys and values"]
    assert longer["states, read and written"] == one["states, read and written"]


@pytest.mark.slow
def test_replayed_steps_are_timed_beside_launched_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREE_DEBUG")  # the same logits answer every step, so none may be poisoned
    both = pair()
    captured(monkeypatch, both.target)
    record = profile(both, replace(SHAPE, new_tokens=16))
    replayed = record["replayed"]
    assert replayed["replays"] > 0 and replayed["graphs"] == 1
    assert 0 <= replayed["idle"] < 1 and replayed["step_ms"] > 0 and replayed["outside_forwards"] > 0
    assert both.target.captures_steps is None, "as it was"
    text = text_of(record)
    assert "replayed, idle" in text and f"outside the forwards {replayed['outside_forwards']:.1%}" in text
