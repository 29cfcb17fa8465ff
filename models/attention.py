"""Attention on a tree: the family's own attention module, with its attention function replaced by tree attention.

Norms, rotary positions, gates and projections stay transformers' code.  A twin of each attention module, which shares
its weights, names our function as attention implementation; the module itself is never changed, so plain calls run what
they always ran.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from stree.kernels import ops
from stree.models.grafting import Zeros, graft_forward
from stree.models.lean import with_lean_rotary
from stree.models.state import LayerSpec, LayerStack, Prefilled, TreeStep

__all__ = ["KvSpec", "KvStack", "graft_attention", "graft_twin"]

IMPLEMENTATION = "stree"


@dataclass(frozen=True, slots=True)
class KvSpec(LayerSpec):
    """Sizes of an attention layer's cache."""

    kv_heads: int
    headdim: int
    dtype: torch.dtype
    device: torch.device

    def allocate(self, layers: int, batch: int, max_length: int, max_nodes: int) -> KvStack:
        """Make zeroed tensors for some layers."""
        zeros = Zeros((layers, batch), self.dtype, self.device)
        cache, stash = (self.kv_heads, max_length, self.headdim), (max_nodes, self.kv_heads, self.headdim)
        return KvStack(zeros(*cache), zeros(*cache), zeros(*stash), zeros(*stash))


@dataclass(frozen=True, eq=False)
class KvStack(LayerStack):
    """Attention layers: [layers, batch, ...].

    Attributes:
        keys: float[kv_heads, max_length, headdim], committed, rotated where the family rotates.
        values: float[kv_heads, max_length, headdim].
        stash_keys: float[max_nodes, kv_heads, headdim], of the pending tree.
        stash_values: float[max_nodes, kv_heads, headdim].
    """

    keys: Tensor
    values: Tensor
    stash_keys: Tensor
    stash_values: Tensor

    def commit(self, path: Tensor, path_lengths: Tensor, lengths: Tensor) -> None:
        """Append the paths' rows."""
        keys, values, stash_keys, stash_values = (tensor.flatten(0, 1) for _, tensor in self._tensors())
        ops.kv_commit(keys, values, lengths, stash_keys, stash_values, path, path_lengths)

    def load(self, slot: int, prefilled: Prefilled) -> None:
        """Take over keys and values, moved left by the padding.

        Rows past a length, and those that a sliding window has dropped, become whatever is at hand: no node reads them.
        """
        cache_layer = prefilled.cache.layers[prefilled.layer]
        length, kept = cache_layer.get_seq_length(), cache_layer.keys.shape[2]
        rows = torch.arange(length, device=prefilled.padding.device) + prefilled.padding[:, None] - (length - kept)
        rows = rows.clamp_(0, kept - 1)[:, None, :, None]
        for mine, theirs in ((self.keys, cache_layer.keys), (self.values, cache_layer.values)):
            mine[slot, :, :, :length] = theirs.take_along_dim(rows.to(theirs.device), dim=2)


def graft_attention(attention: Any) -> KvSpec:
    """Make an attention module score trees when it is called with a ``TreeStep``; return its sizes."""
    graft_twin(attention, IMPLEMENTATION)
    weight = attention.k_proj.weight
    return KvSpec(weight.shape[0] // attention.head_dim, attention.head_dim, weight.dtype, weight.device)


def graft_twin(attention: Any, implementation: str) -> Any:
    """Give an attention module a twin that runs a registered attention function when the cache is a ``TreeStep``.

    Raises:
        NotImplementedError: the module lets tokens look ahead.
    """
    if not getattr(attention, "is_causal", True):
        raise NotImplementedError(f"{type(attention).__name__} is not causal; only causal attention can be grafted")
    twin = copy.copy(attention)  # shares parameters and submodules
    twin.config = copy.copy(attention.config)
    twin.config._attn_implementation_internal = implementation
    attention.__dict__["tree_twin"] = twin  # not through setattr: it must not become a submodule
    graft_forward(attention, _forward)
    return twin


def _forward(attention: Any, step: TreeStep, *args: Any, **kwargs: Any) -> Any:
    """Run the class's own forward on the twin, with rotary positions in one launch."""
    kwargs["attention_mask"] = step  # reaches the implementation as its attention_mask
    return with_lean_rotary(type(attention).forward)(attention.tree_twin, *args, **kwargs)


def tree_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: TreeStep,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend from new nodes to the committed context and to their ancestors (transformers' attention signature).

    Args:
        module: the attention module's twin.
        query: float[batch, heads, n - first, headdim].
        key: float[batch, kv_heads, n - first, headdim], new rows only.
        value: the same.
        attention_mask: the ``TreeStep`` put there by the adapter.
        scaling: factor of the scores.
        sliding_window: most positions that a node sees, itself included.
        softcap: bound of the scores.

    Returns:
        float[batch, n - first, heads, headdim], and None for the weights.
    """
    step = attention_mask
    layer = step.state.layers[step.attending, KvSpec]
    out = ops.attention_step(
        layer.keys[:, :, : step.length_bound], layer.values[:, :, : step.length_bound], step.state.lengths,
        layer.stash_keys, layer.stash_values, None, None,
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), step.topology,
        scale=scaling, window=sliding_window, softcap=softcap, first=step.first,
    )  # fmt: skip
    return out, None


AttentionInterface.register(IMPLEMENTATION, tree_attention_forward)
