"""Long prompts in chunks: the same logits and the same state as in one piece, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.family_states import Decoding
from helpers.tiny_family_models import family_model, matrix
from helpers.tiny_models import (
    TOLERANCE,
    tiny_model,
)

import stree
from stree import TreeLM
from stree.kernels.tiles import MAX_NODES
from stree.kernels.topology import most_nodes
from stree.models import tree_scorer


@pytest.mark.parametrize("family", matrix())
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
    ("chunk_size", "max_nodes", "expected"), [(None, 5, [19]), (19, 5, [19]), (9, 5, [9, 5, 5]), (1, 16, [1, 16, 2])]
)
def test_no_forward_is_wider_than_its_chunk(chunk_size: int | None, max_nodes: int, expected: list[int]) -> None:
    lm = TreeLM(tiny_model("mamba2"))
    widths = Widths(lm.model)
    lm.prefill(lm.new_state(1, 32, max_nodes), torch.arange(19)[None], chunk_size=chunk_size)
    assert widths.seen == expected


def test_the_rest_of_a_prompt_is_cut_to_the_most_nodes_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert most_nodes(torch.device("cuda:1"), torch.bfloat16) == MAX_NODES
    assert most_nodes(torch.device("cuda"), torch.float64) is None is most_nodes(torch.device("cpu"), torch.float32)
    monkeypatch.setattr(tree_scorer, "most_nodes", lambda device, dtype: 4)
    lm = TreeLM(tiny_model("mamba2"))
    widths = Widths(lm.model)
    lm.prefill(lm.new_state(1, 32, 16), torch.arange(19)[None], chunk_size=9)
    assert widths.seen == [9, 4, 4, 2]


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
    with pytest.raises(ValueError, match=f"chunk_size must be at least 1, got {chunk_size}"):
        lm.prefill(lm.new_state(), torch.tensor([[1, 2]]), chunk_size=chunk_size)
