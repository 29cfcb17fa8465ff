"""What steps take: found from a few of them, measured once, kept with the model, and nobody's text is touched.

Run: python -m pytest tests/test_rehearsal.py
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_models import grafted, tiny_model
from torch import Tensor

import stree
from stree import rehearsal
from stree.drafters import Draft, FusedDrafter, ModelDrafter, SuffixDrafter
from stree.growth import Calibrated, Chain, DySpec, Limited
from stree.growth.plan import Growth
from stree.rehearsal import GUESS, StepTimes, step_times
from stree.sampling import Sampling
from stree.sizes import PLAIN, Choice, flat_choices
from stree.steering import Sizes
from stree.tree import TokenTree
from stree.verify import Acceptance

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 3, 9, 3, 9]]
LAYERED = Sizes.of(Calibrated(depth=8).bind(Sampling()), has_model=True, is_coarse=False)


class Stage:
    """A loop whose steps take what they are said to, on a clock of its own."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, ms: Callable[[int, int], float], behind_ms: float = 0.0
    ) -> None:
        self.now, self.ms, self.behind_ms = 0.0, ms, behind_ms
        self.steps: list[tuple[int, int]] = []
        self.shares: list[float] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def play(
        self, sizes: Sizes, *, has_model: bool = True, on_device: bool = False, slow: int = 0, text: int = 10**6
    ) -> StepTimes:
        """Take all steps, ``text`` of them a text; every ``slow``-th takes ten times as long."""
        actor = rehearsal._Rehearsal(sizes, has_model=has_model, on_device=on_device)
        number, was_plain = 0, False
        while not actor.is_done:
            if actor.is_paused or number % text == 0:
                self.shares.append(actor.begin())
                self.now += 0.1  # the prompt
            growth, nodes = actor.next()
            calls = self.calls(growth, nodes) if has_model else 0
            self.steps.append((nodes, calls))
            number += 1
            ms = self.ms(nodes, calls) + self.behind_ms * (was_plain and nodes > 1)
            self.now += 1e-3 * ms * (10 if slow and number % slow == 0 else 1)
            was_plain = nodes == 1
            tree = TokenTree.chain(list(range(nodes)))
            path, length = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
            actor.observe(Draft(tree, None, nodes - 1, calls), Acceptance(path, length, torch.tensor([1])))
        return actor.times()

    @staticmethod
    def calls(growth: Growth | None, nodes: int) -> int:
        if nodes == 1 or growth is None:
            return 0
        return growth.depth if isinstance(growth, Limited) else len(growth.plan(nodes).layers)


def layered_ms(nodes: int, calls: int) -> float:
    return 10.0 if nodes == 1 else 12.0 + 0.25 * nodes + 2.0 * calls


@pytest.mark.parametrize("on_device", [False, True])
def test_what_steps_take_is_found_and_what_disturbs_them_is_not(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(monkeypatch, layered_ms, behind_ms=5.0)
    found = stage.play(LAYERED, on_device=on_device, slow=11)
    for nodes, depth in ((2, 1), (4, 2), (10, 3), (16, 8), (40, 1), (64, 8)):
        assert found(np.array(nodes), np.array(depth)) == pytest.approx(layered_ms(nodes, depth))
    assert found(np.array(1), np.array(0)) == pytest.approx(10.0)
    assert found.behind_ms == pytest.approx(0.0 if on_device else 5.0)


def test_the_prompt_of_a_text_is_no_part_of_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Stage(monkeypatch, layered_ms, behind_ms=5.0).play(LAYERED, text=9)
    assert found(np.array(16), np.array(4)) == pytest.approx(layered_ms(16, 4))
    assert found(np.array(1), np.array(0)) == pytest.approx(10.0)


def test_trees_that_differ_in_nodes_and_calls_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = [(ms, nodes, calls) for nodes, calls in ((4, 2), (10, 2), (16, 4), (64, 4)) for ms in [1.5 * calls + nodes]]
    assert rehearsal._call_ms(trees) == pytest.approx(1.5)
    cheap = [(10.0, 4, 2), (22.0, 16, 2), (25.0, 16, 4), (26.0, 64, 8)]
    assert rehearsal._call_ms(cheap) == pytest.approx(1.5), "of equal nodes"
    assert rehearsal._call_ms(trees[:2]) == 0, "nothing says what a call takes"
    assert rehearsal._call_ms([(9.0, 4, 2), (8.0, 4, 4)]) == 0, "never less than nothing"


def test_retrieved_trees_cost_by_their_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Stage(monkeypatch, lambda nodes, calls: 9.0 + nodes).play(Sizes(None, flat_choices(64)), has_model=False)
    assert found(np.array([1, 2, 4, 40, 64]), np.array([0, 1, 3, 39, 63])).tolist() == pytest.approx(
        [10, 11, 13, 49, 73]
    )


def test_a_fixed_shape_is_timed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, layered_ms)
    found = stage.play(Sizes.of(Chain(3).bind(Sampling()), has_model=True, is_coarse=False))
    assert set(stage.steps) == {(4, 3), (1, 0)}
    assert found(np.array([1, 4]), np.array([0, 3])).tolist() == pytest.approx([10.0, 19.0])


