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
from torch import nn
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
from stree.testing import forwards
from stree.testing.forwards import (
    as_commit,
    extended,
    fresh_logits,
    fresh_node_logits,
    path_to,
    real_nodes,
    relative_error,
    right_padded,
    tree_error,
)

__all__ = [
    "FAMILIES",
    "TOLERANCE",
    "VOCAB",
    "Outer",
    "as_commit",
    "extended",
    "fresh_logits",
    "fresh_node_logits",
    "patched",
    "path_to",
    "random_path",
    "random_texts",
    "random_tree",
    "real_nodes",
    "relative_error",
    "right_padded",
    "tiny_config",
    "tiny_model",
    "tree_error",
]

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


def random_tree(rng: random.Random, sizes: Sequence[int], width: int | None = None) -> TokenTree:
    """Draw a tree a sequence with so many nodes, in ``width`` columns; padding may be anywhere but at the root."""
    return forwards.random_tree(rng, VOCAB, sizes, width)


def random_path(rng: random.Random, tree: TokenTree, row: int) -> list[int]:
    """Draw a node that is not padding and return the path to it."""
    return path_to(tree, row, rng.choice(real_nodes(tree, row)))


class Outer(nn.Module):
    """A model around another one, which has its attributes but for ``base_model``, as peft's ``PeftModel``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)
