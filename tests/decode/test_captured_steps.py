"""Steps that are captured once and replayed give the texts of steps launched one by one, in every way to draft.

A tape takes the place of CUDA graphs: host code does not run again, nothing may be read, moved or freed.  So a step
that is captured reads nothing of the device, and runs what every other step runs.
What makes steps be captured anew is in ``test_captured_anew.py``.

Run: python -m pytest tests/decode/test_captured_steps.py
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.calls import together
from helpers.captured import TEXTS, TapeError, TapeRecorder, captured, generate, launched, near_drafter
from helpers.draft_steps import GROWTHS
from helpers.fast_cases import slow_unless
from helpers.tiny_family_models import EVERY_STATE, family_model, matrix
from helpers.tiny_models import random_texts
from torch import Tensor

import stree
from stree.budget.policy import AutoBudget
from stree.drafters import Drafter, FusedDrafter, NoDrafter, SuffixDrafter
from stree.growth import Calibrated, Chain, Growth
from stree.sampling import Sampling

REPEATING = [[5, 6, 7, 8, 9] * 4, [3, 4] * 5]


def drafter_named(name: str) -> Drafter:
    every: dict[str, Drafter] = {
        "model": near_drafter(),
        "suffix": SuffixDrafter(),
        "none": NoDrafter(),
        "fused": FusedDrafter(near_drafter(), SuffixDrafter()),
    }
    return every[name]


QUICK = ("none", 0.8), ("opt-tree", 0.8)
IN_CI = {(name, 0.8 * (place // 2 % 2)) for place, name in enumerate(GROWTHS) if place % 2 == 0}
WAYS = slow_unless(lambda *way: way in QUICK, itertools.product(GROWTHS, (0.0, 0.8)), in_ci=lambda *way: way in IN_CI)


@pytest.mark.parametrize(("name", "temperature"), WAYS)
def test_every_growth(name: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    growth: Growth | None = GROWTHS[name]
    options: dict[str, Any] = {"growth": growth, "budget": 1 if growth is None else 12}
    options["sampling"] = Sampling(temperature)
    drafts = NoDrafter() if growth is None else near_drafter()
    expected = [generate(launched(), drafts, seed=seed, **options) for seed in (0, 1)]
    lm = captured(monkeypatch)
    for seed in (0, 1):  # numbers that a graph held fast would give the first text's draws to the second
        found = generate(lm, drafts, seed=seed, **options)
        assert found.sequences == expected[seed].sequences and found.stats["tau"] == expected[seed].stats["tau"]
        assert found.stats["graphs"]["graphs"] == 1 and not found.stats["graphs"]["not_captured"]
        steps_launched = found.stats["steps"] - found.stats["graphs"]["replays"]
        assert 0 < steps_launched <= 3 if seed == 0 else steps_launched == 0, "the first one's graph serves all"


@pytest.mark.slow
def test_threads_share_a_target_whose_steps_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"budget": 8, "sampling": Sampling(0.8), "max_new_tokens": 12}
    texts = [[text] for text in random_texts(random.Random(1), [6, 9, 5, 7])]
    expected = [generate(launched(), near_drafter(), texts=text, **options).sequences for text in texts]
    lm = captured(monkeypatch)
    for _ in range(2):
        found = together(lambda number: generate(lm, near_drafter(), texts=texts[number], **options), 4)
        assert [one.sequences for one in found] == expected
        assert all(one.stats["graphs"]["replays"] and not one.stats["graphs"]["not_captured"] for one in found)


@pytest.mark.parametrize(("name", "temperature"), [("suffix", 0.8), ("fused", 0.0)])
@pytest.mark.slow
def test_retrieval_whose_trees_the_host_lays_out(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"sampling": Sampling(temperature), "growth": Calibrated(2), "max_new_tokens": 24}
    texts = [REPEATING, [[9, 9, 2, 1, 9, 9, 2], [4, 8, 1]]]
    expected = [generate(launched(), drafter_named(name), texts=text, budget=13, **options) for text in texts]
    lm = captured(monkeypatch)
    for text, one in zip([*texts, texts[0]], [*expected, expected[0]], strict=True):
        found = generate(lm, drafter_named(name), texts=text, budget=13, **options)
        assert found.sequences == one.sequences and found.stats["tau"] == one.stats["tau"]
        assert found.stats["nodes_per_step"] == one.stats["nodes_per_step"]
        assert not found.stats["graphs"]["not_captured"]
    assert found.stats["graphs"]["replays"] >= found.stats["steps"] - 6


@pytest.mark.parametrize("family", matrix(fast=EVERY_STATE))
def test_the_verification_of_every_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, options = stree.TreeLM(family_model(family)), dict[str, Any](texts=[[5, 6, 7, 8] * 4], budget=4)
    expected = generate(lm, SuffixDrafter(), max_new_tokens=8, **options).sequences
    captured(monkeypatch, lm)
    for _ in range(2):
        found = generate(lm, SuffixDrafter(), max_new_tokens=8, **options)
        assert found.sequences == expected and not found.stats["graphs"]["not_captured"]
    assert found.stats["graphs"]["replays"] > 0


GROWING = [4] * 6 + [16, 1, 12, 6, 1] * 4  # small trees are captured before large ones come


@pytest.mark.parametrize(
    ("name", "temperature", "sizes", "defers_commit"),
    slow_unless(
        lambda *case: False,
        [
            ("model", 0.0, GROWING, False), ("fused", 0.8, GROWING, False),
            ("model", 0.0, [8, 1, 1, 8], True), ("model", 0.8, [8, 1, 1, 8], True),
        ],
        in_ci=lambda name, temperature, sizes, _: name == "fused" or (temperature == 0 and sizes is not GROWING),
    ),
)  # fmt: skip
def test_sizes_that_change_from_step_to_step(
    name: str, temperature: float, sizes: list[int], defers_commit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are taken up in between."""

    class Turns(AutoBudget):
        """Sizes in turn; what "auto" would choose depends on the clock, and so would sampled texts."""

        def next(self) -> int:
            self.number = getattr(self, "number", -1) + 1
            return sizes[self.number % len(sizes)]

        def observe(self, num_emitted: Sequence[int], seconds: float | None) -> None:
            """Learn nothing."""

    monkeypatch.setattr("stree.decode.tree_sizes.AutoBudget", Turns)
    options: dict[str, Any] = {"texts": random_texts(random.Random(3), [4, 7, 5]), "max_batch": 2}
    options |= {"budget": "auto", "growth": Calibrated(3), "sampling": Sampling(temperature), "max_new_tokens": 32}
    expected = generate(launched(), drafter_named(name), **options)
    lm = captured(monkeypatch)
    for model in (lm, near_drafter().lm):
        monkeypatch.setattr(model, "defers_commit", defers_commit)
    for _ in range(2):
        found = generate(lm, drafter_named(name), **options)
        assert found.sequences == expected.sequences and found.stats["tau"] == expected.stats["tau"]
        assert not found.stats["graphs"]["not_captured"]
    assert found.stats["graphs"]["replays"] > found.stats["steps"] / 2


