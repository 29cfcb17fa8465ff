"""Tiny random models and trees, and the oracle of exactness: transformers' forward of a whole text without a cache.

Weights are drawn so that errors of any part are visible: wide matrices, perturbed vectors and slow decays, for with
the default ones a state is forgotten within a few tokens, and an error in it would not show.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
)

from stree import TokenTree, TreeLM

FAMILIES = ("mamba2", "bamba", "llama")
VOCAB = 97

# Of the largest logit.  Sums run in another order than transformers' over a few dozen terms and a few layers; measured
# errors are below 4e-6 in float32 and 2e-14 in float64, those of the negative controls above 0.8.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}

_IDS: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None}
_SHARED: dict[str, Any] = {**_IDS, "hidden_size": 32, "initializer_range": 0.1}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}


def tiny_config(family: str, **changes: Any) -> Any:
    """Make the config of a model of two or three layers; chunks of 8 tokens, so that prompts cross their borders."""
    if family == "mamba2":
        sizes = {
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 2,
            "chunk_size": 8,
        }
        return Mamba2Config(**{**_SHARED, **sizes, "expand": 2, **changes})
    if family == "bamba":
        heads = {
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 8,
        }
        layers = {"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_expand": 2, "tie_word_embeddings": False}
        return BambaConfig(**{**_SHARED, **_HEADS, **heads, **layers, **changes})
    assert family == "llama", f"no tiny model of family {family}"
    return LlamaConfig(**{**_SHARED, **_HEADS, "num_hidden_layers": 2, **changes})


def tiny_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Make an unpatched model; the same arguments return the same weights."""
    classes = {"mamba2": Mamba2ForCausalLM, "bamba": BambaForCausalLM, "llama": LlamaForCausalLM}
    torch.manual_seed(seed)
    model = classes[family](tiny_config(family, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.rand(parameter.shape) * 3 - 3)
            elif parameter.dim() >= 2:
                parameter.mul_(3)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.to(dtype)


def patched(model: PreTrainedModel) -> TreeLM:
    """Patch a deep copy, so that the model itself stays an oracle."""
    return TreeLM(copy.deepcopy(model))


def random_texts(rng: random.Random, lengths: Sequence[int]) -> list[list[int]]:
    """Draw texts of some lengths."""
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def right_padded(texts: Sequence[Sequence[int]], padding: int = 0) -> tuple[Tensor, Tensor]:
    """Return int64[batch, longest] tokens and int64[batch] lengths."""
    width = max(map(len, texts))
    rows = [[*text, *[padding] * (width - len(text))] for text in texts]
    return torch.tensor(rows), torch.tensor([len(text) for text in texts])


def random_tree(rng: random.Random, sizes: Sequence[int], width: int | None = None) -> TokenTree:
    """Draw a tree a sequence with so many nodes, in ``width`` columns; padding may be anywhere but at the root."""
    width = max(sizes) if width is None else width
    tokens, parents = torch.zeros(len(sizes), width, dtype=torch.int64), torch.full((len(sizes), width), -1)
    for row, size in enumerate(sizes):
        nodes = [0, *sorted(rng.sample(range(1, width), size - 1))]
        for place, node in enumerate(nodes):
            tokens[row, node] = rng.randrange(VOCAB)
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


def random_path(rng: random.Random, tree: TokenTree, row: int) -> list[int]:
    """Draw a node that is not padding and return the path to it."""
    return path_to(tree, row, rng.choice(real_nodes(tree, row)))


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
def fresh_logits(model: PreTrainedModel, text: Sequence[int]) -> Tensor:
    """Run one whole text without a cache: logits [length, vocab]."""
    logits: Tensor = model(torch.tensor([list(text)]), use_cache=False).logits[0]
    return logits


@torch.no_grad()
def fresh_node_logits(model: PreTrainedModel, text: Sequence[int], tree: TokenTree, row: int) -> Tensor:
    """Run text + path for every node of a row, in one batch, and take each one's last logits: [nodes, vocab].

    Texts are filled up on the right, where a causal model cannot look.
    """
    texts = [[*text, *tree.tokens[row, path_to(tree, row, node)].tolist()] for node in real_nodes(tree, row)]
    tokens, lengths = right_padded(texts)
    logits: Tensor = model(tokens, use_cache=False).logits[torch.arange(len(texts)), lengths - 1]
    return logits


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, of the largest expected magnitude."""
    assert actual.shape == expected.shape, f"got {[*actual.shape]}, expected {[*expected.shape]}"
    assert bool(actual.isfinite().all()), "not all values are finite"
    return float((actual - expected).abs().max() / expected.abs().max())


def tree_error(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], tree: TokenTree, logits: Tensor, first: int = 0
) -> float:
    """Return the largest error of tree logits [batch, n - first, vocab] at nodes first.. that are not padding."""
    errors = [0.0]
    for row, text in enumerate(texts):
        nodes = real_nodes(tree, row)
        kept = [place for place, node in enumerate(nodes) if node >= first]
        if kept:
            expected = fresh_node_logits(model, text, tree, row)[kept]
            errors.append(relative_error(logits[row, [nodes[place] - first for place in kept]], expected))
    return max(errors)
