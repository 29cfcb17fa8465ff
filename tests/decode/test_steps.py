"""What is reported of every step agrees with the texts, the models' own forwards and the statistics.

Run: python -m pytest tests/decode/test_steps.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from helpers.captured import TEXTS, captured, generate, launched, near_drafter
from helpers.fast_cases import slow_unless
from helpers.tiny_models import tiny_model

import stree
from stree.drafters import NoDrafter, SuffixDrafter
from stree.growth import Calibrated, Chain
from stree.sampling import Sampling

SAMPLED = Sampling(0.8, top_k=30)
WAYS: dict[str, dict[str, Any]] = {
    "chain": {"drafter": near_drafter(), "growth": Chain(3), "budget": 4, "sampling": SAMPLED},
    "tree": {"drafter": near_drafter(), "growth": Calibrated(3), "budget": 12, "sampling": [SAMPLED, Sampling()]},
    "greedy": {"drafter": near_drafter(), "budget": 8, "sampling": Sampling()},
    "suffix": {"drafter": SuffixDrafter(), "budget": 8, "sampling": Sampling(0.3), "max_batch": 1},
    "plain": {"drafter": NoDrafter(), "sampling": Sampling()},
}


def probs_of(model: Any, text: list[int], sampling: Sampling) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([text]), use_cache=False).logits[0]
    return replace(sampling, temperature=sampling.temperature or 1.0).probs(logits)


def check(out: stree.Generation, samplings: Sequence[Sampling]) -> None:
    """Follow every text through its steps, and compare each probability with forwards of the whole text."""
    assert out.steps is not None and len(out.steps) == len(TEXTS)
    draft_model = near_drafter().lm.model
    for prompt, new, steps, sampling, row in zip(
        TEXTS, out.new_tokens, out.steps, samplings, out.stats["rows"], strict=True
    ):
        emitted = [token for step in steps for token in step.emitted]
        text = [*prompt, new[0], *emitted]
        assert text[: len(prompt) + len(new)] == [*prompt, *new]
        target, draft = (probs_of(model, text, sampling) for model in (tiny_model("bamba"), draft_model))
        place = len(prompt)
        for step in steps:
            assert step.tokens[0] == text[place] and (step.parents[0], step.depths[0]) == (-1, 0)
            for node, parent in enumerate(step.parents[1:], 1):
                assert 0 <= parent < node and step.depths[node] == step.depths[parent] + 1
            assert [step.parents[node] for node in step.path] == [-1, *step.path[:-1]]
            assert [step.tokens[node] for node in step.path[1:]] == step.emitted[:-1]
            assert step.num_accepted + 1 == len(step.emitted) == len(step.target_probs or ())
            after = [(place + i, token) for i, token in enumerate(step.emitted)]
            assert step.target_probs == pytest.approx([float(target[at, token]) for at, token in after], abs=2e-4)
            assert step.draft_probs is not None and len(step.draft_probs) == step.num_accepted
            for prob, (at, token) in zip(step.draft_probs, after[:-1], strict=True):
                assert prob is None or prob == pytest.approx(float(draft[at, token]), abs=2e-4)
            assert step.values is None or len(step.values) == len(step.tokens)
            check_nodes(step, text[:place], sampling)
            place += len(step.emitted)
        reached = [sum(step.num_accepted >= depth for step in steps) for depth in range(1, 20)]
        shares = [now / before for now, before in zip(reached, [len(steps), *reached], strict=False) if now]
        assert row == {"steps": len(steps), "tau": len(emitted) / len(steps), "acceptance_by_depth": shares}
    every = [step for steps in out.steps for step in steps]
    assert out.stats["tau"] == sum(len(step.emitted) for step in every) / len(every)
    assert json.loads(json.dumps([asdict(step) for step in every]))


def check_nodes(step: stree.StepRecord, text: list[int], sampling: Sampling) -> None:
    """Compare the draft's probabilities with a forward of its model over the text and the nodes above each, a few."""
    if step.node_probs is None:
        return
    assert step.node_probs[0] is None and len(step.node_probs) == len(step.tokens)
    assert step.draft_probs is not None
    for node, drawn in zip(step.path[1:], step.draft_probs, strict=True):
        assert drawn is None or drawn == step.node_probs[node]
    for node in range(1, len(step.tokens), 3) if len(text) < 20 else ():
        above = [parent := step.parents[node]]
        while parent:
            above.append(parent := step.parents[parent])
        ids = [*text, *(step.tokens[other] for other in reversed(above))]
        expected = probs_of(near_drafter().lm.model, ids, sampling)[-1, step.tokens[node]]
        assert step.node_probs[node] == pytest.approx(float(expected), abs=2e-4)


