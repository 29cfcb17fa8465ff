"""Log probabilities of emitted tokens are those of fresh forwards, whatever is drawn and however steps run.

Run: python -m pytest tests/decode/test_logprobs.py
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers.captured import TEXTS, captured, launched, near_drafter
from helpers.fast_cases import slow_unless
from helpers.tiny_models import VOCAB, tiny_model

import stree
from stree.drafters import NoDrafter, SuffixDrafter
from stree.growth import Calibrated
from stree.sampling import Sampling

NEW_TOKENS = 12
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"drafter": NoDrafter(), "budget": 1},
    "tree": {"drafter": near_drafter(), "growth": Calibrated(3), "budget": 12},
    "suffix": {"drafter": SuffixDrafter(), "budget": 8, "max_batch": 1},
}
SAMPLINGS = [Sampling(), Sampling(0.7, top_k=4)]


def check(out: stree.Generation, top: int, prompts: list[list[int]]) -> None:
    """Compare with the model's distribution by a forward of every whole text."""
    assert out.logprobs is not None
    for text, prompt, found in zip(out.sequences, prompts, out.logprobs, strict=True):
        with torch.no_grad():
            logits = tiny_model("bamba")(torch.tensor([text]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        assert [one.token for one in found] == text[len(prompt) :]
        for row, one in zip(expected, found, strict=True):
            assert one.logprob == pytest.approx(float(row[one.token]), abs=2e-4)
            assert len(one.top) == top
            best = row.topk(top)
            assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=2e-4)
            assert all(float(row[token]) == pytest.approx(value, abs=2e-4) for token, value in one.top)


@pytest.mark.parametrize("name", WAYS)
def test_log_probabilities_are_those_before_temperature_and_processors(name: str) -> None:
    options: dict[str, Any] = {**WAYS[name], "sampling": SAMPLINGS, "max_new_tokens": [NEW_TOKENS, 5]}
    expected = stree.generate(launched(), TEXTS, **options)
    out = stree.generate(launched(), TEXTS, logprobs=3, **options)
    assert out.sequences == expected.sequences and expected.logprobs is None
    check(out, 3, TEXTS)
    penalised = stree.generate(launched(), TEXTS, logprobs=True, repetition_penalty=1.5, **options)
    assert penalised.sequences != expected.sequences
    check(penalised, 0, TEXTS)
    with pytest.raises(AssertionError):
        check(out, 3, [text[:-1] for text in TEXTS])


@pytest.mark.parametrize(
    ("name", "is_pipelined"),
    slow_unless(
        lambda *_: False,
        itertools.product(WAYS, (False, True)),
        in_ci=lambda name, is_pipelined: [*WAYS].index(name) % 2 == is_pipelined,
    ),
)
def test_captured_steps_give_the_same(name: str, is_pipelined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only on a device is a step read while the next one runs, and overwrites what it has left.
    monkeypatch.setattr("stree.decode.loop.DecodeLoop._is_pipelined", lambda _: is_pipelined)
    lm = captured(monkeypatch)
    for _ in range(2):
        out = stree.generate(lm, TEXTS, logprobs=2, **WAYS[name], sampling=SAMPLINGS, max_new_tokens=NEW_TOKENS)
        check(out, 2, TEXTS)
    assert out.stats["graphs"]["replays"] > 0 and not out.stats["graphs"]["not_captured"]
    for logprobs in (False, False, 2):  # a step that keeps no logits is another one
        again = stree.generate(
            lm, TEXTS, logprobs=logprobs, **WAYS[name], sampling=SAMPLINGS, max_new_tokens=NEW_TOKENS
        )
    assert again.stats["graphs"]["replays"] == again.stats["steps"], "both are kept"


@pytest.mark.parametrize("count", [-1, VOCAB + 1, "all"])
def test_an_impossible_number_of_alternatives_is_refused(count: Any) -> None:
    with pytest.raises(
        (TypeError, ValueError), match="logprobs must be True or a number of alternatives up to 97, got"
    ):
        stree.generate(launched(), TEXTS, logprobs=count)
