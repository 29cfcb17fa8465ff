"""budget="auto", the default: texts do not change nor follow the clock, and a draft model left alone catches up.

Run: python -m pytest tests/test_steering.py
"""

from __future__ import annotations

import inspect
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_models import grafted, random_texts, tiny_model
from torch import Tensor

import stree
from stree.budget import BudgetController
from stree.drafters import Draft, Drafter, FusedDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.generation import _choices, _shape
from stree.goodput import Experience
from stree.growth import (
    RSDC,
    RSDS,
    Calibrated,
    Chain,
    Confidence,
    DecisionStop,
    DepthStop,
    DySpec,
    Eagle2,
    Growth,
    Limited,
    OptTree,
    Plan,
    Sequoia,
    SpecInfer,
    Static,
)  # fmt: skip
from stree.growth.plan import Bound
from stree.kernels import topology
from stree.rehearsal import GUESS, StepTimes
from stree.sampling import Random, Sampling
from stree.sizes import PLAIN, Choice, flat_choices
from stree.steering import AutoSize, FixedSize, Sizes
from stree.tree import TokenTree
from stree.verify import Acceptance

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 3, 9, 3, 9], [1, 2, 4, 1, 2, 4, 1]]


def drafters() -> dict[str, Drafter]:
    lm = grafted(tiny_model("mamba2", seed=1))
    return {
        "model": ModelDrafter(lm),
        "suffix": SuffixDrafter(),
        "none": NoDrafter(),
        "same-model": ModelDrafter(grafted(tiny_model("bamba"))),
    }


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", drafters())
def test_text_is_that_of_plain_decoding(name: str, temperature: float) -> None:
    target = grafted(tiny_model("bamba"))

    def text(drafter: Drafter, budget: int | str) -> stree.Generation:
        return stree.generate(
            target, PROMPTS, drafter, budget=budget, sampling=Sampling(temperature), max_new_tokens=40, verifier="match"
        )

    auto = text(drafters()[name], "auto")
    assert auto.sequences == text(NoDrafter(), 1).sequences
    assert auto.stats["budget"] == "auto"


def test_it_is_the_default() -> None:
    for function in (stree.generate, stree.custom_generate):
        assert inspect.signature(function).parameters["budget"].default == "auto"


GROWTHS: dict[str, Growth] = {
    "calibrated": Calibrated(), "calibrated-2": Calibrated(depth=2), "dyspec": DySpec(), "heap": DySpec(form="heap"),
    "opt-tree": OptTree(), "eagle2": Eagle2(), "sequoia": Sequoia(), "chain": Chain(3), "static": Static([3, 2]),
    "stree": Static.stree(), "large": Static([70]), "rsdc": RSDC([2, 2]), "rsds": RSDS(3, 2),
    "specinfer": SpecInfer([2, 1]), "depth-stop": DepthStop(Eagle2()), "decision": DecisionStop(Calibrated()),
    "stopped-chain": Chain(4, stop=Confidence(least_prob=0.2)), "stopped-fixed": DepthStop(RSDC([2, 2])),
}  # fmt: skip


@cache
def pair() -> tuple[stree.TreeLM, stree.TreeLM]:
    return grafted(tiny_model("bamba")), grafted(tiny_model("mamba2", seed=1))


@cache
def plain_texts() -> list[list[int]]:
    return stree.generate(pair()[0], PROMPTS, NoDrafter(), budget=1, max_new_tokens=12).sequences


def given(monkeypatch: pytest.MonkeyPatch, tree_ms: float, call_ms: float, behind_ms: float = 0.0) -> None:
    """Let steps take what is said: plain decoding 1 millisecond, trees and draft calls that much."""
    times = StepTimes(1.0, np.array([1.0, 64.0]), np.array([1.0, 64 * tree_ms]), call_ms, behind_ms)
    monkeypatch.setattr("stree.generation.step_times", lambda *_, **__: times)


