"""Rows of one batch whose trees have different sizes, down to none: texts, distributions and captured steps stay exact.

Run: python -m pytest tests/decode/test_row_nodes.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.captured import TapeRecorder, near_drafter
from helpers.fast_cases import slow_unless
from helpers.on_device import treat_as_on_device
from helpers.tiny_models import patched, tiny_model
from torch import Tensor

import stree
from stree.decode.capture import Capture, GraphCapture
from stree.decode.request import Request
from stree.decode.step import DecodeStep
from stree.decode.step_result import Wanted
from stree.drafters import Drafter, FusedDrafter, NoDrafter, SuffixDrafter
from stree.growth import Calibrated, DySpec, Growth, OptTree, Static
from stree.sampling import BatchSampling, Sampling
from stree.testing.enumeration import EXACT, PLAIN, drafts_of, step_bias
from stree.testing.tables import TableModel, table_drafter
from stree.tree import TokenTree

TEXTS = [[5, 6, 7, 5, 6, 7, 5, 6], [4, 8, 1], [9, 2], [3, 3, 3, 3]]
NODES, NEW = [0, 1, 4, 9], 14
DRAFTERS: dict[str, Drafter] = {
    "model": near_drafter(), "suffix": SuffixDrafter(), "fused": FusedDrafter(near_drafter(), SuffixDrafter()),
}  # fmt: skip
GROWTHS: dict[str, Growth] = {
    "by value": Calibrated(3), "pruned": OptTree(depth=3), "fixed": Static([2, 2]), "heap": DySpec(form="heap"),
}  # fmt: skip
CASES = [
    (drafter, growth, temperature, on_device)
    for drafter in DRAFTERS
    for growth in GROWTHS
    for temperature in (0.0, 0.8)
    for on_device in (False, True)
    if drafter != "suffix" or growth == "by value"
]


class Steps:
    """Steps of a batch whose rows are given their nodes.

    Attributes:
        most: nodes of the largest tree that each row has had, root included.
    """

    def __init__(self, drafter: Drafter, growth: Growth, temperature: float, capture: Capture | None = None) -> None:
        lm, batch, sampling = patched(tiny_model("bamba")), len(TEXTS), Sampling(temperature)
        state = lm.new_state(batch, 64, 9, fixed_shapes=capture is not None)
        self.growth, self.most = growth, [1] * batch
        self.step = step = DecodeStep(
            lm, state, sampling=BatchSampling([sampling], batch, lm.device), verifier="match", max_length=64,
            capture=capture, limits_nodes=True,
        )  # fmt: skip
        requests = [Request(text, sampling, NEW, frozenset(), sequence=row) for row, text in enumerate(TEXTS)]
        logits = step.fill(drafter, requests)
        step.reserve(64, growth, 9, begins=True)
        step.first_tokens(torch.arange(batch), logits)
        for row in range(batch):
            step.set_finished(row, is_finished=False)

    def run(self, nodes: list[int], steps: int = 1000) -> None:
        """Take so many steps, or until all texts have ended, in which rows have these nodes at most."""
        for row, most in enumerate(nodes):
            self.step.texts.limit_nodes(row, most)
        while steps and not bool(self.step.texts.is_finished.all()):
            result = self.step(self.growth, 9, Wanted(trees=True))
            assert result.trees is not None
            for row, count in enumerate(((result.trees.parents >= 0).sum(1) + 1).tolist()):
                assert count <= max(nodes[row], 1), "as many as the row may have"
                self.most[row] = max(self.most[row], count)
            steps -= 1

    def texts(self) -> list[list[int]]:
        """Return the texts so far, the pending tokens included."""
        texts = self.step.texts
        return [row[: length + 1] for row, length in zip(texts.tokens.tolist(), texts.lengths.tolist(), strict=True)]


def plain(temperature: float) -> list[list[int]]:
    """Return the texts of plain decoding."""
    lm = patched(tiny_model("bamba"))
    return stree.generate(
        lm, TEXTS, NoDrafter(), sampling=Sampling(temperature), max_new_tokens=NEW, ignore_eos=True
    ).sequences


@pytest.mark.parametrize(
    ("drafter", "growth", "temperature", "on_device"),
    slow_unless(lambda *case: case == ("model", "by value", 0.8, False), CASES,
                in_ci=lambda *case: (case[2] == 0.8) == case[3]),
)  # fmt: skip
def test_texts_are_those_of_plain_decoding(
    drafter: str, growth: str, temperature: float, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    treat_as_on_device(monkeypatch, host_can_read=not on_device)
    steps = Steps(DRAFTERS[drafter], GROWTHS[growth], temperature)
    steps.run(NODES)
    assert steps.step.problem is None and steps.texts() == plain(temperature)
    assert steps.most[:2] == [1, 1] and 1 < steps.most[2] <= 4 < steps.most[3] + (drafter == "suffix")


@pytest.mark.slow
def test_a_budget_of_each_prompt_bounds_its_trees() -> None:
    budgets = [1, 3, 9, 2]
    options: dict[str, Any] = {"sampling": Sampling(0.8), "max_new_tokens": NEW, "ignore_eos": True}
    lm = patched(tiny_model("bamba"))
    out = stree.generate(
        lm, TEXTS, near_drafter(), budget=budgets, verifier="match", return_steps=True, max_batch=3, **options
    )  # fmt: skip
    assert out.sequences == plain(0.8) and out.steps is not None
    most = [max(len(step.tokens) for step in steps) for steps in out.steps]
    assert all(nodes <= budget for nodes, budget in zip(most, budgets, strict=True)) and most[2] > 3
    with stree.Engine(lm, near_drafter(), budget=9, max_batch=4) as engine:
        for text, budget in zip(TEXTS, budgets, strict=True):
            handle = engine.submit(text, budget=budget, trees=True, **options)
            assert all(step.tree is None or len(step.tree.tokens) <= budget for step in handle.steps())
        alone = engine.submit(TEXTS[0], budget=1, trees=True, **options)
        assert alone.result().stats["drafted"] == 0
        with pytest.raises(ValueError, match="budget of a request must be at most the engine's 9, got 10"):
            engine.submit(TEXTS[0], budget=10)


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [([1, 2], ValueError, "budget must be .* one for each of 4"), ([1, 0, 1, 1], ValueError, r"budget\[1\] must be"),
     ([1, "auto", 1, 1], TypeError, r"budget\[1\] must be an integer"), ([], ValueError, "budget must be")],
)  # fmt: skip
def test_other_budgets_of_prompts_are_refused(budget: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        stree.generate(patched(tiny_model("bamba")), TEXTS, near_drafter(), budget=budget)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_captured_step_reads_the_nodes_of_its_rows(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    treat_as_on_device(monkeypatch)
    steps = Steps(DRAFTERS[drafter], Calibrated(3), 0.8, GraphCapture(TapeRecorder()))
    steps.run([2, 2, 2, 2], 4)
    assert max(steps.most) == 2
    for nodes in (NODES, NODES[::-1]):
        steps.run(nodes, 2)
    steps.run(NODES)
    assert steps.step.capture.num_replays > 4 and steps.step.problem is None
    assert steps.texts() == plain(0.8) and not steps.step.capture.report()["not_captured"]


class Limited(Drafter):
    """A drafter whose every row has so many nodes."""

    def __init__(self, drafter: Drafter, nodes: int) -> None:
        self.drafter, self.nodes = drafter, nodes

    def start(self, vocab_size: int, prompts: Any, rng: Any) -> Any:
        run = self.drafter.start(vocab_size, prompts, rng)
        prepare, nodes = run.prepare, torch.full((len(prompts),), self.nodes)
        run.prepare = lambda seen, budget: prepare(replace(seen, nodes=nodes), budget)  # type: ignore[method-assign]
        return run


@pytest.mark.parametrize("verifier", ["traversal", "rejection"])
@pytest.mark.parametrize("growth", [Static([2, 1]), DySpec(depth=2, ranks=2), DySpec(form="heap")], ids=str)
def test_smaller_trees_are_drawn_exactly(growth: Growth, verifier: str) -> None:
    drafter = Limited(table_drafter(TableModel.random(3, 103)), 3)
    trees = drafts_of(drafter, growth, 5, PLAIN, 3)
    assert step_bias(TableModel.random(3, 11), trees, verifier, PLAIN) < EXACT


def test_nodes_that_are_dropped_by_their_tokens_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_ones(tree: TokenTree, nodes: Tensor) -> TokenTree:
        is_kept = tree.tokens != 1
        is_kept[:, 0] = True
        return TokenTree(tree.tokens * is_kept, torch.where(is_kept, tree.parents, -1))

    monkeypatch.setattr("stree.drafters.model.keep_first", without_ones)
    trees = drafts_of(Limited(table_drafter(TableModel.random(3, 103)), 3), Static([2]), 5, PLAIN, 3)
    assert step_bias(TableModel.random(3, 11), trees, "rejection", PLAIN) > 1e-3
