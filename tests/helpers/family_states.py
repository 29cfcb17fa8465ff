"""A decode state with the texts that it holds, compared with fresh forwards of an unpatched model after every step."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from helpers.tiny_models import (
    TOLERANCE,
    as_commit,
    extended,
    fresh_logits,
    patched,
    path_to,
    random_texts,
    random_tree,
    real_nodes,
    relative_error,
    right_padded,
    tree_error,
)
from stree import TokenTree, TreeLM
from stree.models.state import DecodeState


def rebind_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the float32 that transformers writes into its code by float64, for comparisons in float64."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(RecurrentGemmaRglru._rnn_scan, "__defaults__", (torch.float64,))


class Decoding:
    """A state of some random texts, its TreeLM, and the model whose fresh forwards are the oracle.

    Args:
        model: never patched; the oracle.
        lengths: of the prompts; all 0 for an empty state.
        lm: None to patch a deep copy of the model.
        seed: of texts and trees.
        max_length: of the state, like ``max_nodes`` and ``fixed_shapes``.
        padding: token after the end of a shorter prompt.
        defers_commit: whether commits are deferred; None for the default of the device.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        lengths: Sequence[int],
        *,
        lm: TreeLM | None = None,
        seed: int = 0,
        max_length: int = 96,
        max_nodes: int = 24,
        padding: int = 0,
        defers_commit: bool | None = None,
        fixed_shapes: bool = False,
    ) -> None:
        self.rng, self.model, self.lm = random.Random(seed), model, patched(model) if lm is None else lm
        if defers_commit is not None:
            self.lm.defers_commit = defers_commit
        self.texts = random_texts(self.rng, lengths)
        self.state = self.lm.new_state(len(lengths), max_length, max_nodes, fixed_shapes=fixed_shapes)
        if any(lengths):
            self.logits = self.lm.prefill(self.state, *right_padded(self.texts, padding))

    @property
    def tolerance(self) -> float:
        """Largest relative error in the model's dtype."""
        return TOLERANCE[self.lm.dtype]

    def prompt_error(self) -> float:
        """Return the largest relative error of the logits after the prompts."""
        pairs = zip(self.logits, self.texts, strict=True)
        return max(relative_error(logits, fresh_logits(self.model, text)[-1]) for logits, text in pairs)

    def tree(self, sizes: Sequence[int]) -> TokenTree:
        """Draw a tree."""
        return random_tree(self.rng, sizes)

    def error(self, tree: TokenTree, model: PreTrainedModel | None = None) -> float:
        """Verify a tree and return its error against the oracle or another model."""
        logits = self.lm.verify(self.state, tree)
        assert logits.dtype == (torch.float64 if self.lm.dtype == torch.float64 else torch.float32)
        return tree_error(model or self.model, self.texts, tree, logits)

    def score(self, sizes: Sequence[int]) -> TokenTree:
        """Verify a random tree, require it to be exact, and leave it pending."""
        tree = self.tree(sizes)
        assert self.error(tree) < self.tolerance
        return tree

    def commit(self, tree: TokenTree, paths: Sequence[Sequence[int]], filler: int = -1) -> None:
        """Commit paths of the verified tree."""
        self.lm.commit(self.state, *as_commit(paths, filler))
        self.texts = extended(self.texts, tree, paths)
        assert self.state.lengths.tolist() == [*map(len, self.texts)]

    def step(self, sizes: Sequence[int], empty: int | None = None) -> None:
        """Score a tree and commit the path to its last node; nothing in row ``empty``."""
        tree = self.score(sizes)
        rows = range(len(sizes))
        self.commit(tree, [[] if row == empty else path_to(tree, row, real_nodes(tree, row)[-1]) for row in rows])

    def pieces(self, tree: TokenTree, ends: Sequence[int]) -> Tensor:
        """Verify a tree piece by piece and return the logits of all nodes."""
        parts = zip((0, *ends), ends, strict=False)
        return torch.cat([
            self.lm.verify(self.state, TokenTree(tree.tokens[:, :end], tree.parents[:, :end]), first=first)
            for first, end in parts
        ], 1)  # fmt: skip

    def held_by(self, state: DecodeState, rows: Sequence[int] | None = None) -> Decoding:
        """Return the same for another state, which holds the texts of ``rows``."""
        other = copy.copy(self)
        other.state = state
        other.texts = [self.texts[row] for row in (range(len(self.texts)) if rows is None else rows)]
        return other


def verified(model: Any, *, is_fused: bool, seed: int = 0) -> tuple[Tensor, list[list[int]], TokenTree]:
    """Verify a tree, commit a path and verify another: its logits, the texts before it, and the tree."""
    rng = random.Random(seed)
    lm = TreeLM(copy.deepcopy(model))
    lm.fused_layers = is_fused
    texts = random_texts(rng, [9, 7])
    state = lm.new_state(2, 32, 6)
    lm.prefill(state, *right_padded(texts))
    first, tree = random_tree(rng, [5, 5]), random_tree(rng, [6, 4], 6)
    lm.verify(state, first)
    lm.commit(state, *as_commit([[0], [0]]))
    texts = [[*text, int(first.tokens[row, 0])] for row, text in enumerate(texts)]
    return lm.verify(state, tree), texts, tree
