"""Steps that are captured once and replayed give what steps launched one by one give, in every way to draft.

A tape takes the place of CUDA graphs: host code does not run again, nothing may be read, moved or freed.

Run: python -m pytest tests/test_graphs.py
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_family_models import FAMILIES, family_model
from helpers.tiny_models import grafted, random_texts, tiny_model
from tape import Tape, TapeError, TapeRecorder
from test_waits import GROWTHS
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

import stree
from stree import engine, rehearsal, room
from stree.drafters import Draft, Drafter, FusedDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.engine import Engine, layout_of
from stree.generation import _choices, _shape
from stree.graphs import WARM_UP, Graphs
from stree.growth import Calibrated, Chain, Growth, Limited
from stree.kernels import topology
from stree.models.trimmed import TrimmedLM
from stree.program import Program
from stree.rehearsal import GUESS
from stree.sampling import Random, Sampling
from stree.session import Session
from stree.statistics import PARTS
from stree.steering import AutoSize
from stree.tree import TokenTree
from stree.verify import DELTA

TEXTS = random_texts(random.Random(0), [6, 9])
NEW = 20


@pytest.fixture(scope="module")
def drafter() -> ModelDrafter:
    """A draft model near the target, so that what it drafts is accepted often, and not always."""
    model = copy.deepcopy(tiny_model("bamba"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return ModelDrafter(stree.TreeLM(model))


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], stree.TreeLM]]:
    """Give what makes a target whose steps are captured, in the code that a device would run."""

    def begin() -> stree.TreeLM:
        monkeypatch.setattr(topology, "waits_always", True)
        monkeypatch.setattr(engine, "_can_capture", lambda lm: "engine" in lm.kept)
        lm = grafted(tiny_model("bamba"))
        lm.kept["engine"] = Engine(TapeRecorder())
        return lm

    yield begin


def generate(
    lm: stree.TreeLM, drafter: Drafter | None, seed: int = 0, texts: Any = TEXTS, **options: Any
) -> stree.Generation:
    return stree.generate(lm, texts, drafter, max_new_tokens=options.pop("max_new_tokens", NEW), seed=seed, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", GROWTHS)
def test_replayed_steps_give_the_texts_of_launched_ones(
    name: str, temperature: float, drafter: ModelDrafter, capture: Callable[[], stree.TreeLM]
) -> None:
    growth: Growth | None = GROWTHS[name]
    options: dict[str, Any] = {"growth": growth, "budget": 1 if growth is None else 12}
    drafts = NoDrafter() if growth is None else drafter
    sampling = Sampling(temperature)
    eager = [generate(grafted(tiny_model("bamba")), drafts, seed, sampling=sampling, **options) for seed in (0, 1)]
    lm = capture()
    for number, seed in enumerate((0, 1)):
        found = generate(lm, drafts, seed, sampling=sampling, **options)
        assert found.sequences == eager[seed].sequences
        assert found.stats["tau"] == eager[seed].stats["tau"]
        assert found.stats["draft_calls"] >= eager[seed].stats["draft_calls"]  # the CPU may stop where nothing is left
        assert found.stats["graphs"]["graphs"] == 1 and not found.stats["graphs"]["not_captured"]
        launched = found.stats["steps"] - found.stats["graphs"]["replays"]
        assert WARM_UP <= launched <= WARM_UP + 1 if number == 0 else launched == 0, "the first one's graph serves all"
    assert len(lm.kept["engine"].recorder.tapes) == 1


def test_a_path_that_waits_when_a_text_ends_is_not_folded_into_the_next(
    drafter: ModelDrafter, capture: Callable[[], stree.TreeLM]
) -> None:
    expected = [generate(grafted(tiny_model("bamba")), drafter, texts=[text], budget=4).sequences for text in TEXTS]
    lm = capture()
    lm.defers_commit = True
    for text, found in zip(TEXTS, expected, strict=True):
        assert generate(lm, drafter, texts=[text], budget=4).sequences == found


def test_a_shorter_text_ends_where_it_must(drafter: ModelDrafter, capture: Callable[[], stree.TreeLM]) -> None:
    lm = capture()
    options: dict[str, Any] = {"growth": Chain(3), "budget": 4}
    for new in (20, 7, 13):
        expected = generate(grafted(tiny_model("bamba")), drafter, max_new_tokens=new, **options)
        found = generate(lm, drafter, max_new_tokens=new, **options)
        assert found.sequences == expected.sequences and found.stats["num_new_tokens"] == [new] * 2
    assert found.stats["tau"] > 1.3 and found.stats["graphs"]["replays"] == found.stats["steps"]


def test_nothing_is_left_of_a_larger_tree_that_was_brought(
    capture: Callable[[], stree.TreeLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, seen, lm = Program._launch_target, set(), capture()

    def watched(self: Program, graphs: Graphs, draft: Draft, clock: Any) -> Any:
        done = launch(self, graphs, draft, clock)
        n = draft.tree.tokens.shape[1]
        size, tree = min((size, tree) for size, tree in self._trees.items() if size >= n)
        assert tree.tokens[:, n:].eq(0).all() and tree.parents[:, n:].eq(-1).all()
        assert tree.tokens[:, :n].equal(draft.tree.tokens) and tree.parents[:, :n].equal(draft.tree.parents)
        seen.add((n, size))
        return done

    monkeypatch.setattr(Program, "_launch_target", watched)
    sizes = iter([7, 3, 12, 5, 6, 8, 20, 30, 3, 9] * 9)
    monkeypatch.setattr(AutoSize, "next", lambda self: (None, next(sizes)))
    monkeypatch.setattr(AutoSize, "observe", lambda *_: None)
    monkeypatch.setattr("stree.generation.step_times", lambda *_, **__: GUESS)
    generate(lm, SuffixDrafter(), texts=[[5, 6, 7, 8, 9] * 4, [3, 4] * 5], max_new_tokens=40, budget="auto")
    assert len({n for n, size in seen if 1 < n < size}) > 2, "some trees were smaller than their bucket"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_that_the_host_lays_out_are_brought_to_captured_verifications(
    temperature: float, capture: Callable[[], stree.TreeLM]
) -> None:
    text = [[5, 6, 7, 8, 9] * 4, [3, 4] * 5]
    sampling = Sampling(temperature)
    eager = generate(grafted(tiny_model("bamba")), SuffixDrafter(), texts=text, sampling=sampling, budget=13)
    found = generate(capture(), SuffixDrafter(), texts=text, sampling=sampling, budget=13)
    assert found.sequences == eager.sequences and found.stats["tau"] == eager.stats["tau"]
    assert found.stats["graphs"]["replays"] > 4 and found.stats["nodes_per_step"] == eager.stats["nodes_per_step"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_s_verification_can_be_captured(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, text = stree.TreeLM(family_model(family)), [[5, 6, 7, 8] * 4]
    expected = generate(lm, SuffixDrafter(), texts=text, budget=4, max_new_tokens=8).sequences
    monkeypatch.setattr(topology, "waits_always", True)
    monkeypatch.setattr(engine, "_can_capture", lambda _: True)
    lm.kept["engine"] = Engine(TapeRecorder())
    for _ in range(2):
        found = generate(lm, SuffixDrafter(), texts=text, budget=4, max_new_tokens=8)
        assert found.sequences == expected and not found.stats["graphs"]["not_captured"]
    assert found.stats["graphs"]["replays"] > 0


@pytest.mark.parametrize("is_model_first", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_of_a_fused_step_what_the_model_drafts_and_what_the_target_does_are_replayed(
    temperature: float, is_model_first: bool, drafter: ModelDrafter, capture: Callable[[], stree.TreeLM]
) -> None:
    parts: list[Drafter] = [drafter, SuffixDrafter()]
    fused = FusedDrafter(*(parts if is_model_first else parts[::-1]))
    texts = [[[5, 6, 7, 8, 9] * 4, [3, 4, 5, 3, 4]], [[9, 9, 2, 1, 9, 9, 2], [4, 8, 1]]]
    options: dict[str, Any] = {"sampling": Sampling(temperature), "growth": Calibrated(3), "max_new_tokens": 40}
    eager = [generate(grafted(tiny_model("bamba")), fused, texts=text, budget=16, **options) for text in texts]
    lm = capture()
    for expected, text in zip(eager * 2, texts * 2, strict=True):
        found = generate(lm, fused, texts=text, budget=16, **options)
        assert found.sequences == expected.sequences and not found.stats["graphs"]["not_captured"]
        assert found.stats["draft_calls"] >= expected.stats["draft_calls"]
    # By the last time both have graphs, but for what the host tells the model of what was retrieved.
    least = found.stats["steps"] * (2 if is_model_first else 1)
    assert least - 6 <= found.stats["graphs"]["replays"] <= least


@pytest.fixture
def take_turns(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[tuple[int, int]], float], None]:
    """Give what lets steps under "auto" have the sizes of a list, budgets and depths, by turns."""

    def begin(sizes: list[tuple[int, int]], temperature: float) -> None:
        class Turns(AutoSize):
            def next(self) -> tuple[Growth | None, int]:
                self.number = getattr(self, "number", -1) + 1
                budget, depth = sizes[self.number % len(sizes)]
                return Limited(Calibrated(3).bind(Sampling(temperature)), depth), budget

            def observe(self, draft: Draft, acceptance: Any) -> None:
                """Learn nothing."""

        monkeypatch.setattr("stree.generation.AutoSize", Turns)
        monkeypatch.setattr("stree.generation.step_times", lambda *_, **__: GUESS)

    return begin


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_fused_run_changes_between_graphs_and_takes_up_texts(
    temperature: float, drafter: ModelDrafter, capture: Callable[[], stree.TreeLM], take_turns: Any
) -> None:
    take_turns([(budget, depth) for budget in (4, 12, 1, 6) for depth in (2, 3)], temperature)
    fused = FusedDrafter(drafter, SuffixDrafter())
    texts = random_texts(random.Random(3), [4, 7, 5, 6, 3])
    options: dict[str, Any] = {"texts": texts, "max_batch": 2, "budget": "auto", "growth": Calibrated(3)}
    options |= {"sampling": Sampling(temperature), "max_new_tokens": 60}
    eager = generate(grafted(tiny_model("bamba")), fused, **options)
    lm = capture()
    for _ in range(2):
        found = generate(lm, fused, **options)
        assert found.sequences == eager.sequences and not found.stats["graphs"]["not_captured"]
    assert found.stats["graphs"]["replays"] > found.stats["steps"]
    ((program, _),) = lm.kept["engine"]._programs.values()
    assert (len(program._law_rows) > 1) == (temperature > 0)
    assert [*program._law_rooms] == [torch.float32] * (temperature > 0), "one room for the laws of all sizes"


def test_captured_steps_follow_their_laws_into_a_larger_room(
    drafter: ModelDrafter, capture: Callable[[], stree.TreeLM], take_turns: Any
) -> None:
    take_turns([(4, 2)] * 6 + [(16, 3)] * 2, 0.8)  # the small ones are captured when a large one comes
    fused = FusedDrafter(drafter, SuffixDrafter())
    options: dict[str, Any] = {"sampling": Sampling(0.8), "growth": Calibrated(3), "max_new_tokens": 60}
    expected = generate(grafted(tiny_model("bamba")), fused, budget="auto", **options)
    lm = capture()
    found = generate(lm, fused, budget="auto", **options)
    assert found.sequences == expected.sequences and found.stats["steps"] > 16


def test_nothing_is_left_of_the_laws_of_a_larger_tree(
    drafter: ModelDrafter, capture: Callable[[], stree.TreeLM], take_turns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_turns([(8, 3), (6, 2), (7, 2)], 0.8)
    bring, seen = Program._brought, set()

    def watched(self: Program, graphs: Graphs, laws: Any, size: int) -> Any:
        brought, n = bring(self, graphs, laws, size), laws.row.shape[1]
        assert brought.row[:, n:].eq(0).all() and brought.kind[:, n:].eq(DELTA).all()
        assert brought.row[:, :n].equal(laws.row) and brought.kind[:, :n].equal(laws.kind)
        seen.add((n, size))
        return brought

    monkeypatch.setattr(Program, "_brought", watched)
    generate(
        capture(), FusedDrafter(drafter, SuffixDrafter()), budget="auto", sampling=Sampling(0.8), growth=Calibrated(3)
    )  # fmt: skip
    assert {size for _, size in seen} == {8} and len(seen) == 3


def test_where_draws_must_match_the_target_s_no_laws_are_brought(
    drafter: ModelDrafter, capture: Callable[[], stree.TreeLM]
) -> None:
    fused = FusedDrafter(drafter, SuffixDrafter())
    options: dict[str, Any] = {"sampling": Sampling(0.8), "growth": Calibrated(3), "budget": 12, "verifier": "match"}
    expected = generate(grafted(tiny_model("bamba")), fused, **options)
    lm = capture()
    assert generate(lm, fused, **options).sequences == expected.sequences
    ((program, _),) = lm.kept["engine"]._programs.values()
    assert not program._law_rooms and program.graphs is not None and program.graphs.num_replays > 0


def test_what_a_fused_run_s_model_drafts_is_captured_anew_when_its_state_is_replaced(
    drafter: ModelDrafter, capture: Callable[[], stree.TreeLM]
) -> None:
    fused, options = FusedDrafter(drafter, SuffixDrafter()), dict[str, Any](budget=8, growth=Calibrated(3))
    expected = generate(grafted(tiny_model("bamba")), fused, **options).sequences
    lm = capture()
    assert generate(lm, fused, **options).sequences == expected
    ((program, _),) = lm.kept["engine"]._programs.values()
    drafting: Any = program.run
    drafting = drafting._runs[0]
    drafting._resize(2 * drafting._state.max_length, drafting._state.max_nodes)
    found = generate(lm, fused, **options)
    assert found.sequences == expected
    assert found.stats["graphs"]["replays"] < 2 * found.stats["steps"] - 2, "both begin anew"


class Bigrams:
    """Drafts what last followed the pending token, from a table on the device; its runs cannot begin anew."""

    def __init__(self) -> None:
        self.begun: list[list[int]] = []  # positions that runs began at

    def start(self, vocab_size: int, prompts: Any, rng: Random) -> Any:
        self.begun.append(rng.positions.tolist())
        return BigramRun(len(prompts), vocab_size)


class BigramRun:
    version = 0

    def __init__(self, batch: int, vocab_size: int) -> None:
        self.following = torch.zeros(batch, vocab_size, dtype=torch.long)
        self.made: Any = None

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        tokens = torch.cat([pending[:, None], self.following.gather(1, pending[:, None])], 1)
        parents = torch.zeros_like(tokens, dtype=torch.int32)
        parents[:, 0] = -1
        self.made = tokens[:, :1]
        return Draft(TokenTree.unchecked(tokens, parents), None, 1, values=torch.ones_like(tokens, dtype=torch.float32))

    def observe(self, acceptance: Any) -> None:
        self.following.scatter_(1, self.made, acceptance.next_token[:, None])

    def settle(self, budget: int) -> int:
        return 0

    def extend(self, tree: TokenTree) -> None:
        """Its node stays the first one."""

    def replayed(self, budget: int) -> None:
        """Keep nothing on the host."""

    def give_up(self) -> None:
        """Keep nothing on the host."""


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_run_that_cannot_begin_anew_takes_no_graph_of_another(
    is_fused: bool, capture: Callable[[], stree.TreeLM]
) -> None:
    drafts = Bigrams()
    drafter: Any = FusedDrafter(drafts, SuffixDrafter()) if is_fused else drafts
    lm = capture()
    for texts in (TEXTS, [text[::-1] for text in TEXTS]):
        expected = generate(grafted(tiny_model("bamba")), None, texts=texts, budget=1)
        found = generate(lm, drafter, texts=texts, budget=4)
        assert found.sequences == expected.sequences and found.stats["graphs"]["replays"] > 0


def test_of_a_fused_drafter_s_next_texts_runs_begin_at_their_own_ends(capture: Callable[[], stree.TreeLM]) -> None:
    drafts, lm = Bigrams(), capture()
    fused: Any = FusedDrafter(drafts, SuffixDrafter())
    for texts in (TEXTS, [[4, 8, 1], [7, 2]]):
        generate(lm, fused, texts=texts, budget=4, max_new_tokens=4)
    assert drafts.begun == [[6, 9], [3, 2]]


def test_slots_take_up_texts_between_replays(drafter: ModelDrafter, capture: Callable[[], stree.TreeLM]) -> None:
    texts = random_texts(random.Random(3), [4, 7, 5, 6, 3])
    options: dict[str, Any] = {"growth": Calibrated(depth=3), "budget": 8, "max_batch": 2, "sampling": Sampling(0.8)}
    eager = generate(grafted(tiny_model("bamba")), drafter, texts=texts, **options)
    lm = capture()
    for _ in range(2):  # the second time in rows that have held other texts
        found = generate(lm, drafter, texts=texts, **options)
        assert found.sequences == eager.sequences and found.stats["graphs"]["replays"] > 10


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_controller_changes_between_graphs(
    temperature: float, drafter: ModelDrafter, capture: Callable[[], stree.TreeLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [(1, 3), (1, 3), *[(8, 2)] * 4, *[(1, 3)] * 3, *[(64, 5)] * 4, *[(8, 2)] * 4, (1, 3), (64, 5), (1, 3)]

    def of_a_list(self: AutoSize) -> tuple[Growth | None, int]:
        steps = self.__dict__.setdefault("steps", [])
        steps.append(shapes[len(steps) % len(shapes)])
        assert self.growth is not None
        return Limited(self.growth, steps[-1][1]), steps[-1][0]

    monkeypatch.setattr(AutoSize, "next", of_a_list)
    monkeypatch.setattr(AutoSize, "observe", lambda *_: None)
    monkeypatch.setattr("stree.generation.step_times", lambda *_, **__: GUESS)
    options: dict[str, Any] = {"sampling": Sampling(temperature), "verifier": "match", "max_new_tokens": 40}
    expected = generate(grafted(tiny_model("bamba")), NoDrafter(), budget=1, **options).sequences
    eager = generate(grafted(tiny_model("bamba")), drafter, growth=Calibrated(depth=2), budget="auto", **options)
    lm = capture()
    for _ in range(2):
        found = generate(lm, drafter, growth=Calibrated(depth=2), budget="auto", **options)
        assert found.sequences == expected == eager.sequences
        assert found.stats["steps"] == eager.stats["steps"], "drafts as good as the eager ones"
        assert found.stats["draft_calls"] == eager.stats["draft_calls"], "those that catch up are counted"
    assert found.stats["graphs"]["graphs"] == 3 and found.stats["graphs"]["replays"] > 8


@pytest.mark.parametrize("part", ["settle", "propose", "observe"])
def test_a_drafter_that_dies_leaves_no_graph_behind(
    part: str, drafter: ModelDrafter, capture: Callable[[], stree.TreeLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(grafted(tiny_model("bamba")), NoDrafter(), budget=1).sequences
    lm, calls = capture(), []
    run = type(drafter.start(lm.vocab_size, TEXTS, Random(0, torch.arange(2), torch.zeros(2, dtype=torch.long))))
    known = getattr(run, part)

    def dying(self: Any, *operands: Any) -> Any:
        calls.append(part)
        if len(calls) == WARM_UP + (3 if part == "settle" else 0):
            raise ArithmeticError("the drafter broke")
        return known(self, *operands)

    monkeypatch.setattr(run, part, dying)
    # Of one version with what takes its place, so that nothing else would drop its graphs.
    monkeypatch.setattr(run, "version", property(lambda _: 0, lambda *_: None), raising=False)
    with pytest.raises(stree.GenerationError, match="decoded without it: the drafter broke") as error:
        generate(lm, drafter, budget=4)
    assert error.value.output.sequences == expected and not lm.kept["engine"].report()
    assert error.value.output.stats["draft_calls"] < 20, "none after that"


def test_memory_that_runs_out_frees_what_is_kept(
    drafter: ModelDrafter, capture: Callable[[], stree.TreeLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = capture()
    generate(lm, drafter, budget=4)
    assert len(lm.kept["engine"].report()) == 1
    with monkeypatch.context() as patch:
        patch.setattr(lm, "verify", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("tried 2 GiB")))
        with pytest.raises(stree.GenerationError, match="tried 2 GiB.*lower max_batch"):
            generate(lm, drafter, budget=8)
    assert not lm.kept["engine"].report()
    whole = generate(grafted(tiny_model("bamba")), drafter, budget=8).sequences
    assert generate(lm, drafter, budget=8).sequences == whole
    assert TrimmedLM(lm, range(lm.vocab_size)).kept is not lm.kept, "another head, another program"


def test_texts_of_another_length_or_law_get_a_program_of_their_own(
    drafter: ModelDrafter, capture: Callable[[], stree.TreeLM]
) -> None:
    plain = generate(grafted(tiny_model("bamba")), drafter, budget=1, max_new_tokens=8).sequences
    other: list[dict[str, Any]] = [
        {"budget": 1}, {"budget": 1, "sampling": Sampling(0.8)}, {}, {"texts": TEXTS[:1]},
        {"sampling": Sampling(0.5)}, {"sampling": Sampling(0.5), "verifier": "match"}, {"growth": Chain(2)}, {},
        {"stop_token_ids": [plain[0][-3]]}, {"budget": 16}, {"max_length": 400},
    ]  # fmt: skip
    kinds = [{"budget": 4, "max_new_tokens": 8, **kind} for kind in other]
    eager = [generate(grafted(tiny_model("bamba")), drafter, **kind).sequences for kind in kinds]
    lm = capture()
    assert [generate(lm, drafter, **kind).sequences for kind in kinds] == eager
    assert len(lm.kept["engine"].report()) == engine.MOST_PROGRAMS < len(kinds)
    latest = generate(lm, drafter, **kinds[-1])
    assert latest.sequences == eager[-1] and latest.stats["graphs"]["replays"] == latest.stats["steps"], "it is kept"


@dataclass(frozen=True)
class Reading(Chain):
    """A chain whose shape asks the device, which no graph can hold."""

    def estimate(self, batch: int, device: torch.device) -> Any:
        known = super().estimate(batch, device)

        class Asking(type(known)):  # type: ignore[misc]
            def goes_on(self, values: Tensor) -> None:
                torch.tensor(3)

        known.__class__ = Asking
        return known


@pytest.mark.parametrize("drafts", ["model", "suffix"])
def test_warming_up_captures_before_the_first_text(
    drafts: str, drafter: ModelDrafter, capture: Callable[[], stree.TreeLM]
) -> None:
    options: dict[str, Any] = {"sampling": Sampling(0.8), "stop_token_ids": [1]}
    chosen: Drafter | None = drafter if drafts == "model" else None
    eager = generate(grafted(tiny_model("bamba")), chosen, budget=4, **options).sequences
    lm = capture()
    reports = stree.warm_up(
        lm, chosen, max_length=120, budgets=(1, 4), batch_sizes=(1, 2), shows_progress=False, **options
    )
    assert len(reports) == 4 and all(report["graphs"] for report in reports)
    found = generate(lm, chosen, budget=4, max_length=120, **options)
    assert found.sequences == eager
    assert drafts != "model" or found.stats["graphs"]["replays"] == found.stats["steps"]
    with pytest.raises(ValueError, match="max_length must be above 25 to capture steps of 4 nodes, got 25"):
        stree.warm_up(lm, drafter, max_length=25, budgets=(4,))
    with pytest.raises(ValueError, match="steps are captured on a single CUDA device"):
        stree.warm_up(grafted(tiny_model("bamba")), drafter, max_length=20)


def test_what_steps_take_is_measured_on_texts_that_share_their_graphs(
    drafter: ModelDrafter, capture: Callable[[], stree.TreeLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, captured, begin = capture(), [], rehearsal._Rehearsal.begin
    recorder, replay, replays = lm.kept["engine"].recorder, Tape.replay, [0]

    def begun(self: rehearsal._Rehearsal) -> float:
        captured.append((len(recorder.tapes), replays[-1]))
        return begin(self)

    def replayed(self: Tape) -> None:
        replays.append(replays[-1] + 1)
        replay(self)

    monkeypatch.setattr(Tape, "replay", replayed)

    monkeypatch.setattr(rehearsal._Rehearsal, "begin", begun)
    monkeypatch.setattr(rehearsal, "LONGEST_S", 1e9)
    generate(lm, drafter, budget="auto", max_new_tokens=2, growth=Calibrated(depth=2), max_length=300)
    assert len(lm.kept["engine"].report()) == 1, "the program that was measured is not kept"
    tapes, counts = zip(*captured, strict=True)
    assert len(captured) == rehearsal.ROUNDS and tapes[0] == 0
    assert set(tapes[1:]) == {4}, "three trees and plain decoding, in the first round"
    assert all(after - before >= 8 for before, after in pairwise(counts)), "two steps of each size are replayed"


@pytest.mark.parametrize("drafts", ["model", "suffix", "none"])
def test_warming_up_captures_all_sizes_that_auto_chooses_from(
    drafts: str, drafter: ModelDrafter, capture: Callable[[], stree.TreeLM]
) -> None:
    options: dict[str, Any] = {"sampling": Sampling(0.8), "verifier": "match", "stop_token_ids": [1]}
    chosen: Drafter | None = {"model": drafter, "suffix": None, "none": NoDrafter()}[drafts]
    eager = generate(grafted(tiny_model("bamba")), chosen, budget=1, **options).sequences
    lm = capture()
    (report,) = stree.warm_up(
        lm, chosen, max_length=120, budgets=("auto",), batch_sizes=(2,), prompt=TEXTS[0], shows_progress=False,
        **options,
    )  # fmt: skip
    asked = chosen or SuffixDrafter()
    sizes = _choices(asked, _shape(asked, None, Sampling(0.8)), "auto", has_growth=False, is_captured=True)
    most = len(sizes.choices)  # plain decoding among them; retrieved trees are as large as what is found
    assert not report["not_captured"] and report["graphs"] >= (most if drafts != "suffix" else 2)
    known = set(rehearsal._known.get(lm, {}))
    found = generate(lm, chosen, budget="auto", max_length=120, **options)
    assert found.sequences == eager
    assert drafts == "suffix" or found.stats["graphs"]["replays"] == found.stats["steps"], "whatever it chose"
    assert set(rehearsal._known.get(lm, {})) == known, "what steps take was measured too"
    if drafts != "none":
        with pytest.raises(ValueError, match="max_length 7 leaves no room for a step behind 6 tokens"):
            stree.warm_up(lm, chosen, max_length=7, budgets=("auto",), prompt=TEXTS[0], shows_progress=False)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_controller_that_hears_late_keeps_the_text(
    temperature: float, drafter: ModelDrafter, capture: Callable[[], stree.TreeLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"sampling": Sampling(temperature), "verifier": "match", "max_new_tokens": 30}
    eager = generate(grafted(tiny_model("bamba")), NoDrafter(), budget=1, **options).sequences
    monkeypatch.setattr("stree.session.Session._is_late", lambda _: True)
    padded, begin = [], AutoSize.__init__

    def noted(self: AutoSize, *arguments: Any, **named: Any) -> None:
        padded.append(named.get("is_padded"))
        begin(self, *arguments, **named)

    monkeypatch.setattr(AutoSize, "__init__", noted)
    for lm in (grafted(tiny_model("bamba")), capture()):
        for _ in range(2):
            assert generate(lm, drafter, budget="auto", **options).sequences == eager
    assert padded == [None, False, False, None, True, True], "each measured once; captured trees have fixed sizes"


def test_what_cannot_be_captured_is_said_and_launched(
    drafter: ModelDrafter, capture: Callable[[], stree.TreeLM], caplog: pytest.LogCaptureFixture
) -> None:
    expected = generate(grafted(tiny_model("bamba")), drafter, growth=Chain(3), budget=4).sequences
    with caplog.at_level(logging.WARNING, "stree"):
        found = generate(capture(), drafter, growth=Reading(3), budget=4)
    assert found.sequences == expected
    assert found.stats["graphs"]["graphs"] == 0 == found.stats["graphs"]["replays"]
    assert len(caplog.records) == 1 and "without a CUDA graph: TapeError: a captured step brings" in caplog.text


@pytest.mark.parametrize("defers_commit", [False, True])
def test_a_capture_that_fails_half_way_leaves_the_text_as_it_was(
    drafter: ModelDrafter, capture: Callable[[], stree.TreeLM], monkeypatch: pytest.MonkeyPatch, defers_commit: bool
) -> None:
    expected = generate(grafted(tiny_model("bamba")), drafter, growth=Calibrated(3), budget=8).sequences
    lm = capture()
    lm.defers_commit = defers_commit
    commit = type(lm).commit

    def failing(self: Any, *operands: Any) -> None:
        if self is lm and isinstance(_get_current_dispatch_mode(), Tape):
            raise RuntimeError("out of memory, say")
        commit(self, *operands)

    monkeypatch.setattr(type(lm), "commit", failing)
    found = generate(lm, drafter, growth=Calibrated(3), budget=8)
    assert found.sequences == expected and "out of memory" in str(found.stats["graphs"]["not_captured"])


def test_a_program_whose_text_failed_is_not_used_again(
    drafter: ModelDrafter, capture: Callable[[], stree.TreeLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(grafted(tiny_model("bamba")), drafter, budget=4).sequences
    lm = capture()
    generate(lm, drafter, budget=4)
    assert len(lm.kept["engine"].report()) == 1
    with monkeypatch.context() as patch:
        patch.setattr(Graphs, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("device lost")))
        with pytest.raises(stree.GenerationError, match="device lost"):
            generate(lm, drafter, budget=4)
    assert not lm.kept["engine"].report()
    assert generate(lm, drafter, budget=4).sequences == expected


def test_the_least_used_graph_is_dropped() -> None:
    recorder = TapeRecorder()
    graphs = Graphs(recorder, most=2)
    value = torch.zeros(3)
    for key, times in (("a", 4), ("b", 4), ("a", 1), ("c", 4), ("b", 1), ("a", 3)):
        for _ in range(times):
            graphs.run(key, lambda: value.add_(1), lambda: None)
    assert value.tolist() == [17.0] * 3
    assert len(recorder.tapes) == 3 and graphs.report()["graphs"] == 2
    assert graphs.num_replays == 2 + 2 + 1 + 2 + 3, "one that was used lately stays"


def test_the_tape_sees_what_a_graph_would_do_wrong() -> None:
    with torch.no_grad():
        value, other = torch.zeros(3), torch.ones(3)
        tape, out = TapeRecorder().capture(lambda: value.add_(1) + other)
        assert value.tolist() == [0.0] * 3, "capturing runs nothing"
        tape.replay()
        assert value.tolist() == [1.0] * 3 and out.tolist() == [2.0] * 3
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


def test_a_number_that_the_host_counts_shows(drafter: ModelDrafter, capture: Callable[[], stree.TreeLM]) -> None:
    """The control: a seed that a graph holds as a number gives the first text's draws to the second."""
    sampling = Sampling(0.8)
    eager = [
        generate(grafted(tiny_model("bamba")), drafter, seed, sampling=sampling, budget=16).sequences for seed in (0, 1)
    ]
    lm = capture()
    assert generate(lm, drafter, 0, sampling=sampling, budget=16).sequences == eager[0]
    ((key, (program, drafts)),) = lm.kept["engine"]._programs.items()
    run: Any = program.run
    program.rng = run._rng = replace(program.rng, seed=0)
    program.graphs.clear()
    assert generate(lm, drafter, 1, sampling=sampling, budget=16).sequences != eager[1]


