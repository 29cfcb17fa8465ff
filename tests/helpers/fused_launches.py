"""Counts of fused launches, and a tree verified with or without fused layers."""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import pytest
from torch import Tensor

from helpers.on_device import treat_as_on_device
from helpers.tiny_models import (
    as_commit,
    random_texts,
    random_tree,
    right_padded,
)
from stree import TokenTree, TreeLM
from stree.kernels import ops

FUSED_OPS = ("rms_norm", "rms_norm_add", "gated_activation", "rotary", "experts")


def count_fused_launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Make "auto" mean Triton for fused operations and count their calls."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> Any:
        real = getattr(ops, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return real(*args, **kwargs)

        return run

    for name in FUSED_OPS:
        monkeypatch.setattr(ops, name, counted(name))
    treat_as_on_device(monkeypatch, host_can_read=True, operations=FUSED_OPS)
    return counts


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
