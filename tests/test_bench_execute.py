"""Where steps are captured, timed runs only replay them, and what they drafted is counted as of launched ones.

A tape takes the place of CUDA graphs.

Run: python -m pytest tests/test_bench_execute.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cuda_graph_tape import TapeRecorder
from tiny_pairs import tiny_pair

import stree
from stree import engine, generation
from stree.bench import execute as execution
from stree.bench import runner
from stree.bench.directory import RunDirectory
from stree.bench.execute import Case, Run, execute
from stree.bench.methods import Method, parse_methods
from stree.bench.pair import Pair
from stree.bench.plan import Settings, read_suites
from stree.bench.runner import Runner
from stree.bench.verdict import verifier_name
from stree.engine import Engine
from stree.kernels import topology
from stree.rehearsal import GUESS
from stree.session import Session

PROMPT = tuple(range(5, 18))
METHODS = "plain,chain:3,calibrated:8x3,suffix:8"
SAMPLED = Case((PROMPT, PROMPT[:5]), 14, 0.8, seed=3)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Pair]]:
    """Give what makes a pair whose steps are captured, in the code that a device would run."""

    def begin() -> Pair:
        monkeypatch.setattr(topology, "waits_always", True)
        monkeypatch.setattr(engine, "_can_capture", lambda lm: "engine" in lm.kept and lm.is_captured is not False)
        torch.manual_seed(0)
        pair = tiny_pair("bamba")
        pair.target.kept["engine"] = Engine(TapeRecorder())
        return pair

    yield begin


def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, dict[str, Any]]]:
    """Note every generation to come: whether its steps were captured, and its statistics."""
    generations: list[tuple[bool, dict[str, Any]]] = []

    def generate(lm: Any, *arguments: Any, **options: Any) -> stree.Generation:
        out = stree.generate(lm, *arguments, **options)
        generations.append((lm.is_captured is not False, out.stats))
        return out

    monkeypatch.setattr(execution, "generate", generate)
    return generations


def only_replays(run: Run) -> bool:
    return bool(run.stats["graphs"]["replays"] == run.stats["steps"] > 0)


@pytest.mark.parametrize("case", [replace(SAMPLED, temperature=0.0), SAMPLED], ids=["greedy", "sampled"])
def test_timed_runs_only_replay_and_counts_are_those_of_launched_ones(
    case: Case, captured: Callable[[], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = captured()
    recorder = pair.target.kept["engine"].recorder
    pair.target.kept["engine"].most = 8
    methods = parse_methods(METHODS)
    pair.target.is_captured = False
    wanted = [execute(pair, method, case) for method in methods]
    assert not recorder.tapes and all("graphs" not in run.stats for run in wanted)
    pair.target.is_captured = None
    generations = seen(monkeypatch)
    for repeat in range(2):
        for method, launched in zip(methods, wanted, strict=True):
            generations.clear()
            before = len(recorder.tapes)
            run = execute(pair, method, case)
            assert only_replays(run) and run.tokens == launched.tokens and run.counts == launched.counts
            assert verifier_name(method, case.temperature, run) == verifier_name(method, case.temperature, launched)
            assert run.stats["tau"] == launched.stats["tau"]
            assert [is_captured for is_captured, _ in generations].count(False) == (method.name != "plain")
            if repeat:
                assert len(generations) <= 2 and len(recorder.tapes) == before, "nothing is left to capture"
    assert pair.target.is_captured is None, "as it was"
    assert wanted[1].counts.drafted > 0 and wanted[3].counts.drafted > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_sizes_that_a_controller_chooses_are_captured_before_they_are_timed(
    temperature: float, captured: Callable[[], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "step_times", lambda *_, **__: GUESS)
    (auto,) = parse_methods("auto")
    run = execute(captured(), auto, replace(SAMPLED, prompts=(PROMPT,), temperature=temperature))
    assert only_replays(run)
    steps, accepted = run.counts.reached[0], sum(run.counts.accepted.values())
    assert steps == run.stats["steps"] and run.stats["tau"] == pytest.approx(1 + accepted / steps)
    assert run.counts.drafted > accepted > 0 and run.counts.has_laws == (temperature > 0)


@pytest.mark.parametrize("name", ["chain:3", "suffix:8"])
def test_a_step_that_begins_before_the_last_is_heard_of_is_none_of_the_run(
    name: str, captured: Callable[[], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "_is_late", lambda session: True)
    pair, (method,) = captured(), parse_methods(name)
    run = execute(pair, method, SAMPLED)
    assert run.stats["graphs"]["replays"] == run.stats["steps"]
    tapes = len(pair.target.kept["engine"].recorder.tapes)
    assert execute(pair, method, SAMPLED).counts == run.counts
    assert len(pair.target.kept["engine"].recorder.tapes) == tapes


def test_a_run_in_which_a_step_is_captured_is_repeated(
    captured: Callable[[], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, generations, (plain,) = captured(), seen(monkeypatch), parse_methods("plain")
    execute(pair, plain, Case((PROMPT,), 3, 0.0))
    assert [stats["graphs"]["replays"] for _, stats in generations] == [0, 2, 2], "the second one captures"


def test_baselines_and_lossy_methods_are_launched(captured: Callable[[], Pair]) -> None:
    pair, one = captured(), replace(SAMPLED, prompts=(PROMPT,))
    for method in parse_methods("dyspec:5,unrolled:dyspec:5,snapshot:dyspec:5,lossy-target-init:2,2"):
        runs = [execute(pair, method, one) for _ in range(2)]
        assert runs[0].tokens == runs[1].tokens and runs[0].counts == runs[1].counts
        assert ("graphs" in runs[0].stats) == (method.engine == "tree" and not method.is_lossy)


def test_where_nothing_is_captured_a_method_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, generations = tiny_pair("bamba"), seen(monkeypatch)
    for number, method in enumerate(parse_methods(METHODS), 1):
        assert execute(pair, method, SAMPLED).counts.reached
        assert len(generations) == number


def test_what_measures_sizes_is_no_part_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    generations = seen(monkeypatch)
    (auto,) = parse_methods("auto")
    pair = tiny_pair("bamba")
    for again in (False, True):
        for case in (replace(SAMPLED, prompts=(PROMPT,)), SAMPLED):
            generations.clear()
            run = execute(pair, auto, case)
            assert run.counts.reached[0] <= run.stats["steps"] * len(case.prompts), "its own steps only"
            assert len(generations) == (1 if again else 2)


def test_what_is_drafted_behind_target_initialised_candidates_is_counted() -> None:
    (method,) = parse_methods("lossy-target-init:2,2")
    run = execute(tiny_pair(), method, Case((PROMPT,), 12, 0.8))
    steps = run.counts.reached[0]
    assert run.counts.drafted == 6 * steps and run.counts.tested[0] >= steps
    accepted = sum(run.counts.reached.values()) - steps
    assert sum(run.counts.accepted.values()) == accepted > 0


def test_memory_that_is_kept_for_other_texts_is_given_up_where_it_is_missed(
    captured: Callable[[], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = captured()
    plain, chain = parse_methods("plain,chain:3")
    execute(pair, plain, SAMPLED)
    kept = pair.target.kept["engine"]

    def generate(*arguments: Any, **options: Any) -> stree.Generation:
        if len(kept.report()) > 1 or (kept.report() and pair.target.is_captured is False):
            raise ValueError("the states need more than is free")
        return stree.generate(*arguments, **options)

    monkeypatch.setattr(execution, "generate", generate)
    assert execute(pair, chain, SAMPLED).counts.drafted > 0


def test_methods_that_take_turns_keep_their_programs(
    tmp_path: Path, captured: Callable[[], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("once upon a time\n\n" + "x" * 300, encoding="utf-8")
    settings = Settings(max_new_tokens=12, repeats=2)
    suites = read_suites({"mine": file}, 2, settings)
    pair, generations, repeated = captured(), seen(monkeypatch), list[int]()
    known: set[tuple[str, int]] = set()

    def noted(pair: Pair, method: Method, case: Case) -> Run:
        generations.clear()
        run = execute(pair, method, case)
        assert only_replays(run)
        kind = method.name, len(case.prompts[0])
        if kind in known:
            repeated.append(sum(is_captured for is_captured, _ in generations))
        known.add(kind)
        return run

    monkeypatch.setattr(runner, "execute", noted)
    monkeypatch.setattr(runner, "check_method", lambda *_: {"status": "ok"})
    monkeypatch.setattr(runner, "judge", lambda *_: {"lossless": None})
    monkeypatch.setattr(runner, "divergence", lambda *_: {})
    directory = RunDirectory(tmp_path / "run", {}, {})
    methods = parse_methods("plain,chain:1,chain:2,chain:3,chain:4")
    Runner(pair, methods, suites, settings, directory, base={}, say=print, advance=lambda _: None).run()
    kept = pair.target.kept["engine"]
    assert len(known) == 10 == kept.most == len(kept.report()), "two lengths"
    assert len(repeated) == 10 and set(repeated) == {1}, "a program that is kept has nothing left to capture"
