"""States of any family: prefilled, or advanced by a commit; and float64 throughout."""

from __future__ import annotations

import random

import pytest
import torch
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from helpers.tiny_models import (
    as_commit,
    extended,
    path_to,
    random_texts,
    random_tree,
    right_padded,
)
from stree import TreeLM
from stree.models.state import DecodeState


def rebind_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what transformers writes into its code as float32 float64, or a float64 test could show nothing."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(RecurrentGemmaRglru._rnn_scan, "__defaults__", (torch.float64,))


def prefilled(lm: TreeLM, texts: list[list[int]]) -> DecodeState:
    """Give a state that holds the texts."""
    state = lm.new_state(len(texts), 64, 16)
    lm.prefill(state, *right_padded(texts))
    return state


def advanced(lm: TreeLM, rng: random.Random, lengths: list[int]) -> tuple[DecodeState, list[list[int]]]:
    """Give a state that holds random prompts and a committed path each, and the texts."""
    texts = random_texts(rng, lengths)
    state = prefilled(lm, texts)
    tree = random_tree(rng, [8] * len(texts))
    lm.verify(state, tree)
    paths = [path_to(tree, row, 7) for row in range(len(texts))]
    lm.commit(state, *as_commit(paths))
    return state, extended(texts, tree, paths)