def test_weights_that_move_are_captured_anew(capture: Callable[[], stree.TreeLM]) -> None:
    lm = capture()
    expected = generate(lm, None, budget=8)
    assert generate(lm, None, budget=8).stats["graphs"]["replays"] > 0
    assert len(lm.kept["engine"].report()) == 1
    for parameter in lm.model.parameters():  # what a trip to another device and back does
        parameter.data = parameter.data.clone()
    moved = generate(lm, None, budget=8)
    assert moved.sequences == expected.sequences and len(lm.kept["engine"].report()) == 2
    before = layout_of(lm)
    for buffer in lm.model.buffers():
        buffer.data = buffer.data.clone()
    assert layout_of(lm) != before, "a captured step reads them, too"
    other = tiny_model("bamba", seed=7)
    lm.model.load_state_dict(other.state_dict(), assign=True)
    assert generate(lm, None, budget=8).sequences == generate(grafted(other), None, budget=8).sequences


def test_numbers_may_be_of_numpy_or_torch(capture: Callable[[], stree.TreeLM]) -> None:
    options: dict[str, Any] = {"sampling": Sampling(0.8), "budget": 4}
    expected = generate(grafted(tiny_model("bamba")), None, 5, **options).sequences
    makes: list[Any] = [np.int64, torch.tensor]
    for is_captured in (False, True):
        lm = capture() if is_captured else grafted(tiny_model("bamba"))
        for make in makes:
            made = generate(lm, None, make(5), max_batch=make(2), max_length=make(60), **options)
            assert made.sequences == expected


