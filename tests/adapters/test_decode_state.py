"""The decoding state: prefill, clone, select, resize, and what 2,000 commits leave in it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers.tiny_models import (
    FAMILIES,
    TOLERANCE,
    as_commit,
    check_steps,
    extended,
    fresh_logits,
    patched,
    random_path,
    random_texts,
    random_tree,
    relative_error,
    right_padded,
    tiny_model,
    tree_error,
)
from transformers import DynamicCache, PreTrainedModel

from stree import TokenTree, TreeLM
from stree.models.state import DecodeState

FLOAT32 = TOLERANCE[torch.float32]
# Two layers, as the second sees the errors of the first; chunks of 64 for the long forward; eager and lazy commits.
LONG: dict[str, tuple[str, dict[str, Any], bool]] = {
    "mamba2": ("mamba2", {"chunk_size": 64}, False),
    "mamba2-attention": ("bamba", {"num_hidden_layers": 2, "mamba_chunk_size": 64}, True),
}


def advanced(lm: TreeLM, rng: random.Random, texts: list[list[int]], commits: int = 1) -> DecodeState:
    """Prefill a state and commit to it; ``texts`` are extended in place."""
    state = lm.new_state(len(texts), 64, 16)
    lm.prefill(state, *right_padded(texts))
    for _ in range(commits):
        tree = random_tree(rng, [6] * len(texts))
        lm.verify(state, tree)
        paths = [random_path(rng, tree, row) for row in range(len(texts))]
        lm.commit(state, *as_commit(paths))
        texts[:] = extended(texts, tree, paths)
    return state


def assert_scores(
    lm: TreeLM, model: PreTrainedModel, state: DecodeState, texts: list[list[int]], seed: int = 0
) -> None:
    """Require that the state stands for the texts."""
    tree = random_tree(random.Random(seed), [5] * len(texts))
    assert state.lengths.tolist() == [*map(len, texts)]
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_prefill_equals_prefills_one_by_one(family: str) -> None:
    rng = random.Random(0)
    lm, texts = patched(tiny_model(family)), random_texts(rng, [1, 9, 3, 2, 17])
    state = lm.new_state(5, 64, 16)
    logits = lm.prefill(state, *right_padded(texts, padding=11))
    tree = random_tree(rng, [6] * 5)
    verified = lm.verify(state, tree)
    for row, text in enumerate(texts):
        single = lm.new_state(1, 64, 16)
        assert relative_error(logits[row], lm.prefill(single, torch.tensor([text]))[0]) < FLOAT32
        one = TokenTree(tree.tokens[row], tree.parents[row])
        assert relative_error(verified[row], lm.verify(single, one)[0]) < FLOAT32


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9])
def test_a_prompt_as_short_as_one_token_is_taken(family: str, length: int) -> None:
    rng = random.Random(length)
    model = tiny_model(family)
    lm, texts = patched(model), random_texts(rng, [length])
    state = lm.new_state(1, 64, 16)
    logits = lm.prefill(state, torch.tensor(texts))
    assert relative_error(logits[0], fresh_logits(model, texts[0])[-1]) < FLOAT32
    assert_scores(lm, model, state, texts)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_lengths_may_have_any_integer_dtype(dtype: torch.dtype) -> None:
    rng = random.Random(1)
    model = tiny_model("bamba")
    lm, texts = patched(model), random_texts(rng, [7, 12])
    tokens, lengths = right_padded(texts)
    state = lm.new_state(2, 64, 16)
    lm.prefill(state, tokens, lengths.to(dtype))
    assert_scores(lm, model, state, texts)


@pytest.mark.parametrize(("family", "changes"), [("mamba2", {"use_bias": True}), ("bamba", {"mamba_proj_bias": True})])
def test_ragged_prompts_run_row_by_row_where_a_projection_has_a_bias(family: str, changes: dict[str, Any]) -> None:
    lm, texts = patched(tiny_model(family, **changes)), random_texts(random.Random(2), [7, 12, 2])
    batches = []
    lm.model.register_forward_pre_hook(lambda _, args: batches.append([*args[0].shape]))
    lm.prefill(lm.new_state(3, 64, 16), *right_padded(texts))
    assert batches == [[1, 7], [1, 12], [1, 2]]
    batches.clear()
    lm.prefill(lm.new_state(2, 64, 16), torch.tensor(random_texts(random.Random(2), [7, 7])))
    assert batches == [[2, 7]]


@pytest.mark.parametrize("family", ["bamba", "llama"])
def test_ragged_prompts_of_a_float64_model_with_eager_attention_are_no_nan(family: str) -> None:
    model = tiny_model(family, torch.float64)
    model.set_attn_implementation("eager")
    lm, texts = patched(model), random_texts(random.Random(2), [7, 12, 2])
    state, tree = lm.new_state(3, 64, 16), random_tree(random.Random(2), [6, 6, 6])
    logits = lm.prefill(state, *right_padded(texts))
    for row, text in enumerate(texts):
        assert relative_error(logits[row], fresh_logits(model, text)[-1]) < FLOAT32
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_leaves_room_that_the_padding_took_up(family: str) -> None:
    model = tiny_model(family)
    rng = random.Random(3)
    lm, texts = patched(model), random_texts(rng, [2, 14])
    state = lm.new_state(2, max_length=16, max_nodes=8)
    lm.prefill(state, *right_padded(texts))
    for _ in range(2):  # the short text grows by 14 tokens, the long one by 2
        tree = TokenTree.chain(torch.tensor(random_texts(rng, [7, 7])))
        tree = TokenTree(
            tree.tokens * torch.tensor([[1] * 7, [1] + [0] * 6]),
            torch.where(torch.tensor([[False] * 7, [False] + [True] * 6]), -1, tree.parents),
        )
        paths = [[*range(7)], [0]]
        lm.verify(state, tree)
        lm.commit(state, *as_commit(paths))
        texts = extended(texts, tree, paths)
    assert state.lengths.tolist() == [16, 16]
    larger = state.resized(32, 8)
    assert_scores(lm, model, larger, texts)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_path_leaves_its_sequence_bit_for_bit_as_it_was(family: str) -> None:
    rng = random.Random(4)
    lm, texts = patched(tiny_model(family)), random_texts(rng, [6, 9])
    state = lm.new_state(2, 64, 16)
    lm.prefill(state, *right_padded(texts))
    probe, tree = random_tree(rng, [5, 5]), random_tree(rng, [7, 7])
    before = lm.verify(state, probe)
    lm.verify(state, tree)
    lm.commit(state, *as_commit([[], random_path(rng, tree, 1)]))
    after = lm.verify(state, probe)
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_commit_of_empty_paths_only_consumes_the_tree_and_nothing_else(family: str) -> None:
    rng = random.Random(5)
    lm, texts = patched(tiny_model(family)), random_texts(rng, [6, 9])
    state = lm.new_state(2, 64, 16)
    lm.prefill(state, *right_padded(texts))
    probe = random_tree(rng, [5, 5])
    before = lm.verify(state, probe)
    lm.commit(state, torch.zeros(2, 0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    assert state.pending is None
    assert torch.equal(before, lm.verify(state, probe))


@pytest.mark.parametrize("defers_commit", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_that_empty_paths_were_committed_to_takes_prompts(family: str, defers_commit: bool) -> None:
    rng = random.Random(5)
    model = tiny_model(family)
    lm, texts = patched(model), random_texts(rng, [6, 9])
    lm.defers_commit = defers_commit
    state = lm.new_state(2, 64, 16)
    lm.verify(state, random_tree(rng, [7, 7]))
    lm.commit(state, *as_commit([[], []], filler=0))
    lm.verify(state, TokenTree.chain(torch.tensor(random_texts(rng, [4, 4]))))
    lm.commit(state, torch.tensor([[0, 1], [0, 1]]), torch.tensor([0, 0]))
    lm.prefill(state, *right_padded(texts))
    assert_scores(lm, model, state, texts)


@pytest.mark.parametrize("filler", [-1, 0, 3, 99999])
def test_entries_of_a_path_past_its_length_are_ignored(filler: int) -> None:
    rng = random.Random(6)
    model = tiny_model("bamba")
    lm, texts = patched(model), random_texts(rng, [6, 9])
    state = lm.new_state(2, 64, 16)
    lm.prefill(state, *right_padded(texts))
    tree = TokenTree.chain(torch.tensor(random_texts(rng, [5, 5])))
    lm.verify(state, tree)
    lm.commit(state, *as_commit([[0, 1], [0, 1, 2, 3]], filler))
    assert_scores(lm, model, state, extended(texts, tree, [[0, 1], [0, 1, 2, 3]]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_clone_holds_the_commits_and_goes_its_own_way(family: str) -> None:
    rng = random.Random(7)
    model = tiny_model(family)
    lm, texts = patched(model), random_texts(rng, [6, 9])
    state = advanced(lm, rng, texts)
    clone, other = state.clone(), [*texts]
    for _ in range(2):
        tree = random_tree(rng, [8, 8])
        lm.verify(clone, tree)
        paths = [random_path(rng, tree, row) for row in range(2)]
        lm.commit(clone, *as_commit(paths))
        other = extended(other, tree, paths)
    assert_scores(lm, model, state, texts)
    assert_scores(lm, model, clone, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_clone_leaves_an_uncommitted_tree_out_and_the_original_keeps_it(family: str) -> None:
    rng = random.Random(8)
    model = tiny_model(family)
    lm, texts = patched(model), random_texts(rng, [6, 9])
    state = advanced(lm, rng, texts)
    tree = random_tree(rng, [8, 8])
    lm.verify(state, tree)
    clone = state.clone()
    with pytest.raises(RuntimeError, match="call verify first"):
        lm.commit(clone, *as_commit([[0], [0]]))
    assert_scores(lm, model, clone, texts)
    paths = [random_path(rng, tree, row) for row in range(2)]
    lm.commit(state, *as_commit(paths))
    assert_scores(lm, model, state, extended(texts, tree, paths))


@pytest.mark.parametrize("defers_commit", [False, True])
def test_a_state_that_was_made_in_inference_mode_is_used_outside_of_it(defers_commit: bool) -> None:
    rng, model = random.Random(2), tiny_model("bamba")
    lm, texts = patched(model), random_texts(rng, [7, 4])
    lm.defers_commit = defers_commit
    with torch.inference_mode():
        states = [lm.new_state(2, 64, 8)]
        lm.prefill(states[0], *right_padded(texts))
        states += [states[0].clone(), states[0].resized(80, 16)]
        tree = random_tree(rng, [5, 8])
        for state in states:
            lm.verify(state, tree)
    paths = [random_path(rng, tree, row) for row in range(2)]
    texts = extended(texts, tree, paths)
    for state in states:
        lm.commit(state, *as_commit(paths))
        assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [[2, 0, 2, 2, 1], [1], [0, 1, 2]], ids=str)
def test_select_takes_repeated_rows_in_any_order(family: str, rows: list[int]) -> None:
    rng = random.Random(9)
    model = tiny_model(family)
    lm, texts = patched(model), random_texts(rng, [6, 9, 2])
    state = advanced(lm, rng, texts)
    lm.verify(state, random_tree(rng, [8, 8, 8]))
    chosen, chosen_texts = state.select(torch.tensor(rows)), [texts[row] for row in rows]
    assert chosen.pending is None
    assert chosen.batch_size == len(rows)
    assert_scores(lm, model, chosen, chosen_texts)
    tree = random_tree(rng, [6] * len(rows))  # equal rows part here
    lm.verify(chosen, tree)
    paths = [random_path(rng, tree, row) for row in range(len(rows))]
    lm.commit(chosen, *as_commit(paths))
    assert_scores(lm, model, chosen, extended(chosen_texts, tree, paths))
    assert_scores(lm, model, state, texts)


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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_resized_state_has_room_for_more_and_leaves_the_original_alone(family: str) -> None:
    rng = random.Random(10)
    model = tiny_model(family)
    lm, texts = patched(model), random_texts(rng, [12, 9])
    state = lm.new_state(2, max_length=16, max_nodes=4)
    lm.prefill(state, *right_padded(texts))
    tree = random_tree(rng, [4, 4])
    lm.verify(state, tree)
    paths = [[0], random_path(rng, tree, 1)]
    lm.commit(state, *as_commit(paths))
    texts = extended(texts, tree, paths)
    check_steps(model, lm, state.resized(64, 20), texts, (rng, [20, 20]), FLOAT32)
    tree = TokenTree(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[-1, 0]] * 2))
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32


@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize("defers_commit", [False, True])
def test_copies_of_a_state_fold_and_shape_their_steps_as_it_does(defers_commit: bool, fixed_shapes: bool) -> None:
    lm = patched(tiny_model("mamba2"))
    lm.defers_commit = defers_commit
    state = lm.new_state(1, 16, 4, fixed_shapes=fixed_shapes)
    for copied in (state, state.clone(), state.resized(32, 8)):
        assert (copied.defers_commit, copied.deferred is not None) == (defers_commit, defers_commit)
        assert copied.fixed_shapes == fixed_shapes


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes", "defers_commit"), LONG.values(), ids=LONG)
def test_the_state_after_2000_commits_equals_one_computed_from_scratch(
    family: str, changes: dict[str, Any], defers_commit: bool
) -> None:
    rng = random.Random(11)
    model = tiny_model(family, **changes)
    lm, texts = patched(model), random_texts(rng, [5, 2])
    lm.defers_commit = defers_commit
    state = lm.new_state(2, max_length=8192, max_nodes=8)
    lm.prefill(state, *right_padded(texts))
    for _ in range(2000):
        tree = random_tree(rng, [rng.randint(1, 5), rng.randint(1, 5)])
        lm.verify(state, tree)
        paths = [random_path(rng, tree, row) if rng.random() < 0.95 else [] for row in range(2)]
        lm.commit(state, *as_commit(paths))
        texts = extended(texts, tree, paths)
    assert min(map(len, texts)) > 3000
    state = state.clone()
    for row, text in enumerate(texts):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(torch.tensor([text]), **{lm.family.cache_argument: cache})
        for layer, expected in enumerate(cache.layers):
            (mine,) = (held for (index, _), held in state.layers.items() if index == layer)
            if hasattr(mine, "window"):
                assert relative_error(mine.window[row], expected.conv_states[0][0, :, 1:]) < FLOAT32
                assert relative_error(mine.state[row], expected.recurrent_states[0][0]) < FLOAT32
            else:
                assert relative_error(mine.keys[row, :, : len(text)], expected.keys[0]) < FLOAT32
                assert relative_error(mine.values[row, :, : len(text)], expected.values[0]) < FLOAT32
    tree = random_tree(rng, [3, 3])
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < FLOAT32
