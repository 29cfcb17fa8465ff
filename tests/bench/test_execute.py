"""Timed runs neither profile step times nor capture graphs: a tape takes the place of CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.cuda_graph_tape import TapeRecorder
from helpers.on_device import treat_as_on_device
from helpers.tiny_pairs import tiny_pair

from stree.bench.execute import Case, execute, figures
from stree.bench.methods import parse_methods
from stree.bench.pair import Pair
from stree.decode import step_cache as step_cache
from stree.decode.step_cache import StepCache

PROMPT = tuple(range(5, 18))
SAMPLED = Case((PROMPT, PROMPT[:5]), 14, 0.8, seed=3)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Pair:
    """A pair whose steps are captured, in the code that a CUDA device would run."""
    treat_as_on_device(monkeypatch)
    monkeypatch.setattr(
        step_cache, "_can_capture", lambda lm: "step_cache" in lm.cache and lm.captures_steps is not False
    )
    torch.manual_seed(0)
    pair = tiny_pair("bamba")
    pair.target.cache["step_cache"] = StepCache(TapeRecorder())
    pair.target.cache["step_cache"].most = 8
    return pair


@pytest.mark.slow
@pytest.mark.parametrize("case", [replace(SAMPLED, temperature=0.0), SAMPLED], ids=["greedy", "sampled"])
def test_timed_runs_only_replay_graphs_and_emit_the_tokens_of_launched_ones(case: Case, captured: Pair) -> None:
    methods = parse_methods("plain,chain:3,calibrated:8x3,suffix:8")
    captured.target.captures_steps = False
    launched = [execute(captured, method, case) for method in methods]
    assert all("graphs" not in run.stats for run in launched)
    captured.target.captures_steps = None
    captured.drafters.clear()
    for method, wanted in zip(methods, launched, strict=True):
        run = execute(captured, method, case)
        assert run.stats["graphs"]["replays"] == run.stats["steps"] > 0
        assert run.tokens == wanted.tokens and run.stats["tau"] == wanted.stats["tau"]
    tapes = len(captured.target.cache["step_cache"].recorder.tapes)
    for method in methods:
        execute(captured, method, case)
    assert len(captured.target.cache["step_cache"].recorder.tapes) == tapes, "graphs are kept for the next run"


def test_baselines_and_lossy_methods_are_not_captured(captured: Pair) -> None:
    case = replace(SAMPLED, prompts=(PROMPT,))
    for method in parse_methods("unrolled:dyspec:5,lossy-target-init:2,2"):
        assert "graphs" not in execute(captured, method, case).stats


def test_the_figures_of_a_run_are_those_of_the_library() -> None:
    (method,) = parse_methods("static:3,2")
    run = execute(tiny_pair(), method, SAMPLED)
    found = figures(run)
    assert found["tokens"] == [run.tokens] and [len(text) for text in run.tokens] == [14, 14]
    assert found["verified"] == 10 * found["steps"] and found["draft_calls"] == 2 * found["steps"]
    assert found["steps"] <= found["sequence_steps"] <= 2 * found["steps"]
    assert found["tau"] == run.stats["tau"] and 0 < found["ttft_s"] < run.seconds
    assert 0 < found["distinct_4grams"] <= 1