@pytest.mark.parametrize("seed", [-1, (1 << 63) + 5])
def test_a_seed_of_any_size_names_the_text_of_launched_steps(seed: int, capture: Callable[[], stree.TreeLM]) -> None:
    options: dict[str, Any] = {"sampling": Sampling(0.8), "budget": 4, "max_new_tokens": 6}
    expected = generate(grafted(tiny_model("bamba")), None, seed, **options).sequences
    assert generate(capture(), None, seed, **options).sequences == expected


@pytest.mark.parametrize("option", ["defers_commit", "fused_layers"])
def test_what_a_model_is_told_later_is_captured_anew(option: str, capture: Callable[[], stree.TreeLM]) -> None:
    lm = capture()
    generate(lm, None, budget=8)
    setattr(lm, option, option != "fused_layers")
    generate(lm, None, budget=8)
    programs = [program for program, _ in lm.kept["engine"]._programs.values()]
    assert len(programs) == 2 and (
        option == "fused_layers" or [one.state.defers_commit for one in programs] == [False, True]
    )


def test_what_was_captured_in_inference_mode_serves_outside(
    drafter: ModelDrafter, capture: Callable[[], stree.TreeLM]
) -> None:
    lm = capture()
    with torch.inference_mode():
        expected = generate(lm, drafter, budget=8).sequences
    for _ in range(2):
        assert generate(lm, drafter, budget=8).sequences == expected