@pytest.mark.parametrize("name", ["model", "none"])
@pytest.mark.slow
def test_a_step_that_is_read_while_the_next_one_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"sampling": Sampling(0.8), "verifier": "match"}
    expected = generate(launched(), NoDrafter(), budget=1, **options).sequences
    # Only on a device are steps pipelined.
    monkeypatch.setattr("stree.decode.loop.DecodeLoop._is_pipelined", lambda self: True)
    for lm in (launched(), captured(monkeypatch)):
        for _ in range(2):
            found = generate(lm, drafter_named(name), budget=1 if name == "none" else 8, **options)
            assert found.sequences == expected
    assert 0 < found.stats["graphs"]["replays"] <= found.stats["steps"]
    parts = [found.stats[part] for part in ("draft_s", "verify_s", "accept_s", "commit_s")]
    assert min(parts) > 0 and sum(parts) < found.stats["total_s"], "parts share a replay's time"


@pytest.mark.parametrize("name", slow_unless(("suffix").__eq__, ["suffix", "fused"]))
def test_a_row_is_taken_while_a_step_of_its_cancelled_text_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = random_texts(random.Random(2), [5, 8, 6, 7, 9])
    options: dict[str, Any] = {"texts": texts, "budget": 8, "sampling": Sampling(0.8), "verifier": "match"}
    expected = generate(launched(), drafter_named(name), **options).sequences
    # Only on a device are steps pipelined and commits deferred.
    monkeypatch.setattr("stree.decode.loop.DecodeLoop._is_pipelined", lambda self: True)
    lm = captured(monkeypatch)
    lm.defers_commit = True
    for _ in range(2):
        asked: list[int] = []

        def cancelled(text: int, asked: list[int] = asked) -> bool:
            asked.append(text)
            return text in (1, 2) and asked.count(text) == 2

        found = generate(lm, drafter_named(name), **options, max_batch=2, cancelled=cancelled)
        assert found.stats["finish_reasons"] == ["length", "cancelled", "cancelled", "length", "length"]
        assert asked.count(1) == asked.count(2) == 2
        for place, (text, whole) in enumerate(zip(found.sequences, expected, strict=True)):
            assert text == (whole[: len(text)] if place in (1, 2) else whole)
            assert len(text) > len(texts[place])


