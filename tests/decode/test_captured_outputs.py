"""What a captured step keeps between replays, and logits that it cannot check on the host.

Run: python -m pytest tests/decode/test_captured_outputs.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from helpers.captured import TEXTS, TapeRecorder, captured, generate, launched, near_drafter
from helpers.tiny_models import VOCAB, tiny_model

import stree
from stree.drafters import NoDrafter, SuffixDrafter
from stree.sampling import Sampling


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Note what captured work returns, which is kept as long as its graph."""
    monkeypatch.setenv("STREE_DEBUG", "0")  # checks of memory keep what they overwrite
    noted, capture = list[Any](), TapeRecorder.capture

    def noting(self: TapeRecorder, work: Callable[[], Any], *, separate_pool: bool = False) -> tuple[Any, Any]:
        tape, out = capture(self, work, separate_pool=separate_pool)
        noted.append(out)
        return tape, out

    monkeypatch.setattr(TapeRecorder, "capture", noting)
    return noted


def rows_of_the_vocabulary(out: Any) -> int:
    """Count the vocabulary-wide rows of a captured step's tensors, each tensor once."""
    rows: dict[int, int] = {}
    parts = [out]
    while parts:
        part = parts.pop()
        if isinstance(part, torch.Tensor):
            rows[id(part)] = part.numel() // VOCAB if part.dim() and part.shape[-1] == VOCAB else 0
        elif isinstance(part, (tuple, list)):
            parts += part
        elif is_dataclass(part) and not isinstance(part, type):
            parts += [getattr(part, field.name) for field in fields(part)]
    return sum(rows.values())


@pytest.mark.parametrize(
    ("drafter", "sampling"),
    [(near_drafter(), Sampling(0.8)), (SuffixDrafter(), Sampling()), (NoDrafter(), Sampling(0.8))],
    ids=["model", "suffix", "none"],
)
def test_a_captured_step_keeps_no_logits_that_are_not_read(
    drafter: Any, sampling: Sampling, outputs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(captured(monkeypatch), drafter, budget=8, sampling=sampling)
    assert outputs and not any(map(rows_of_the_vocabulary, outputs))


@pytest.mark.slow
def test_log_probabilities_keep_the_rows_of_accepted_paths(outputs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"budget": 8, "growth": "chain:2", "max_new_tokens": 20}
    expected = generate(launched(), near_drafter(), **options)
    lm = captured(monkeypatch)
    for logprobs in (2, False, 2):  # a step that was captured without them has none
        out = generate(lm, near_drafter(), logprobs=logprobs, **options)
        assert out.sequences == expected.sequences and out.stats["graphs"]["replays"]
    assert max(map(rows_of_the_vocabulary, outputs)) == 2 * 3, "two texts, paths of three nodes"


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        pytest.param(near_drafter(), {"sampling": Sampling(0.8)}, id="model", marks=pytest.mark.slow),
        pytest.param(SuffixDrafter(), {"budget": 1}, id="one node"),
    ],
)
def test_nan_logits_in_mid_text_end_it_as_on_a_cpu(
    drafter: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def until_nan(lm: stree.TreeLM) -> tuple[str, list[list[int]]]:
        """Let the logits be NaN from the sixth step on."""
        steps = 0

        def cancelled(place: int) -> bool:
            nonlocal steps
            steps += place == 0
            if steps == 5:
                lm.model.get_output_embeddings().weight.data.fill_(torch.nan)
            return False

        with pytest.raises(stree.GenerationError, match="the target's logits are NaN") as caught:
            generate(lm, drafter, cancelled=cancelled, max_new_tokens=40, **{"budget": 4, **options})
        assert isinstance(caught.value.__cause__, ValueError)
        return str(caught.value)[:60], caught.value.output.sequences

    expected = until_nan(stree.TreeLM(copy.deepcopy(tiny_model("bamba"))))
    lm = captured(monkeypatch, stree.TreeLM(copy.deepcopy(tiny_model("bamba"))))
    assert until_nan(lm) == expected
    # On a device the next step was launched when the first of these logits are read.
    monkeypatch.setattr("stree.decode.loop.DecodeLoop._is_pipelined", lambda _: True)
    lm = captured(monkeypatch, stree.TreeLM(copy.deepcopy(tiny_model("bamba"))))
    for text, longer in zip(expected[1], until_nan(lm)[1], strict=True):
        assert longer[: len(text)] == text and len(longer) > len(text)


@pytest.mark.parametrize("drafter", [near_drafter(), NoDrafter()], ids=["model", "none"])
def test_a_kept_step_begins_other_texts_in_the_states_that_it_has(
    drafter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = captured(monkeypatch)
    generate(lm, drafter, budget=8)
    expected = generate(launched(), drafter, budget=8, texts=TEXTS[::-1]).sequences
    made, new_state = list[Any](), stree.TreeLM.new_state
    monkeypatch.setattr(stree.TreeLM, "new_state", lambda *given: (made.append(given), new_state(*given))[1])  # type: ignore[func-returns-value]
    assert generate(lm, drafter, budget=8, texts=TEXTS[::-1]).sequences == expected and not made
