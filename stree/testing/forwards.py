"""Random token trees, and their logits by forwards of whole texts without a cache, which no adapter takes part in."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stree.tree import TokenTree

__all__ = [
    "as_commit",
    "extended",
    "fresh_logits",
    "fresh_node_logits",
    "path_to",
    "random_tree",
    "real_nodes",
    "relative_error",
    "right_padded",
    "tree_error",
]


def right_padded(texts: Sequence[Sequence[int]], padding: int = 0) -> tuple[Tensor, Tensor]:
    """Return int64[batch, longest] tokens and int64[batch] lengths."""
    width = max(map(len, texts))
    rows = [[*text, *[padding] * (width - len(text))] for text in texts]
    return torch.tensor(rows), torch.tensor([len(text) for text in texts])


def random_tree(rng: random.Random, vocab: int, sizes: Sequence[int], width: int | None = None) -> TokenTree:
    """Draw a tree a sequence with so many nodes, in ``width`` columns; padding may be anywhere but at the root."""
    width = max(sizes) if width is None else width
    tokens, parents = torch.zeros(len(sizes), width, dtype=torch.int64), torch.full((len(sizes), width), -1)
    for row, size in enumerate(sizes):
        nodes = [0, *sorted(rng.sample(range(1, width), size - 1))]
        for place, node in enumerate(nodes):
            tokens[row, node] = rng.randrange(vocab)
            if place:  # half of the nodes go on from the newest, so that trees are deep as well as wide
                parents[row, node] = nodes[place - 1] if rng.random() < 0.5 else rng.choice(nodes[:place])
    return TokenTree(tokens, parents.int())


def real_nodes(tree: TokenTree, row: int) -> list[int]:
    """List the nodes of a row that are not padding."""
    return [node for node, parent in enumerate(tree.parents[row].tolist()) if node == 0 or parent >= 0]


def path_to(tree: TokenTree, row: int, node: int) -> list[int]:
    """Walk from a node up; list the nodes from the root down."""
    parents, path = tree.parents[row].tolist(), [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def as_commit(paths: Sequence[Sequence[int]], filler: int = -1) -> tuple[Tensor, Tensor]:
    """Return int32[batch, m] paths, filled up past their ends, and int32[batch] lengths."""
    width = max(map(len, paths))
    rows = [[*path, *[filler] * (width - len(path))] for path in paths]
    return torch.tensor(rows, dtype=torch.int32).view(len(paths), width), torch.tensor(
        [*map(len, paths)], dtype=torch.int32
    )


def extended(texts: Sequence[Sequence[int]], tree: TokenTree, paths: Sequence[Sequence[int]]) -> list[list[int]]:
    """Append the tokens along a path to every text."""
    return [
        [*text, *tree.tokens[row, list(path)].tolist()]
        for row, (text, path) in enumerate(zip(texts, paths, strict=True))
    ]


@torch.no_grad()
def fresh_logits(model: Any, text: Sequence[int]) -> Tensor:
    """Run one whole text without a cache: logits [length, vocab]."""
    logits: Tensor = model(torch.tensor([list(text)]), use_cache=False).logits[0]
    return logits


@torch.no_grad()
def fresh_node_logits(model: Any, text: Sequence[int], tree: TokenTree, row: int) -> Tensor:
    """Run text + path for every node of a row, in one batch, and take each one's last logits: [nodes, vocab].

    Texts are filled up on the right, where a causal model cannot look.
    """
    texts = [[*text, *tree.tokens[row, path_to(tree, row, node)].tolist()] for node in real_nodes(tree, row)]
    tokens, lengths = right_padded(texts)
    logits: Tensor = model(tokens, use_cache=False).logits[torch.arange(len(texts)), lengths - 1]
    return logits


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, of the largest expected magnitude; infinite where a value is not finite."""
    if actual.shape != expected.shape:
        raise AssertionError(f"got {[*actual.shape]}, expected {[*expected.shape]}")
    error = float((actual - expected).abs().max() / expected.abs().max())
    return error if bool(actual.isfinite().all()) else math.inf


def tree_error(model: Any, texts: Sequence[Sequence[int]], tree: TokenTree, logits: Tensor, first: int = 0) -> float:
    """Return the largest error of tree logits [batch, n - first, vocab] at nodes first.. that are not padding."""
    errors = [0.0]
    for row, text in enumerate(texts):
        nodes = real_nodes(tree, row)
        kept = [place for place, node in enumerate(nodes) if node >= first]
        if kept:
            expected = fresh_node_logits(model, text, tree, row)[kept]
            errors.append(relative_error(logits[row, [nodes[place] - first for place in kept]], expected))
    return max(errors)
