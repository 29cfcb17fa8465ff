"""Exactness: tree logits equal transformers' own fresh forward of prompt + path by an unpatched copy, at every node."""

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
    path_to,
    random_path,
    random_texts,
    random_tree,
    real_nodes,
    relative_error,
    right_padded,
    tiny_model,
    tree_error,
)

from stree import TokenTree

DTYPES = (torch.float32, torch.float64)
# Prompts shorter than the convolution (4 taps) and longer than a chunk (8 tokens); 64 nodes with and without padding.
SHAPES = {
    "one-node": ([5], [1]),
    "batch1-7nodes": ([11], [7]),
    "batch2-17nodes-short-prompts": ([2, 1], [17, 3]),
    "batch3-33nodes": ([3, 20, 9], [33, 1, 20]),
    "batch4-64nodes": ([7, 16, 1, 12], [64, 40, 5, 64]),
}


@pytest.fixture(params=DTYPES, ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Give a dtype; for float64 rebind what transformers writes into its code as float32, or nothing could be shown."""
    chosen: torch.dtype = request.param
    if chosen == torch.float64:
        monkeypatch.setattr(torch, "float32", torch.float64)
        monkeypatch.setattr(torch, "float", torch.float64)
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return chosen


@pytest.mark.parametrize(("lengths", "sizes"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_node_equals_a_fresh_forward_over_three_commits(
    family: str, lengths: list[int], sizes: list[int], dtype: torch.dtype
) -> None:
    rng = random.Random(len(sizes) + max(sizes))
    model = tiny_model(family, dtype)
    lm, texts = patched(model), random_texts(rng, lengths)
    state = lm.new_state(len(texts), max_length=256, max_nodes=64)
    logits = lm.prefill(state, *right_padded(texts))
    for row, text in enumerate(texts):
        assert relative_error(logits[row], fresh_logits(model, text)[-1]) < TOLERANCE[dtype]
    for step in range(4):
        tree = random_tree(rng, sizes, width=min(64, max(sizes) + step))
        logits = lm.verify(state, tree)
        assert logits.dtype == dtype
        assert tree_error(model, texts, tree, logits) < TOLERANCE[dtype]
        paths = [random_path(rng, tree, row) for row in range(len(texts))]
        if step == 1:
            paths[-1] = []
        lm.commit(state, *as_commit(paths))
        texts = extended(texts, tree, paths)
        assert state.lengths.tolist() == [*map(len, texts)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_node_equals_an_unbatched_and_unpadded_forward(family: str) -> None:
    rng = random.Random(1)
    model = tiny_model(family)
    lm, texts = patched(model), random_texts(rng, [6, 13])
    state = lm.new_state(2, 64, 16)
    lm.prefill(state, *right_padded(texts))
    tree = random_tree(rng, [6, 9])
    logits = lm.verify(state, tree)
    for row in range(2):
        for node in real_nodes(tree, row):
            text = [*texts[row], *tree.tokens[row, path_to(tree, row, node)].tolist()]
            assert relative_error(logits[row, node], fresh_logits(model, text)[-1]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_memory_is_read_before_it_is_written(family: str, request: pytest.FixtureRequest) -> None:
    rng = random.Random(10)
    model = tiny_model(family)
    lm, texts = patched(model), random_texts(rng, [6, 13])
    state = lm.new_state(2, 64, 16)
    request.getfixturevalue("poisoned_empty")  # from here on; transformers makes its weights with torch.empty
    lm.prefill(state, *right_padded(texts))
    tree = random_tree(rng, [6, 9])
    lm.verify(state, tree)
    paths = [random_path(rng, tree, row) for row in range(2)]
    lm.commit(state, *as_commit(paths))
    texts = extended(texts, tree, paths)
    logits = lm.verify(state, tree)
    assert tree_error(model, texts, tree, logits) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("family", FAMILIES)
def test_verifying_twice_is_bit_equal_and_leaves_the_state_alone(family: str) -> None:
    rng = random.Random(2)
    lm, texts = patched(tiny_model(family)), random_texts(rng, [5, 9])
    state = lm.new_state(2, 64, 32)
    lm.prefill(state, *right_padded(texts))
    tree, other = random_tree(rng, [20, 11]), random_tree(rng, [32, 30])
    once = lm.verify(state, tree)
    lm.verify(state, other)
    again = lm.verify(state, tree)
    for row in range(2):
        assert torch.equal(once[row, real_nodes(tree, row)], again[row, real_nodes(tree, row)])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_verified_in_pieces_equals_one_call(family: str, dtype: torch.dtype) -> None:
    rng = random.Random(3)
    model = tiny_model(family, dtype)
    lm, texts = patched(model), random_texts(rng, [4, 12, 7])
    state = lm.new_state(3, 64, 32)
    lm.prefill(state, *right_padded(texts))
    for _ in range(2):
        tree = random_tree(rng, [24, 9, 2], width=25)
        whole = lm.verify(state.clone(), tree)
        pieces, first = [], 0
        for end in (1, 2, 9, 10, 25):
            part = TokenTree(tree.tokens[:, :end], tree.parents[:, :end])
            pieces.append(lm.verify(state, part, first=first))
            first = end
        logits = torch.cat(pieces, 1)
        assert tree_error(model, texts, tree, logits) < TOLERANCE[dtype]
        for row in range(3):
            nodes = real_nodes(tree, row)
            assert relative_error(logits[row, nodes], whole[row, nodes]) < TOLERANCE[dtype]
        paths = [path_to(tree, row, real_nodes(tree, row)[-1]) for row in range(3)]
        lm.commit(state, *as_commit(paths))
        texts = extended(texts, tree, paths)


@pytest.mark.parametrize("family", FAMILIES)
def test_growing_a_tree_keeps_the_first_piece_when_a_later_piece_is_replaced(family: str) -> None:
    rng = random.Random(4)
    model = tiny_model(family)
    lm, texts = patched(model), random_texts(rng, [9])
    state = lm.new_state(1, 64, 32)
    lm.prefill(state, *right_padded(texts))
    tree = random_tree(rng, [12])
    lm.verify(state, tree)
    tokens = tree.tokens.clone()
    tokens[:, 5:] = (tokens[:, 5:] + 1) % 97
    other = TokenTree(tokens, tree.parents)
    logits = lm.verify(state, other, first=5)
    assert tree_error(model, texts, other, logits, first=5) < TOLERANCE[torch.float32]
    path = path_to(other, 0, 11)
    lm.commit(state, *as_commit([path]))
    texts = extended(texts, other, [path])
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_equals_sequential_one_node_decoding(family: str, dtype: torch.dtype) -> None:
    rng = random.Random(5)
    lm, texts = patched(tiny_model(family, dtype)), random_texts(rng, [10, 2])
    state = lm.new_state(2, 64, 16)
    lm.prefill(state, *right_padded(texts))
    sequential = state.clone()
    tokens = torch.tensor(random_texts(rng, [13, 13]))
    logits = lm.verify(state, TokenTree.chain(tokens))
    for node in range(13):
        one = lm.verify(sequential, TokenTree(tokens[:, node : node + 1], torch.full((2, 1), -1)))
        assert relative_error(one[:, 0], logits[:, node]) < TOLERANCE[dtype]
        lm.commit(sequential, *as_commit([[0], [0]]))
    lm.commit(state, *as_commit([[*range(13)]] * 2))
    probe = random_tree(rng, [5, 5])
    assert relative_error(lm.verify(state, probe), lm.verify(sequential, probe)) < TOLERANCE[dtype]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_state_scores_a_text_from_its_first_token(family: str) -> None:
    rng = random.Random(6)
    model = tiny_model(family)
    lm = patched(model)
    state = lm.new_state(2, 32, 16)
    tree = random_tree(rng, [9, 5])
    assert tree_error(model, [[], []], tree, lm.verify(state, tree)) < TOLERANCE[torch.float32]
    paths = [path_to(tree, row, real_nodes(tree, row)[-1]) for row in range(2)]
    lm.commit(state, *as_commit(paths))
    texts = extended([[], []], tree, paths)
    assert tree_error(model, texts, tree, lm.verify(state, tree)) < TOLERANCE[torch.float32]


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2-projection-bias": ("mamba2", {"use_bias": True}),
    "bamba-projection-bias": ("bamba", {"mamba_proj_bias": True}),
    "mamba2-no-conv-bias": ("mamba2", {"use_conv_bias": False}),
    "mamba2-dt-limit": ("mamba2", {"time_step_limit": (0.3, 0.6)}),
    "bamba-dt-limit": ("bamba", {"time_step_limit": (0.3, 0.6)}),
    "mamba2-conv2-group1": ("mamba2", {"conv_kernel": 2, "n_groups": 1}),
    "mamba2-wide-filter": ("mamba2", {"conv_kernel": 7}),
    "bamba-only-attention": ("bamba", {"attn_layer_indices": [0, 1, 2]}),
    "bamba-attention-first": ("bamba", {"attn_layer_indices": [0]}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-headdim-of-its-own": ("llama", {"head_dim": 24}),
}


@pytest.mark.parametrize(("family", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_variants_of_a_family_are_exact(family: str, changes: dict[str, Any], dtype: torch.dtype) -> None:
    rng = random.Random(7)
    model = tiny_model(family, dtype, **changes)
    lm, texts = patched(model), random_texts(rng, [10, 3, 1])
    state = lm.new_state(3, 64, 16)
    logits = lm.prefill(state, *right_padded(texts))
    for row, text in enumerate(texts):
        assert relative_error(logits[row], fresh_logits(model, text)[-1]) < TOLERANCE[dtype]
    check_steps(model, lm, state, texts, (rng, [12, 16, 2]), TOLERANCE[dtype])


@pytest.mark.parametrize("family", FAMILIES)
def test_control_a_tree_read_as_a_chain_is_far_off(family: str) -> None:
    rng = random.Random(8)
    model = tiny_model(family)
    lm, texts = patched(model), random_texts(rng, [9])
    state = lm.new_state(1, 64, 16)
    lm.prefill(state, *right_padded(texts))
    tree = random_tree(rng, [16])
    wrong = lm.verify(state, TokenTree.chain(tree.tokens))
    assert tree_error(model, texts, tree, wrong) > 1000 * TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("family", "tensors"),
    [("mamba2", ["state"]), ("mamba2", ["window"]), ("bamba", ["state"]), ("bamba", ["keys"]), ("llama", ["values"])],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_control_a_zeroed_state_is_far_off(family: str, tensors: list[str]) -> None:
    rng = random.Random(9)
    model = tiny_model(family)
    lm, texts = patched(model), random_texts(rng, [9])
    state = lm.new_state(1, 64, 16)
    lm.prefill(state, *right_padded(texts))
    tree = random_tree(rng, [8])
    lm.verify(state, tree)
    path = path_to(tree, 0, 7)
    lm.commit(state, *as_commit([path]))
    texts = extended(texts, tree, [path])
    for stack in state.stacks.values():
        for name in tensors:
            if hasattr(stack, name):
                getattr(stack, name).zero_()
    assert tree_error(model, texts, tree, lm.verify(state, tree)) > 1000 * TOLERANCE[torch.float32]