@pytest.mark.slow
def test_shorter_texts_end_where_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, options = captured(monkeypatch), dict[str, Any](growth=Chain(3), budget=4)
    for new in (20, 7, 13):
        found = generate(lm, near_drafter(), max_new_tokens=new, **options)
        assert found.sequences == generate(launched(), near_drafter(), max_new_tokens=new, **options).sequences
        assert found.stats["num_new_tokens"] == [new] * 2
    assert found.stats["tau"] > 1.3 and found.stats["graphs"]["replays"] == found.stats["steps"]


@pytest.mark.parametrize("name", ["suffix", "none"])
def test_rejection_without_a_draft_distribution(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"budget": 8, "verifier": "rejection", "sampling": Sampling(0.8)}
    expected = generate(launched(), drafter_named(name), **options).sequences
    found = generate(captured(monkeypatch), drafter_named(name), **options)
    assert found.sequences == expected
    assert not found.stats["graphs"]["not_captured"] and found.stats["graphs"]["replays"] > 0


@pytest.mark.parametrize("seed", [-1, (1 << 63) + 5])
def test_a_seed_of_any_size(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"sampling": Sampling(0.8), "budget": 4, "max_new_tokens": 6, "seed": seed}
    expected = generate(launched(), None, **options).sequences
    assert generate(captured(monkeypatch), None, **options).sequences == expected


def test_a_logits_processor_s_texts_are_launched_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_first(_: Tensor, logits: Tensor) -> Tensor:
        return torch.where(torch.arange(logits.shape[1]) == first, -torch.inf, logits)

    first = generate(launched(), None, budget=8).sequences[0][len(TEXTS[0])]
    expected = generate(launched(), None, budget=8, logits_processor=without_first).sequences
    found = generate(captured(monkeypatch), None, budget=8, logits_processor=without_first)
    assert found.sequences == expected and "graphs" not in found.stats


class Reading(Chain):
    """A chain whose shape asks the device, which no graph can hold."""

    def acceptance_model(self, batch: int, device: torch.device) -> Any:
        known = super().acceptance_model(batch, device)

        class Asking(type(known)):  # type: ignore[misc]
            def goes_on(self, values: Tensor) -> None:
                torch.tensor(3)

        known.__class__ = Asking
        return known


def test_what_cannot_be_captured_is_said_and_launched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = generate(launched(), near_drafter(), growth=Chain(3), budget=4).sequences
    found = generate(captured(monkeypatch), near_drafter(), growth=Reading(3), budget=4)
    assert found.sequences == expected
    assert found.stats["graphs"]["graphs"] == 0 == found.stats["graphs"]["replays"]
    assert "TapeError" in str(found.stats["graphs"]["not_captured"])
    assert len(caplog.records) == 1 and "without a CUDA graph: TapeError: a captured step brings" in caplog.text


def test_the_tape_sees_what_a_graph_would_do_wrong() -> None:
    """The control of all tests here."""
    with torch.no_grad():
        value, number = torch.zeros(3), [1.0]
        tape, out = TapeRecorder().capture(lambda: value.add_(1) + number[0])
        assert value.tolist() == [0.0] * 3, "capturing runs nothing"
        number[0] = 7.0
        tape.replay()
        assert value.tolist() == [1.0] * 3 and out.tolist() == [2.0] * 3, "a number of the host is held fast"
        with pytest.raises(AssertionError, match="reads the device"):
            TapeRecorder().capture(lambda: bool(value.any()))
        with pytest.raises(TapeError, match="from the host"):
            TapeRecorder().capture(lambda: torch.tensor([1, 2]) + 1)
        held = [torch.zeros(2)]
        tape, _ = TapeRecorder().capture(lambda: held[0] + 1)
        tape.replay()
        held.clear()
        with pytest.raises(TapeError, match="was freed"):
            tape.replay()