def test_no_tree_is_faster_than_plain_decoding_and_no_larger_one_than_a_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Stage(monkeypatch, lambda nodes, calls: 10.0 if nodes != 16 else 5.0).play(LAYERED)
    table = found(np.arange(1, 65)[:, None], np.arange(9))
    assert (table > 9.99).all() and (np.diff(table, axis=0) >= 0).all() and (np.diff(table, axis=1) >= 0).all()


def slowed(factor: float, nodes: int, calls: int) -> float:
    return factor * layered_ms(nodes, calls)


def test_a_slow_machine_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for factor in (0.1, 100.0):
        stage = Stage(monkeypatch, partial(slowed, factor))
        found = stage.play(LAYERED)
        assert found(np.array(16), np.array(4)) == pytest.approx(factor * layered_ms(16, 4))
        counts.append(len(stage.steps))
    assert counts == [100, 10]


def test_each_round_goes_on_from_another_place_the_larger_trees_first_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, partial(slowed, 0.1))
    stage.play(LAYERED)
    assert stage.shares == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
    trees = [(4, 2), (16, 2), (16, 4), (64, 4), (64, 8)]
    for number, begin in enumerate(range(0, 100, 10)):
        order = trees[::-1] if number % 2 else trees
        assert stage.steps[begin : begin + 10] == [(4, 2), *order, (1, 0), (1, 0), (1, 0), (4, 2)]


def test_calls_that_few_nodes_share_say_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Stage(monkeypatch, lambda nodes, calls: layered_ms(nodes, min(calls, 4))).play(LAYERED)
    assert found(np.array(64), np.array(4)) == pytest.approx(layered_ms(64, 4))


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_trees_of_any_depth_are_timed_up_to_the_largest(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes.of(Calibrated(depth=depth).bind(Sampling()), has_model=True, is_coarse=False)
    found = Stage(monkeypatch, layered_ms).play(sizes)
    for nodes in (4, 16, 64):
        if depth > 1:  # else nothing says what a call takes, and none differ
            assert found(np.array(nodes), np.array(depth)) == pytest.approx(layered_ms(nodes, depth))
    assert found(np.array(64), np.array(1)) > found(np.array(16), np.array(1))


def test_a_step_that_was_launched_ahead_of_a_round_s_end_is_nobody_s() -> None:
    actor = rehearsal._Rehearsal(LAYERED, has_model=True, on_device=True)
    root = TokenTree.chain([3])
    outcome = Acceptance(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), torch.tensor([1]))
    actor.begin()
    while not actor.is_paused:
        _, nodes = actor.next()
        tree = TokenTree.chain(list(range(nodes)))
        actor.observe(Draft(tree, None, nodes - 1, nodes - 1), outcome)
    left, steps = actor.num_left, {size: len(found) for size, found in actor._steps.items()}
    assert actor.next() == (LAYERED.growth, 1)
    actor.observe(Draft(root, None, 0, 0), outcome)
    assert actor.num_left == left and {size: len(found) for size, found in actor._steps.items()} == steps


def test_a_piece_of_a_prompt_ends_within_it() -> None:
    text = list(range(20, 120))
    assert rehearsal._cut(text, 1.0, None) == text[-12:] and rehearsal._cut(text, 0.5, None) == text[38:50]
    assert rehearsal._cut(text, 0.5, 80) == text[40:50], "an eighth of the longest text"
    assert rehearsal._cut(text, 0.1, 4) == text[9:10] and rehearsal._cut([19], 0.1, None) == [19]
    assert rehearsal._cut(text[:5], 0.5, None) == text[:2]