def samplings_of(name: str) -> list[Sampling]:
    sampling = WAYS[name]["sampling"]
    return sampling if isinstance(sampling, list) else [sampling] * len(TEXTS)


@pytest.mark.parametrize("name", slow_unless(lambda name: [*WAYS].index(name) % 2 == 0, WAYS))
def test_steps_agree_with_texts_models_and_statistics(name: str) -> None:
    out = generate(launched(), **WAYS[name], return_steps=True)
    check(out, samplings_of(name))
    plain = generate(launched(), **WAYS[name])
    assert plain.sequences == out.sequences and plain.steps is None
    assert plain.stats["rows"] == out.stats["rows"]
    assert out.steps is not None
    drawn = [prob for steps in out.steps for step in steps for prob in step.draft_probs or ()]
    assert any(prob is not None for prob in drawn) == (name in ("chain", "tree")), "others draw nothing"
    seconds = sum(step.seconds["verify_s"] for step in out.steps[0])
    assert seconds <= out.stats["verify_s"] * (1 + 1e-9)
    first = out.steps[0][0]
    assert (first.node_probs is not None) == (name in ("chain", "tree", "greedy")), "others have no draft model"
    if first.node_probs is not None:
        check_nodes(first, TEXTS[0], samplings_of(name)[0])
        with pytest.raises(AssertionError):
            check_nodes(replace(first, node_probs=[None, *first.node_probs[:0:-1]]), TEXTS[0], samplings_of(name)[0])
    wrong = [[replace(step, target_probs=[0.5] * len(step.emitted)) for step in steps] for steps in out.steps]
    with pytest.raises(AssertionError):
        check(replace(out, steps=wrong), samplings_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tree", "chain", "plain"])
def test_captured_steps_report_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only on a device is a step read while the next one runs, and overwrites what it has left.
    monkeypatch.setattr("stree.decode.loop.DecodeLoop._is_pipelined", lambda _: True)
    lm = captured(monkeypatch)
    for return_steps in (True, False, True):  # a step that keeps no probabilities is another one
        out = generate(lm, **WAYS[name], return_steps=return_steps)
        assert (out.steps is not None) == return_steps
    check(out, samplings_of(name))
    assert out.stats["graphs"]["replays"] == out.stats["steps"], "both are kept"


def test_steps_of_a_drafter_without_probabilities_under_match_name_none() -> None:
    out = generate(launched(), **WAYS["chain"], verifier="match", return_steps=True)
    assert out.steps is not None
    probs = [prob for steps in out.steps for step in steps for prob in step.draft_probs or ()]
    assert probs and set(probs) == {None}


def test_a_stream_has_the_steps_so_far() -> None:
    tokens = stree.stream(launched(), TEXTS[0], near_drafter(), budget=8, max_new_tokens=14, return_steps=True)
    next(tokens)
    assert tokens.result.steps == [[]] and tokens.result.new_tokens == [tokens.result.sequences[0][len(TEXTS[0]) :]]
    new = [*tokens]
    assert tokens.result.steps is not None and tokens.result.steps[0]
    assert tokens.result.new_tokens[0][1:] == new