@pytest.mark.parametrize("name", GROWTHS)
def test_every_growth_runs_by_default(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = pair()
    text = partial(stree.generate, target, PROMPTS, ModelDrafter(draft), GROWTHS[name], max_new_tokens=12)
    if name not in ("heap", "large"):  # which take long on these models
        assert text().sequences == plain_texts()
    given(monkeypatch, 0.02, 0.01)  # trees pay
    out = text()
    assert out.sequences == plain_texts()
    assert out.stats["budget"] == "auto" and out.stats["nodes_per_step"] > 1.3
    sampled = text(sampling=Sampling(0.8))
    assert [len(text) for text in sampled.sequences] == [len(text) for text in out.sequences]


class Valueless:
    """A drafter that drafts one node and says nothing of its worth."""

    starts = 0

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> Valueless:
        self.starts += 1
        return self

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        if budget == 1:
            return Draft(TokenTree.chain(pending[:, None]), None, 0)
        tokens = torch.stack([pending, pending], 1)
        parents = torch.tensor([[-1, 0]] * len(pending), dtype=torch.int32)
        return Draft(TokenTree.unchecked(tokens, parents), None, 1)

    def observe(self, acceptance: Acceptance) -> None:
        pass


DRAFTERS: dict[str, Callable[[stree.TreeLM], Drafter | None]] = {
    "default": lambda draft: None,
    "none": lambda draft: NoDrafter(),
    "suffix": lambda draft: SuffixDrafter(),
    "model": ModelDrafter,
    "trimmed": lambda draft: ModelDrafter(draft, vocab=range(60)),
    "fused": lambda draft: FusedDrafter(ModelDrafter(draft), SuffixDrafter()),
    "fused-suffix-first": lambda draft: FusedDrafter(SuffixDrafter(), ModelDrafter(draft)),
    "without-values": lambda draft: Valueless(),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_runs_by_default(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = pair()
    drafter = DRAFTERS[name](draft)
    assert stree.generate(target, PROMPTS, drafter, max_new_tokens=12).sequences == plain_texts()
    if isinstance(drafter, Valueless):
        assert drafter.starts == 1, "a drafter of the user's own is not rehearsed with"
    assert stree.generate(target, PROMPTS, drafter, budget=1, max_new_tokens=12).sequences == plain_texts()
    given(monkeypatch, 0.02, 0.01)  # trees pay
    out = stree.generate(target, PROMPTS, drafter, max_new_tokens=12)
    assert out.sequences == plain_texts()
    assert (out.stats["nodes_per_step"] > 1) == (name != "none")
    by_turns = stree.generate(target, iter(PROMPTS), drafter, max_new_tokens=12, max_batch=2, max_length=30) if (
        name != "without-values"  # which takes up no prompt in mid-run
    ) else None  # fmt: skip
    assert by_turns is None or by_turns.sequences == plain_texts()


def test_values_are_guessed_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[np.ndarray] = []
    monkeypatch.setattr(BudgetController, "observe", lambda self, choice, values, *_: seen.append(values))
    sizes = Sizes(None, flat_choices(4))
    auto = AutoSize(sizes, GUESS)
    auto._launch(Choice(4, 3))
    tree = TokenTree.from_paths([[1, 2, 3], [1, 4]])
    path, lengths = torch.tensor([[0, -1]], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    auto.observe(Draft(tree, None, 2), Acceptance(path, lengths, torch.tensor([0])))
    assert seen[0].tolist() == [[1 / (1 + depth) for depth in tree.depths[0].tolist()]]
    padded = TokenTree.unchecked(torch.zeros(1, 3, dtype=torch.long), torch.tensor([[-1, 0, -1]], dtype=torch.int32))
    auto._launch(Choice(4, 3))
    auto.observe(Draft(padded, None, 1), Acceptance(path, lengths, torch.tensor([0])))
    assert seen[1].tolist() == [[1, 0.5, 0]], "padding is worth nothing"


def test_a_perfect_drafter_is_used_and_a_useless_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # Costs are given, not measured: what is tested is the choice.
    given(monkeypatch, 0.05, 0.05)
    prompts = random_texts(random.Random(0), [9])
    sizes: dict[str, list[float]] = {}
    for name in ("same-model", "model"):
        out = stree.generate(pair()[0], prompts, drafters()[name], DySpec(depth=4), max_new_tokens=300)
        sizes[name] = [out.stats["nodes_per_step"], out.stats["tau"]]
    assert sizes["same-model"][1] > 2.5
    assert sizes["model"][0] < sizes["same-model"][0]


def test_a_seed_names_a_text_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = grafted(tiny_model("bamba")), grafted(tiny_model("mamba2", seed=1))
    options: dict[str, Any] = {"sampling": Sampling(1.0), "max_new_tokens": 60, "seed": 5}

    def text() -> tuple[list[list[int]], int, float]:
        out = stree.generate(target, PROMPTS, ModelDrafter(draft), **options)
        return out.sequences, out.stats["steps"], out.stats["nodes_per_step"]

    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: 1e-6 * next(ticks))  # all steps take about as long: trees pay
    first = text()
    assert first[2] > 2, "else trees do not matter"
    noise, late = random.Random(1), 0.0

    def noisy() -> float:
        nonlocal late
        late += noise.choice([1e-6, 1e-5, 0.001, 0.3])
        return late

    monkeypatch.setattr(time, "perf_counter", noisy)
    assert text() == first
    assert stree.generate(target, PROMPTS[:2], ModelDrafter(draft), **options).sequences  # another batch is measured
    assert text() == first


def test_other_costs_lead_to_other_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the one above: a sampled text does follow the sizes."""
    texts = []
    for tree_ms, call_ms in ((0.02, 0.01), (0.03, 1.0), (5.0, 5.0)):
        given(monkeypatch, tree_ms, call_ms)
        drafter = ModelDrafter(pair()[1])
        out = stree.generate(pair()[0], PROMPTS, drafter, sampling=Sampling(1.0), max_new_tokens=60, seed=5)
        texts.append((out.stats["nodes_per_step"], out.sequences))
    (large, first), (small, second), (none, third) = texts
    assert large > 2 * small > 2 > 1.5 > none
    assert first != second != third != first


def test_what_a_draft_model_has_to_catch_up_with_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    for behind_ms in (0.0, 1e6):
        given(monkeypatch, 0.05, 2.0, behind_ms)
        out = stree.generate(pair()[0], PROMPTS, drafters()["same-model"], max_new_tokens=200)
        steps.append(out.stats["steps"])
    assert steps[0] < steps[1] == 199, "no trial pays where it takes so long"


def test_what_measuring_has_brought_reaches_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    brought, given = Experience(np.ones(1), np.ones(1), np.ones(1), 1.0, 1.0), []

    def noted(sizes: Sizes, times: StepTimes, **named: Any) -> AutoSize:
        given.append(named["experience"])
        return AutoSize(sizes, times)

    monkeypatch.setattr("stree.generation.step_times", lambda *_, **__: replace(GUESS, experience=brought))
    monkeypatch.setattr("stree.generation.AutoSize", noted)
    stree.generate(pair()[0], PROMPTS, drafters()["model"], max_new_tokens=2)
    assert given == [brought]


def test_each_text_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, 0.05, 0.2)
    target, draft = pair()

    def steps(prompt: list[int]) -> tuple[int, float]:
        out = stree.generate(target, [prompt], ModelDrafter(draft), max_new_tokens=60)
        return out.stats["steps"], out.stats["nodes_per_step"]

    alone = steps(PROMPTS[0])
    steps(PROMPTS[1])
    assert steps(PROMPTS[0]) == alone


def test_a_model_that_stood_idle_catches_up_on_what_was_emitted() -> None:
    lm = grafted(tiny_model("mamba2"))
    texts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    run = ModelDrafter(lm).start(lm.vocab_size, texts, Random(0, torch.arange(2), torch.tensor([5, 3])))
    generator = random.Random(3)
    pending = [7, 8]
    for step in range(80):
        given = torch.tensor(pending)
        draft = run.propose(given, Chain(2).bind(Sampling()), 1)
        assert draft.tree.tokens.tolist() == [[pending[0]], [pending[1]]] and draft.num_calls == 0
        given.zero_()  # as the loop does, which writes the next ones in their place
        taken = [1, step % 3 != 0]  # the second sequence stands still now and then
        for row, length in enumerate(taken):
            if length:
                texts[row] = [*texts[row], pending[row]]
                pending[row] = generator.randrange(lm.vocab_size)
        path = torch.zeros(2, 1, dtype=torch.int32)
        run.observe(Acceptance(path, torch.tensor(taken, dtype=torch.int32), torch.tensor(pending)))
        if step % 37 == 0:  # after one token, after some, after more than a chain holds
            draft = run.propose(torch.tensor(pending), Chain(1).bind(Sampling()), 2)
            assert draft.num_calls == (3 if step else 2), "37 tokens are two chains to catch up on"
            check_next_tokens(lm, draft, texts, pending)
            run.observe(Acceptance(path, torch.zeros(2, dtype=torch.int32), torch.tensor(pending)))


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("is_begun", [False, True])
def test_what_waits_of_a_text_is_not_run_into_the_next_one_of_its_row(
    is_begun: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = grafted(tiny_model("mamba2"))
    monkeypatch.setattr(topology, "waits_always", waits)
    texts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    run = ModelDrafter(lm).start(lm.vocab_size, texts, Random(0, torch.arange(2), torch.tensor([5, 3])))
    run.reserve(40, Chain(1).bind(Sampling()), 2, begins=is_begun)
    for pending, following in (([7, 8], [1, 2]), ([1, 2], [5, 6])):
        run.propose(torch.tensor(pending), None, 1)
        path, lengths = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
        run.observe(Acceptance(path, lengths, torch.tensor(following)))
    run.admit(0, [6, 5, 4])
    draft = run.propose(torch.tensor([3, 6]), Chain(1).bind(Sampling()), 2)
    assert run._state.lengths.tolist() == [3, 5]
    check_next_tokens(lm, draft, [[6, 5, 4], [9, 2, 6, 8, 2]], [3, 6])
    run.observe(Acceptance(path, lengths * 0, torch.tensor([3, 6])))
    run.propose(torch.tensor([3, 6]), None, 1)
    run.observe(Acceptance(path, lengths, torch.tensor([5, 5])))
    run.restart([[2, 9], [1, 8, 4]])
    draft = run.propose(torch.tensor([3, 6]), Chain(1).bind(Sampling()), 2)
    assert run._state.lengths.tolist() == [2, 3]
    check_next_tokens(lm, draft, [[2, 9], [1, 8, 4]], [3, 6])


def check_next_tokens(lm: stree.TreeLM, draft: Draft, texts: Sequence[Sequence[int]], pending: Sequence[int]) -> None:
    for row, text in enumerate(texts):
        with torch.no_grad():
            expected = int(lm.model(torch.tensor([[*text, pending[row]]])).logits[0, -1].argmax())
        assert int(draft.tree.tokens[row, 1]) == expected


def test_choices_follow_the_drafter_and_the_growth() -> None:
    def choices(growth: Growth | None, *, has_model: bool = True, is_coarse: bool = False) -> list[Choice]:
        return list(Sizes.of(growth, has_model=has_model, is_coarse=is_coarse).choices)

    assert choices(Chain(3).bind(Sampling())) == [PLAIN, Choice(4, 3)], "a fixed shape, or nothing"
    assert choices(Static([70, 1]).bind(Sampling())) == [PLAIN, Choice(141, 2)], "whatever its size"
    layered = choices(DySpec(depth=3).bind(Sampling()))
    assert max(choice.depth for choice in layered) == 3
    assert {choice.depth for choice in layered if choice.nodes == 16} == {1, 2, 3}
    assert choices(DepthStop(DySpec(depth=3)).bind(Sampling())) == layered, "the one inside has a depth"
    assert len(choices(DySpec(depth=3).bind(Sampling()), is_coarse=True)) < len(layered)
    heap = choices(DySpec(form="heap").bind(Sampling()))
    assert all(choice.depth == choice.nodes - 1 for choice in heap), "a heap makes a draft call a node"
    flat = choices(DySpec().bind(Sampling()), has_model=False)
    assert flat == flat_choices(64)
    assert max(Sizes.of(Calibrated(), 2, has_model=True, is_coarse=False).choices, key=lambda c: c.depth).depth == 2


def test_a_growth_that_is_given_is_drafted_as_deep_as_it_says() -> None:
    drafter = drafters()["model"]
    for growth, depth in ((Calibrated(depth=3), 3), (Calibrated(depth=12), 12), (None, 8)):
        shape = _shape(drafter, growth, Sampling(0.8))
        sizes = _choices(drafter, shape, "auto", has_growth=growth is not None, is_captured=False)
        assert max(choice.depth for choice in sizes.choices) == depth


def test_a_growth_without_a_depth_is_taken_whole_or_not_at_all() -> None:
    class Opaque(Bound):
        def plan(self, budget: int) -> Plan:
            return Calibrated(depth=2).bind(self.sampling).plan(min(budget, 9))

    growth = Opaque()
    assert list(Sizes.of(growth, has_model=True, is_coarse=False).choices) == [PLAIN, Choice(9, 2)]
    target, draft = pair()
    out = stree.generate(target, PROMPTS, ModelDrafter(draft), growth, max_new_tokens=12)
    assert out.sequences == plain_texts()


def test_a_shape_that_cannot_be_laid_out_is_refused() -> None:
    class Broken(Bound):
        def plan(self, budget: int) -> Plan:
            raise ValueError("no tree of mine")

    target, draft = pair()
    with pytest.raises(ValueError, match="no tree of mine"):
        stree.generate(target, PROMPTS, ModelDrafter(draft), Broken())


def test_a_limited_growth_is_the_other_cut_at_a_depth() -> None:
    growth = DySpec(depth=6, ranks=2).bind(Sampling(0.5))
    limited = Limited(growth, 2)
    assert limited.plan(16) == DySpec(depth=2, ranks=2).bind(Sampling(0.5)).plan(16)
    assert limited.sampling == Sampling(0.5)
    assert limited.bind(Sampling(0.7)).sampling == Sampling(0.7)
    assert isinstance(limited.estimate(1, torch.device("cpu")), type(growth.estimate(1, torch.device("cpu"))))


def test_a_fixed_size_is_always_the_same() -> None:
    fixed = FixedSize(None, 7)
    assert fixed.next() == fixed.next() == (None, 7)
    assert not fixed.is_off and FixedSize(None, 1).is_off


def test_a_fused_drafter_has_the_models_of_its_parts() -> None:
    model = drafters()["model"]
    assert isinstance(model, ModelDrafter)
    assert list(FusedDrafter(model, SuffixDrafter()).models) == [model.lm]
    fused = FusedDrafter(SuffixDrafter(), model, least_value=0.3, least_share=0.2).with_model(lambda lm: lm)
    assert (fused.least_value, fused.least_share, list(fused.models)) == (0.3, 0.2, [model.lm])