def test_a_kept_program_needs_no_more_room(
    drafter: ModelDrafter, capture: Callable[[], stree.TreeLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = capture()
    generate(lm, drafter, budget=8)
    kept = {id(program) for program, _ in lm.kept["engine"]._programs.values()}
    monkeypatch.setattr(room, "free_bytes", lambda device: 1)
    found = generate(lm, drafter, budget=8)
    assert found.stats["graphs"]["replays"] == found.stats["steps"]
    assert {id(program) for program, _ in lm.kept["engine"]._programs.values()} == kept
    with pytest.raises(ValueError, match="the states need"):
        generate(lm, drafter, budget=9)
    assert not lm.kept["engine"].report(), "it was given up for what needed its room"


def test_a_text_with_a_processor_is_launched_and_keeps_nothing(capture: Callable[[], stree.TreeLM]) -> None:
    def without(token: int) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda _, logits: torch.where(torch.arange(logits.shape[1]) == token, -torch.inf, logits)

    plain = generate(grafted(tiny_model("bamba")), None, budget=8).sequences[0]
    processors = [without(token) for token in plain[len(TEXTS[0]) :][:2]]
    eager = [generate(grafted(tiny_model("bamba")), None, budget=8, logits_processor=one) for one in processors]
    lm = capture()
    for one, expected in zip(processors, eager, strict=True):
        found = generate(lm, None, budget=8, logits_processor=one)
        assert found.sequences == expected.sequences and "graphs" not in found.stats
    assert not lm.kept["engine"].report()


@pytest.mark.parametrize("drafts", ["model", "none", "suffix"])
def test_replays_are_those_of_the_steps_that_were_heard_of(
    drafts: str, drafter: ModelDrafter, capture: Callable[[], stree.TreeLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "_is_late", lambda self: True)  # as on a device: the last one runs for nobody
    lm = capture()
    every: dict[str, Drafter] = {"model": drafter, "suffix": SuffixDrafter(), "none": NoDrafter()}
    chosen = every[drafts]
    for number in range(3):
        found = generate(lm, chosen, budget=1 if drafts == "none" else 8)
        assert number == 0 or drafts == "suffix" or found.stats["graphs"]["replays"] == found.stats["steps"]
        assert found.stats["graphs"]["replays"] <= found.stats["steps"]
        assert all(found.stats[part] > 0 for part in PARTS)
        assert sum(found.stats[part] for part in PARTS) < found.stats["total_s"], "parts share a replay's time"


def test_a_drafter_made_anew_of_the_same_model_finds_what_was_captured(
    drafter: ModelDrafter, capture: Callable[[], stree.TreeLM]
) -> None:
    lm = capture()
    expected = generate(lm, drafter, budget=8, sampling=Sampling(0.8)).sequences
    found = generate(lm, ModelDrafter(drafter.lm), budget=8, sampling=Sampling(0.8))
    assert found.sequences == expected and found.stats["graphs"]["replays"] == found.stats["steps"]
    generate(lm, ModelDrafter(drafter.lm, vocab=range(50)), budget=8, sampling=Sampling(0.8))
    assert len(lm.kept["engine"].report()) == 2, "another head is another model"


@pytest.mark.parametrize("drafts", ["suffix", "none"])
def test_rejection_without_laws_is_captured(drafts: str, capture: Callable[[], stree.TreeLM]) -> None:
    chosen: Drafter = SuffixDrafter() if drafts == "suffix" else NoDrafter()
    options: dict[str, Any] = {"budget": 8, "verifier": "rejection", "sampling": Sampling(0.8)}
    expected = generate(grafted(tiny_model("bamba")), chosen, **options).sequences
    found = generate(capture(), chosen, **options)
    assert found.sequences == expected
    assert not found.stats["graphs"]["not_captured"] and found.stats["graphs"]["replays"] > 0


def test_weights_that_are_made_of_others_are_known_by_themselves() -> None:
    class Made(torch.nn.Parameter):
        """Such as torchao's quantised weights."""

        def data_ptr(self) -> int:
            raise RuntimeError("it has no storage")

    lm = grafted(tiny_model("bamba"))
    before = layout_of(lm)
    assert layout_of(lm) == before
    lm.model.model.final_layernorm.weight = Made(lm.model.model.final_layernorm.weight.detach())
    assert layout_of(lm) == layout_of(lm) != before


def test_texts_share_the_room_of_the_next_power_of_two() -> None:
    assert [engine.rounded(length) for length in (1, 256, 257, 512, 513)] == [256, 256, 512, 512, 1024]


def test_what_layers_read_of_their_config_is_captured_anew() -> None:
    lm = grafted(family_model("granitemoehybrid"))
    before = layout_of(lm)
    assert layout_of(lm) == before
    lm.model.config.logits_scaling *= 2  # the model divides by it in every call
    assert layout_of(lm) != before


def test_classes_and_the_names_of_settings_are_part_of_what_was_captured() -> None:
    lm = grafted(tiny_model("bamba"))
    layer = lm.model.model.layers[0].feed_forward
    layer.first, layer.second, layer.nested = True, False, {"scales": {"up": 2}}
    before = layout_of(lm)
    layer.first, layer.second = False, True
    swapped = layout_of(lm)
    layer.nested["scales"]["up"] = 3
    scaled = layout_of(lm)
    layer.__class__ = type("Other", (type(layer),), {})
    assert len({before, swapped, scaled, layout_of(lm)}) == 4


def test_what_a_layer_is_told_later_is_captured_anew(capture: Callable[[], stree.TreeLM]) -> None:
    """Adapters are switched by attributes of their layers, as peft's are; a hook that is gone leaves no trace."""

    class Switched(torch.nn.Module):
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base, self.active = base, ["none"]

        def forward(self, x: Tensor) -> Any:
            return self.base(x) * (3 if "louder" in self.active else 1)

    def negated(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return -output

    lm = capture()
    layer = lm.model.model.layers[0]
    layer.feed_forward = adapter = Switched(layer.feed_forward)
    texts = []
    for active, is_hooked in (("none", False), ("louder", False), ("none", True), ("none", False)):
        adapter.active[0] = active
        hook = layer.feed_forward.register_forward_hook(negated) if is_hooked else None
        texts.append(generate(lm, None, budget=8))
        eager = stree.TreeLM(copy.deepcopy(lm.model))
        assert texts[-1].sequences == generate(eager, None, budget=8).sequences
        if hook is not None:
            hook.remove()
    assert texts[0].sequences not in (texts[1].sequences, texts[2].sequences)
    assert len(lm.kept["engine"].report()) == 3 and texts[3].stats["graphs"]["replays"] == texts[3].stats["steps"]
