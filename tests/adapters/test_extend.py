"""More tokens on a state that holds a text: what a prefill of the whole text leaves, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.family_states import Decoding
from helpers.on_device import treat_as_on_device
from helpers.tiny_family_models import family_model, matrix
from helpers.tiny_models import TOLERANCE, fresh_logits, random_texts, relative_error, right_padded, tiny_model

from stree.models.state import DecodeState


def extend(decoding: Decoding, lengths: list[int], padding: int = 3) -> None:
    """Extend by random tokens and compare the logits with fresh forwards of the whole texts."""
    more = random_texts(decoding.rng, lengths)
    decoding.texts = [text + new for text, new in zip(decoding.texts, more, strict=True)]
    logits = decoding.lm.extend(decoding.state, *right_padded(more, padding))
    assert decoding.state.lengths.tolist() == [*map(len, decoding.texts)]
    for row, text in enumerate(decoding.texts):
        if not lengths[row]:
            assert logits[row].isnan().all()
            continue
        assert relative_error(logits[row], fresh_logits(decoding.model, text)[-1]) < decoding.tolerance


@pytest.mark.parametrize("family", matrix())
def test_an_extended_state_is_one_of_the_whole_text(family: str, dtype: torch.dtype) -> None:
    # The first row is extended by several chains, the second by one token, the third not at all.
    decoding = Decoding(family_model(family, dtype), [9, 3, 5], max_nodes=6)
    extend(decoding, [14, 1, 0])
    decoding.score([6, 6, 6])
    extend(decoding, [2, 0, 7])  # the pending tree is dropped
    decoding.step([6, 5, 4])
    extend(decoding, [1, 1, 1])
    decoding.score([6, 6, 6])


@pytest.mark.parametrize("is_on_device", [False, True])
def test_an_empty_state_and_one_for_captured_steps_are_extended(
    is_on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_on_device:
        treat_as_on_device(monkeypatch)
    decoding = Decoding(
        tiny_model("bamba"), [0, 0], max_nodes=5, defers_commit=is_on_device, fixed_shapes=is_on_device, max_length=32
    )
    extend(decoding, [7, 0])
    decoding.step([5, 5])
    extend(decoding, [3, 4])
    decoding.score([5, 5])


def test_tokens_without_lengths_fill_a_state_to_its_last_row() -> None:
    decoding = Decoding(tiny_model("bamba"), [4, 4], max_length=16, max_nodes=5)
    logits = decoding.lm.extend(decoding.state, torch.tensor(random_texts(decoding.rng, [12, 12])))
    assert decoding.state.lengths.tolist() == [16, 16] and bool(logits.isfinite().all())


PAIR = torch.tensor([[1, 2, 3], [3, 2, 1]])
BAD: dict[str, tuple[Any, Any, str]] = {
    "batch": (PAIR[:1], None, r"input_ids must be int64\[2, length\], got int64\[1, 3\]"),
    "float": (PAIR.float(), None, r"input_ids must be int64\[2, length\], got float32\[2, 3\]"),
    "no-column": (PAIR[:, :0], None, "input_ids must have at least one column, got none"),
    "lengths-batch": (PAIR, torch.tensor([3]), r"lengths must be int\[2\], got int64\[1\]"),
    "negative-length": (PAIR, torch.tensor([3, -1]), r"lengths must be in \[0, 3\], .* got \[3, -1\]"),
    "length-beyond-width": (PAIR, torch.tensor([3, 4]), r"lengths must be in \[0, 3\], .* got \[3, 4\]"),
    "token": (PAIR + 95, None, "token 98 is outside the vocabulary of 97"),
    "beyond-max-length": (PAIR.repeat(1, 5), torch.tensor([10, 13]), "extending makes 17 tokens, .* max_length 16"),
}


@pytest.mark.parametrize(("tokens", "lengths", "message"), BAD.values(), ids=BAD)
def test_bad_tokens_are_refused_and_the_tree_stays_pending(tokens: Any, lengths: Any, message: str) -> None:
    decoding = Decoding(tiny_model("bamba"), [4, 4], max_length=16, max_nodes=5)
    tree = decoding.score([5, 5])
    with pytest.raises(ValueError, match=message):
        decoding.lm.extend(decoding.state, tokens, lengths)
    decoding.commit(tree, [[0], [0]])
    decoding.score([5, 5])


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failing_extension_changes_nothing_or_loses_the_state(failing: int) -> None:
    decoding = Decoding(tiny_model("bamba"), [4, 4], max_nodes=5)
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == failing:
            raise KeyboardInterrupt

    with decoding.lm.model.register_forward_pre_hook(fail), pytest.raises(KeyboardInterrupt):
        decoding.lm.extend(decoding.state, PAIR.repeat(1, 3))
    if failing == 1:
        decoding.score([5, 5])
    else:
        with pytest.raises(RuntimeError, match="the state is lost"):
            decoding.score([5, 5])


def test_a_state_of_another_model_is_not_extended() -> None:
    state: DecodeState = Decoding(tiny_model("llama"), [4]).state
    with pytest.raises(ValueError, match="the state belongs to another TreeLM"):
        Decoding(tiny_model("llama"), [4]).lm.extend(state, PAIR[:1])


def test_control_an_extension_by_other_tokens_is_far_off() -> None:
    decoding = Decoding(tiny_model("mamba2"), [9])
    wrong = decoding.lm.extend(decoding.state.clone(), torch.tensor([[5, 6, 7]]))
    assert (
        relative_error(wrong[0], fresh_logits(decoding.model, [*decoding.texts[0], 5, 7, 6])[-1])
        > 1000 * TOLERANCE[torch.float32]
    )
