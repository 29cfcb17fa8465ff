"""Trees of every shape on a model with Mamba-2 and attention, compared with fresh forwards of prompt + path.

`test_families.py` runs fewer shapes on every family.
"""

from __future__ import annotations

import pytest
import torch
from helpers.family_states import Decoding
from helpers.tiny_models import (
    FAMILIES,
    TOLERANCE,
    path_to,
    random_path,
    random_tree,
    tiny_model,
    tree_error,
)

from stree import TokenTree

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
    for step in range(4):
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