def measured(
    target: stree.TreeLM,
    drafter: Any,
    sizes: Sizes,
    *,
    batch: int = 1,
    sampling: Sampling | None = None,
    verifier: str = "auto",
) -> StepTimes:
    return step_times(
        target, drafter, sizes, batch, PROMPTS[0], sampling=sampling or Sampling(), verifier=verifier, engine=None,
        processor=None,
    )  # fmt: skip


def test_it_is_measured_once_for_what_makes_up_a_step() -> None:
    target, draft = grafted(tiny_model("bamba")), grafted(tiny_model("mamba2", seed=1))
    flat = Sizes(None, flat_choices(64))
    first = measured(target, ModelDrafter(draft), LAYERED)
    assert measured(target, ModelDrafter(draft), LAYERED) is first
    hot, warm = Sampling(1.0), Sampling(0.7)
    sampled = measured(target, ModelDrafter(draft), LAYERED, sampling=hot)
    assert measured(target, ModelDrafter(draft), LAYERED, sampling=warm) is sampled
    other = Sizes.of(DySpec(depth=8).bind(Sampling()), has_model=True, is_coarse=False)
    found = [
        first,
        sampled,
        measured(target, ModelDrafter(draft), LAYERED, batch=2),
        measured(target, SuffixDrafter(), flat),
        measured(target, ModelDrafter(draft), other),
        measured(target, ModelDrafter(target), LAYERED),
        measured(draft, ModelDrafter(target), LAYERED),
        measured(target, ModelDrafter(draft), LAYERED, sampling=Sampling(1.0, top_p=0.9)),
    ]
    assert len(set(map(id, found))) == len(found) and GUESS not in found


def test_whatever_else_makes_up_a_step_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_run", lambda *_: None)
    monkeypatch.setattr(rehearsal._Rehearsal, "times", lambda _: replace(GUESS))
    target, draft = grafted(tiny_model("bamba")), ModelDrafter(grafted(tiny_model("mamba2", seed=1)))
    found = [
        measured(target, draft, LAYERED),
        measured(target, draft, LAYERED, verifier="match"),
        measured(target, draft, replace(LAYERED, choices=LAYERED.choices[:-1])),
        measured(target, FusedDrafter(draft, SuffixDrafter()), LAYERED),
    ]
    assert measured(target, draft, LAYERED) is found[0]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    found.append(measured(target, draft, LAYERED))
    assert len(set(map(id, found))) == len(found)


def test_it_goes_on_from_the_caller_s_first_prompt_that_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    openings: list[Any] = []

    def heard(lm: Any, drafter: Any, actor: Any, given: Any, *_: Any) -> None:
        openings.append(given)
        raise RuntimeError("heard")

    monkeypatch.setattr(rehearsal, "_run", heard)
    target, draft = grafted(tiny_model("bamba")), ModelDrafter(grafted(tiny_model("mamba2", seed=1)))
    text = [token % 40 for token in range(100)]
    expected = stree.generate(target, [text, [5]], budget=1, max_new_tokens=3).sequences
    assert stree.generate(target, [text, [5]], draft, max_new_tokens=3).sequences == expected, "no prompt was lost"
    assert openings.pop() == text
    prompts = iter([[10**6], text])
    with pytest.raises(ValueError, match="no prompt can be run"):
        stree.generate(target, iter([[10**6]]), draft, max_new_tokens=3, max_batch=1, max_length=120)
    assert openings.pop() == [0]
    found = stree.generate(target, prompts, draft, max_new_tokens=3, max_batch=1, max_length=120)
    assert found.sequences == [[10**6], expected[0]] and openings.pop() == [0]


def test_what_steps_brought_is_kept_where_a_model_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "LONGEST_S", 1e9)  # a loaded machine would end it before all rounds
    target, draft = grafted(tiny_model("bamba")), grafted(tiny_model("mamba2", seed=1))
    assert measured(target, SuffixDrafter(), Sizes(None, flat_choices(64))).experience is None
    for drafter, low, high in ((draft, 0.0, 0.5), (target, 0.9, 1.0)):
        experience = measured(target, ModelDrafter(drafter), LAYERED).experience
        assert experience is not None
        number = LAYERED.choices.index(Choice(4, 2))
        assert experience.seen[number] > 6, "every larger tree tells of it"
        kept = (experience.emitted[number] / experience.seen[number] - 1) / 2
        assert low <= kept <= high, "its own drafts are the target's tokens, a stranger's hardly ever"


