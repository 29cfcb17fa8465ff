"""Prompts in chunks, and more tokens on a state that holds a text: logits and state of one prefill of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.family_states import Decoding
from helpers.on_device import treat_as_on_device
from helpers.tiny_family_models import EVERY_STATE, family_model, matrix
from helpers.tiny_models import TOLERANCE, fresh_logits, random_texts, relative_error, right_padded, tiny_model

import stree
from stree import TreeLM
from stree.kernels.tiles import MAX_NODES
from stree.kernels.topology import most_nodes
from stree.models import tree_scorer
from stree.models.families import Family
from stree.models.state import DecodeState


@pytest.mark.parametrize("family", matrix(fast=EVERY_STATE, in_ci=EVERY_STATE))
def test_a_prompt_in_chunks_leaves_what_it_leaves_in_one_piece(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = family_model(family)
    lm = TreeLM(family_model(family))
    lm.chunk_size = 6
    monkeypatch.setenv("STREE_DEBUG", "1")  # chains are checked to be trees
    # The second prompt fits in the first chunk, the third ends within the second.
    decoding = Decoding(model, [23, 4, 9], lm=lm, max_nodes=7, padding=1)
    assert decoding.state.lengths.tolist() == [23, 4, 9]
    assert decoding.prompt_error() < TOLERANCE[torch.float32]
    decoding.step([7, 5, 6])
    decoding.score([7, 5, 6])


class Widths:
    """Records how many tokens each forward of a model runs."""

    def __init__(self, model: Any) -> None:
        self.seen: list[int] = []
        model.register_forward_pre_hook(lambda _, inputs: self.seen.append(inputs[0].shape[1]))


@pytest.mark.parametrize(
    ("family", "chunk_size", "max_nodes", "expected"),
    [
        ("mamba2", None, 5, [19]),
        ("mamba2", 19, 5, [19]),
        ("mamba2", 7, 5, [7, 7, 5]),
        ("mamba2", 9, 10, [9, 10]),
        ("mamba", 9, 5, [9, 5, 5]),
        ("mamba", 1, 16, [1, 16, 2]),
    ],
)
def test_no_forward_is_wider_than_its_chunk_or_chain(
    family: str, chunk_size: int | None, max_nodes: int, expected: list[int]
) -> None:
    lm = TreeLM(family_model(family))
    lm.chunk_size = chunk_size
    widths = Widths(lm.model)
    lm.prefill(lm.new_state(1, 32, max_nodes), torch.arange(19)[None])
    assert widths.seen == expected


def test_the_rest_of_a_prompt_is_cut_to_the_most_nodes_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert most_nodes(torch.device("cuda:1"), torch.bfloat16) == MAX_NODES
    assert most_nodes(torch.device("cuda"), torch.float64) is None is most_nodes(torch.device("cpu"), torch.float32)
    monkeypatch.setattr(tree_scorer, "most_nodes", lambda device, dtype: 4)
    lm = TreeLM(family_model("mamba"))
    lm.chunk_size = 9
    widths = Widths(lm.model)
    lm.prefill(lm.new_state(1, 32, 16), torch.arange(19)[None])
    assert widths.seen == [9, 4, 4, 2]


@pytest.mark.slow
def test_a_model_s_own_chunk_size_serves_generate() -> None:
    model, texts = tiny_model("bamba"), [list(range(30)), [3, 4, 5]]
    expected = stree.generate(TreeLM(model), texts, max_new_tokens=8).sequences
    lm = TreeLM(model)
    lm.chunk_size = 11
    widths = Widths(lm.model)
    assert stree.generate(lm, texts, budget=16, max_new_tokens=8).sequences == expected
    assert widths.seen[:3] == [11, 16, 3]


@pytest.mark.parametrize("chunk_size", [0, -3])
def test_a_chunk_below_one_token_is_refused(chunk_size: int) -> None:
    lm = TreeLM(tiny_model("mamba2"))
    lm.chunk_size = chunk_size
    with pytest.raises(ValueError, match=f"chunk_size must be at least 1, got {chunk_size}"):
        lm.prefill(lm.new_state(), torch.tensor([[1, 2]]))


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


@pytest.mark.parametrize("family", matrix(fast=EVERY_STATE, in_ci=EVERY_STATE))
def test_an_extended_state_is_one_of_the_whole_text(family: str, dtype: torch.dtype) -> None:
    # The first row is extended by several chains, the second by one token, the third not at all.
    decoding = Decoding(family_model(family, dtype), [9, 3, 5], max_nodes=6)
    extend(decoding, [14, 1, 0])
    decoding.score([6, 6, 6])
    extend(decoding, [2, 0, 7])  # the pending tree is dropped
    decoding.step([6, 5, 4])
    extend(decoding, [1, 1, 1])
    decoding.score([6, 6, 6])


@pytest.mark.parametrize("family", matrix(fast=EVERY_STATE, in_ci=EVERY_STATE))
def test_a_long_extension_leaves_a_state_of_the_whole_text(family: str, dtype: torch.dtype) -> None:
    decoding = Decoding(family_model(family, dtype), [9, 9], max_nodes=6, defers_commit=True)
    decoding.lm.chunk_size = 11
    extend(decoding, [23, 23])  # in three forwards where the family's continues caches, else in chains
    decoding.step([6, 6])
    extend(decoding, [7, 7])  # behind a deferred commit
    decoding.score([6, 6])
    assert decoding.lm.family.continues_caches == (family not in ENDING)


ENDING = ("falcon_mamba", "jamba", "mamba", "minimax", "recurrent_gemma", "zamba")


def test_control_a_forward_behind_a_cache_is_wrong_in_other_families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Family, "continues_caches", True)
    decoding = Decoding(family_model("zamba"), [9], max_nodes=6)
    with pytest.raises(AssertionError):
        extend(decoding, [14])


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
    "no-column": (PAIR[:, :0], None, "input_ids must have at least one column, got none"),
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


@pytest.mark.parametrize(("lengths", "failing", "is_lost"), [([9, 8], 1, False), ([9, 8], 2, True), ([9, 9], 2, False)])
def test_a_failing_extension_changes_nothing_or_loses_the_state(
    lengths: list[int], failing: int, is_lost: bool
) -> None:
    decoding = Decoding(tiny_model("bamba"), [4, 4], max_nodes=5)
    decoding.lm.chunk_size, calls = 5, []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == failing:
            raise KeyboardInterrupt

    with decoding.lm.model.register_forward_pre_hook(fail), pytest.raises(KeyboardInterrupt):
        decoding.lm.extend(decoding.state, PAIR.repeat(1, 3), torch.tensor(lengths))
    if not is_lost:
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
