"""Timed runs neither profile step times nor capture graphs: a tape takes the place of CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from helpers.captured import captured
from helpers.tiny_pairs import tiny_pair

from stree.bench.execute import Case, execute, figures
from stree.bench.methods import parse_methods

PROMPT = tuple(range(5, 18))
SAMPLED = Case((PROMPT, PROMPT[:5]), 14, 0.8, seed=3)


@pytest.mark.slow
def test_timed_runs_only_replay_graphs_and_emit_the_tokens_of_launched_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    pair = tiny_pair("bamba")
    methods = parse_methods("chain:3,calibrated:8x3,unrolled:dyspec:5,snapshot:dyspec:5")
    pair.target.captures_steps = False
    launched = [execute(pair, method, SAMPLED) for method in methods]
    assert all("graphs" not in run.stats for run in launched)
    captured(monkeypatch, pair.target).captures_steps = None
    pair.drafters.clear()
    for method, wanted in zip(methods, launched, strict=True):
        run = execute(pair, method, SAMPLED)
        assert run.tokens == wanted.tokens and run.stats["tau"] == wanted.stats["tau"]
        if method.baseline:
            assert "graphs" not in run.stats, "baselines are not captured"
        else:
            assert run.stats["graphs"]["replays"] == run.stats["steps"] > 0


@pytest.mark.slow
def test_a_run_in_which_something_was_compiled_is_not_the_timed_one() -> None:
    pair = tiny_pair()
    pair.compile()
    (method,) = parse_methods("plain")
    run = execute(pair, method, SAMPLED)
    assert run.seconds < pair.target.compile_s


@pytest.mark.slow
def test_the_figures_of_a_run_are_those_of_the_library() -> None:
    (method,) = parse_methods("static:3,2")
    run = execute(tiny_pair(), method, SAMPLED)
    found = figures(run)
    assert found["tokens"] == [run.tokens] and [len(text) for text in run.tokens] == [14, 14]
    assert found["verified"] == 10 * found["steps"] and found["draft_calls"] == 2 * found["steps"]
    assert found["steps"] <= found["sequence_steps"] <= 2 * found["steps"]
    assert found["tau"] == run.stats["tau"] and 0 < found["ttft_s"] < run.seconds
    assert 0 < found["distinct_4grams"] <= 1