def test_it_is_kept_as_long_as_the_target() -> None:
    target, draft = grafted(tiny_model("bamba")), grafted(tiny_model("mamba2", seed=1))
    stree.generate(target, PROMPTS, ModelDrafter(draft), max_new_tokens=4)
    assert target in rehearsal._known
    kept = weakref.ref(target)
    del target, draft
    gc.collect()
    assert kept() is None, "what is known of a target does not keep it"


def test_random_numbers_are_left_alone() -> None:
    target, draft = grafted(tiny_model("bamba")), grafted(tiny_model("mamba2", seed=1))
    state = torch.get_rng_state()
    options: dict[str, Any] = {"sampling": Sampling(1.0), "verifier": "match", "max_new_tokens": 12, "seed": 3}
    found = stree.generate(target, PROMPTS, ModelDrafter(draft), **options)
    assert torch.equal(torch.get_rng_state(), state)
    assert found.sequences == stree.generate(target, PROMPTS, budget=1, **options).sequences


def test_a_processor_is_asked_about_the_caller_s_texts_only() -> None:
    texts: list[list[int]] = []

    def processor(text: Tensor, logits: Tensor) -> Tensor:
        texts.append(text[0].tolist())
        return logits

    target, draft = grafted(tiny_model("bamba")), grafted(tiny_model("mamba2", seed=1))
    options: dict[str, Any] = {"max_new_tokens": 8, "logits_processor": processor}
    found = stree.generate(target, PROMPTS[:1], ModelDrafter(draft), **options)
    assert all(text[:10] == PROMPTS[0] for text in texts) and texts
    assert found.sequences == stree.generate(target, PROMPTS[:1], budget=1, **options).sequences


def test_what_cannot_be_measured_is_guessed_and_the_text_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = grafted(tiny_model("bamba")), grafted(tiny_model("mamba2", seed=1))
    expected = stree.generate(target, PROMPTS, budget=1, max_new_tokens=12).sequences

    def fails(*_: Any) -> None:
        raise RuntimeError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(rehearsal, "_run", fails)
        assert measured(target, ModelDrafter(draft), LAYERED) is GUESS
        assert stree.generate(target, PROMPTS, ModelDrafter(draft), max_new_tokens=12).sequences == expected
    assert measured(target, ModelDrafter(draft), LAYERED) is not GUESS, "it is measured when it can be"


def test_ctrl_c_while_measuring_is_an_interrupted_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rehearsal, "_run", stops)
    with pytest.raises(stree.GenerationInterrupted) as caught:
        stree.generate(grafted(tiny_model("bamba")), PROMPTS)
    assert caught.value.output.sequences == []


def test_a_text_of_few_tokens_leaves_room_for_some_steps_at_a_time() -> None:
    target, draft = grafted(tiny_model("llama", max_position_embeddings=24)), grafted(tiny_model("mamba2", seed=1))
    assert target.max_length == 24
    assert measured(target, ModelDrafter(draft), LAYERED) is not GUESS


def test_plain_decoding_and_a_fixed_budget_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stree.generation.step_times", lambda *_, **__: pytest.fail("it was measured"))
    target = grafted(tiny_model("bamba"))
    stree.generate(target, PROMPTS, stree.drafters.NoDrafter(), max_new_tokens=4)
    stree.generate(target, PROMPTS, budget=8, max_new_tokens=4)


def test_sizes_that_are_timed_are_sizes_that_are_chosen() -> None:
    layered = [
        Sizes.of(Calibrated(depth=depth).bind(Sampling()), has_model=True, is_coarse=is_coarse)
        for depth in range(1, 10)
        for is_coarse in (False, True)
    ]
    for sizes in (*layered, Sizes(None, flat_choices(64))):
        timed = rehearsal._timed_choices(sizes)
        assert timed[-1] == PLAIN and set(timed) <= set(sizes.choices) and len(timed) >= 4
    shallow = Sizes.of(Calibrated(depth=1).bind(Sampling()), has_model=True, is_coarse=False)
    assert rehearsal._timed_choices(shallow) == [Choice(4, 1), Choice(16, 1), Choice(64, 1), PLAIN]


def test_what_was_measured_with_a_draft_model_that_is_gone_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "ROUNDS", 1)
    target = grafted(tiny_model("bamba"))
    for seed in (1, 2, 3):
        measured(target, ModelDrafter(grafted(tiny_model("mamba2", seed=seed))), LAYERED)
        gc.collect()
    assert len(rehearsal._known[target]) == 1
