"""The decode state: trees of every shape, ragged prefill, empty paths, clone, select, resize, and 2,000 commits.

Fresh forwards of prompt + path are the oracle; `test_families.py` runs fewer shapes on every family.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.family_states import Decoding
from helpers.tiny_family_models import family_model
from helpers.tiny_models import (
    FAMILIES,
    TOLERANCE,
    patched,
    path_to,
    random_path,
    random_texts,
    random_tree,
    relative_error,
    right_padded,
    tiny_model,
    tree_error,
)
from transformers import DynamicCache

from stree import TokenTree
from stree.models.state import DecodeState

FLOAT32 = TOLERANCE[torch.float32]
DEFERS = pytest.mark.parametrize("defers_commit", [False, True])
EVERY = pytest.mark.parametrize("family", FAMILIES)


@EVERY
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9])
def test_a_prompt_as_short_as_one_token_is_taken(family: str, length: int) -> None:
    decoding = Decoding(tiny_model(family), [length])
    assert decoding.prompt_error() < FLOAT32
    decoding.score([5])


@pytest.mark.parametrize(("family", "changes"), [("mamba2", {"use_bias": True}), ("bamba", {"mamba_proj_bias": True})])
def test_ragged_prompts_run_row_by_row_where_a_projection_has_a_bias(family: str, changes: dict[str, Any]) -> None:
    lm = patched(tiny_model(family, **changes))
    batches: list[list[int]] = []
    lm.model.register_forward_pre_hook(lambda _, args: batches.append([*args[0].shape]))
    for lengths in ([7, 12, 2], [7, 7]):
        lm.prefill(lm.new_state(len(lengths), 64, 16), *right_padded(random_texts(random.Random(2), lengths)))
    assert batches == [[1, 7], [1, 12], [1, 2], [2, 7]]


@pytest.mark.parametrize("family", ["bamba", "llama"])
def test_ragged_prompts_of_a_float64_model_with_eager_attention_are_no_nan(family: str) -> None:
    model = tiny_model(family, torch.float64)
    model.set_attn_implementation("eager")
    decoding = Decoding(model, [7, 12, 2])
    assert max(decoding.prompt_error(), decoding.error(decoding.tree([6, 6, 6]))) < FLOAT32


@pytest.mark.parametrize("way", ["prefill", "extend", "prefill_row"])
@pytest.mark.parametrize("family", ["mamba2", "jamba"])
def test_a_state_takes_up_decay_rates_that_were_written_to_since_it_was_made(family: str, way: str) -> None:
    decoding = Decoding(family_model(family), [6, 6])
    for model in (decoding.lm.model, decoding.model):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("A_log"):
                    parameter += 1
    lm, state, tokens = decoding.lm, decoding.state, right_padded(decoding.texts)[0]
    if way == "prefill_row":
        lm.prefill_row(state, 0, tokens[:1])
        lm.prefill_row(state, 1, tokens[1:])
    else:
        state.reset()
        lm.prefill(state, tokens) if way == "prefill" else lm.extend(state, tokens)
    decoding.step([8, 8])
    decoding.score([8, 8])


@DEFERS
@EVERY
def test_a_model_and_a_state_that_were_pickled_together_go_on(family: str, defers_commit: bool) -> None:
    decoding = Decoding(tiny_model(family), [6, 9], defers_commit=defers_commit)
    decoding.step([8, 8])
    decoding.lm, state = pickle.loads(pickle.dumps((decoding.lm, decoding.state)))
    other = decoding.held_by(state)
    for _ in range(2):
        other.step([8, 8])


@EVERY
def test_prefill_leaves_room_that_the_padding_took_up(family: str) -> None:
    decoding = Decoding(tiny_model(family), [2, 14], max_length=16, max_nodes=8)
    for _ in range(2):  # the short text grows by 14 tokens, the long one by 2
        tokens = torch.tensor([*random_texts(decoding.rng, [7]), [5] + [0] * 6])
        tree = TokenTree(tokens, torch.tensor([[*range(-1, 6)], [-1] * 7], dtype=torch.int32))
        decoding.lm.verify(decoding.state, tree)
        decoding.commit(tree, [[*range(7)], [0]])
    assert decoding.state.lengths.tolist() == [16, 16]
    decoding.held_by(decoding.state.resized(32, 8)).score([5, 5])


@EVERY
def test_an_empty_path_leaves_its_sequence_bit_for_bit_as_it_was(family: str) -> None:
    decoding = Decoding(tiny_model(family), [6, 9])
    lm, state, probe = decoding.lm, decoding.state, decoding.tree([5])

    def scores() -> list[torch.Tensor]:  # one by one, or the longer row sets the shape of both
        return [lm.verify(state.select(torch.tensor([row])), probe) for row in range(2)]

    before = scores()
    lm.verify(state, decoding.tree([7, 7]))
    lm.commit(state, torch.zeros(2, 0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    assert state.pending_tree is None and all(map(torch.equal, before, scores()))
    decoding.step([7, 7], empty=0)
    assert [*map(torch.equal, before, scores())] == [True, False]


@DEFERS
@EVERY
def test_a_state_that_empty_paths_were_committed_to_takes_prompts(family: str, defers_commit: bool) -> None:
    decoding = Decoding(tiny_model(family), [0, 0], defers_commit=defers_commit)
    tree = decoding.score([7, 7])
    decoding.commit(tree, [[], []], filler=0)
    decoding.lm.verify(decoding.state, TokenTree.chain(torch.tensor(random_texts(decoding.rng, [4, 4]))))
    decoding.lm.commit(decoding.state, torch.tensor([[0, 1], [0, 1]]), torch.tensor([0, 0]))
    decoding.texts = random_texts(decoding.rng, [6, 9])
    decoding.lm.prefill(decoding.state, *right_padded(decoding.texts))
    decoding.score([5, 5])


@pytest.mark.parametrize("filler", [-1, 0, 3, 99999])
def test_entries_of_a_path_past_its_length_are_ignored(filler: int) -> None:
    decoding = Decoding(tiny_model("bamba"), [6, 9])
    tree = TokenTree.chain(torch.tensor(random_texts(decoding.rng, [5, 5])))
    decoding.lm.verify(decoding.state, tree)
    decoding.commit(tree, [[0, 1], [0, 1, 2, 3]], filler)
    decoding.score([5, 5])


@pytest.mark.parametrize(
    ("family", "copied", "defers_commit"),
    [
        *((family, DecodeState.clone, None) for family in FAMILIES),
        *(("bamba", copy.deepcopy, defers_commit) for defers_commit in (False, True)),
    ],
)
def test_a_clone_has_the_commits_without_the_uncommitted_tree_and_is_independent(
    family: str, copied: Callable[[DecodeState], DecodeState], defers_commit: bool | None
) -> None:
    decoding = Decoding(tiny_model(family), [6, 9], defers_commit=defers_commit)
    decoding.step([6, 6])
    tree = decoding.score([8, 8])
    clone = decoding.held_by(copied(decoding.state))
    with pytest.raises(RuntimeError, match="call verify first"):
        clone.commit(tree, [[0], [0]])
    for _ in range(2):
        clone.step([8, 8])
    decoding.commit(tree, [random_path(decoding.rng, tree, row) for row in range(2)])
    decoding.score([5, 5])
    clone.score([5, 5])


@DEFERS
def test_a_state_that_was_made_in_inference_mode_is_used_outside_of_it(defers_commit: bool) -> None:
    with torch.inference_mode():
        decoding = Decoding(tiny_model("bamba"), [7, 4], defers_commit=defers_commit)
        states = [decoding.state, decoding.state.clone(), decoding.state.resized(128, 32)]
        tree = decoding.tree([5, 8])
        for state in states:
            decoding.lm.verify(state, tree)
    for state in states:
        other = decoding.held_by(state)
        other.commit(tree, [random_path(decoding.rng, tree, row) for row in range(2)])
        other.score([5, 8])


@EVERY
@pytest.mark.parametrize("rows", [[2, 0, 2, 2, 1], [1], [0, 1, 2]], ids=str)
def test_select_takes_repeated_rows_in_any_order(family: str, rows: list[int]) -> None:
    decoding = Decoding(tiny_model(family), [6, 9, 2])
    decoding.step([6, 6, 6])
    decoding.score([8, 8, 8])
    chosen = decoding.held_by(decoding.state.select(torch.tensor(rows)), rows)
    assert chosen.state.pending_tree is None and chosen.state.batch_size == len(rows)
    chosen.step([6] * len(rows))  # equal rows get different texts here
    chosen.score([5] * len(rows))
    decoding.score([5, 5, 5])


@pytest.mark.parametrize(
    ("rows", "message"),
    [(torch.tensor([0, 2]), r"in \[0, 2\), got \[0, 2\]"), (torch.tensor([-1]), r"in \[0, 2\), got \[-1\]"),
     (torch.tensor([]), "must name at least one sequence, got none"),
     (torch.tensor([[0]]), r"int\[batch\], got int64\[1, 1\]"),
     (torch.tensor([True, False]), r"int\[batch\], got bool\[2\]"),
     (torch.tensor([0.0, 1.0]), r"int\[batch\], got float32\[2\]")],
    ids=["above", "below", "none", "two-d", "bool", "float"],
)  # fmt: skip
def test_select_refuses_rows_that_are_not_there(rows: torch.Tensor, message: str) -> None:
    state = patched(tiny_model("mamba2")).new_state(2, 16, 4)
    with pytest.raises(ValueError, match=message):
        state.select(rows)


@EVERY
def test_a_resized_state_has_room_for_more_and_leaves_the_original_alone(family: str) -> None:
    decoding = Decoding(tiny_model(family), [10, 9], max_length=16, max_nodes=4)
    decoding.step([4, 4])
    larger = decoding.held_by(decoding.state.resized(64, 20))
    larger.step([20, 20])
    larger.score([20, 20])
    tree = TokenTree(torch.tensor([[1], [3]]), torch.tensor([[-1]] * 2))
    assert decoding.error(tree) < FLOAT32


@pytest.mark.parametrize("fixed_shapes", [False, True])
@DEFERS
def test_copies_of_a_state_defer_commits_and_fix_shapes_as_it_does(defers_commit: bool, fixed_shapes: bool) -> None:
    lm = patched(tiny_model("mamba2"))
    lm.defers_commit = defers_commit
    state = lm.new_state(1, 16, 4, fixed_shapes=fixed_shapes)
    for copied in (state, state.clone(), state.resized(32, 8)):
        assert (copied.defers_commit, copied.deferred is not None) == (defers_commit, defers_commit)
        assert copied.fixed_shapes == fixed_shapes


@pytest.mark.slow
def test_the_state_after_500_commits_equals_one_computed_from_scratch() -> None:
    # The second layer sees the errors of the first; chunks of 64 for the long forward.
    model = tiny_model("bamba", num_hidden_layers=2, mamba_chunk_size=64)
    decoding = Decoding(model, [5, 2], max_length=8192, max_nodes=8, defers_commit=True)
    rng = decoding.rng
    for _ in range(500):
        tree = decoding.tree([rng.randint(1, 5), rng.randint(1, 5)])
        decoding.lm.verify(decoding.state, tree)
        decoding.commit(tree, [random_path(rng, tree, row) if rng.random() < 0.95 else [] for row in range(2)])
    assert min(map(len, decoding.texts)) > 750
    state = decoding.state.clone()
    for row, text in enumerate(decoding.texts):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(torch.tensor([text]), **{decoding.lm.cache_argument: cache})
        for layer, expected in enumerate(cache.layers):
            (ours,) = (view for (index, _), view in state.layers.items() if index == layer)
            if hasattr(ours, "window"):
                assert relative_error(ours.window[row], expected.conv_states[0][0, :, 1:]) < FLOAT32
                assert relative_error(ours.state[row], expected.recurrent_states[0][0]) < FLOAT32
            else:
                assert relative_error(ours.keys[row, :, : len(text)], expected.keys[0]) < FLOAT32
                assert relative_error(ours.values[row, :, : len(text)], expected.values[0]) < FLOAT32
    decoding.held_by(state).score([3, 3])


# Prompts shorter than the convolution (4 taps) and longer than a chunk (8 tokens); 64 nodes with and without padding.
SHAPES = {
    "one-node": ([5], [1]),
    "batch1-7nodes": ([11], [7]),
    "batch2-17nodes-short-prompts": ([2, 1], [17, 3]),
    "batch3-33nodes": ([3, 20, 9], [33, 1, 20]),
    "batch4-64nodes": ([7, 16, 1, 12], [64, 40, 5, 64]),
}


@pytest.mark.parametrize(("lengths", "sizes"), SHAPES.values(), ids=SHAPES)
def test_every_node_equals_a_fresh_forward_over_three_commits(
    lengths: list[int], sizes: list[int], dtype: torch.dtype
) -> None:
    decoding = Decoding(tiny_model("bamba", dtype), lengths, max_length=256, max_nodes=64)
    assert decoding.prompt_error() < TOLERANCE[dtype]
    for step in range(3):
        tree = random_tree(decoding.rng, sizes, width=min(64, max(sizes) + step))
        assert decoding.error(tree) < TOLERANCE[dtype]
        paths = [random_path(decoding.rng, tree, row) for row in range(len(sizes))]
        decoding.commit(tree, [*paths[:-1], [] if step == 1 else paths[-1]])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_piece_of_a_tree_stays_when_a_later_piece_is_replaced(family: str) -> None:
    decoding = Decoding(tiny_model(family), [9])
    tree = decoding.score([12])
    tokens = tree.tokens.clone()
    tokens[:, 5:] = (tokens[:, 5:] + 1) % 97
    other = TokenTree(tokens, tree.parents)
    logits = decoding.lm.verify(decoding.state, other, first=5)
    assert tree_error(decoding.model, decoding.texts, other, logits, first=5) < decoding.tolerance
    decoding.commit(other, [path_to(other, 0, 11)])
    decoding.score([12])
