"""Adapter of attention: transformers' attention module with its attention function replaced by tree attention.

Norms, rotary positions, gates and projections stay transformers' code.  Trees run a copy of each attention module that
shares its weights and has this file's function as attention implementation; plain calls run the module itself.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AttentionInterface

from stree.kernels import ops
from stree.models.fused.fused_layers import with_fused_rotary
from stree.models.layers.base import LayerSpec, LayerStack, Placement, Prefilled, Zeros
from stree.models.layers.mixer_patch import patch_mixer
from stree.models.patching import num_local_outputs
from stree.models.tree_step import TreeStep

__all__ = ["KvSpec", "KvStack", "patch_attention", "patch_with_copy", "shifted_left"]

IMPLEMENTATION = "stree"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpec(LayerSpec):
    """Sizes of an attention layer's cache."""

    kind: ClassVar[str] = "attention"

    kv_heads: int
    headdim: int

    def allocate(self, layers: int, batch: int, max_length: int, max_nodes: int) -> KvStack:
        """Allocate zeroed tensors for ``layers`` layers."""
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
        keys, values, stash_keys, stash_values = (tensor.flatten(0, 1) for _, tensor in self.tensors())
        ops.kv_commit(keys, values, lengths, stash_keys, stash_values, path, path_lengths)

    def load(self, slot: int, prefilled: Prefilled) -> None:
        """Copy keys and values, moved left by the padding."""
        cache_layer = prefilled.cache.layers[prefilled.layer]
        length = cache_layer.get_seq_length()
        for mine, theirs in ((self.keys, cache_layer.keys), (self.values, cache_layer.values)):
            mine[slot, :, :, :length] = shifted_left(theirs, prefilled.padding, length)

    def store(self, slot: int, cache: Any, layer: int, length: int) -> None:
        """Copy keys and values."""
        cache.update(self.keys[slot, :, :, :length], self.values[slot, :, :, :length], layer)


def shifted_left(rows: Tensor, padding: Tensor, length: int) -> Tensor:
    """Move the rows of a cache of left-padded prompts left by the padding.

    Rows past a prompt's length, and those that a sliding window has dropped, repeat another row: no node reads them.

    Args:
        rows: float[batch, kv_heads, cached, c], the newest of ``length``.
        padding: int64[batch], columns of padding.
        length: columns of the padded prompts.

    Returns:
        float[batch, kv_heads, length, c].
    """
    cached = rows.shape[2]
    index = torch.arange(length, device=padding.device) + padding[:, None] - (length - cached)
    return rows.take_along_dim(index.clamp_(0, cached - 1)[:, None, :, None].to(rows.device), dim=2)


def patch_attention(attention: Any, placement: Placement) -> KvSpec:
    """Make an attention module score trees when it is called with a ``TreeStep``; return its sizes."""
    rows, headdim = num_local_outputs(attention, "k_proj"), attention.head_dim
    if rows % headdim:
        raise NotImplementedError(
            f"the key and value heads of {type(attention).__name__} do not divide evenly among the processes of its "
            f"tp_plan: {rows} rows for heads of {headdim}; use fewer processes"
        )
    patch_with_copy(attention, IMPLEMENTATION)
    return KvSpec(kv_heads=rows // headdim, headdim=headdim, **placement)


def patch_with_copy(attention: Any, implementation: str) -> Any:
    """Make a copy of an attention module run a registered attention function when the cache is a ``TreeStep``.

    Returns:
        the copy, which shares parameters and submodules.

    Raises:
        NotImplementedError: the module is not causal.
    """
    if not getattr(attention, "is_causal", True):
        raise NotImplementedError(f"{type(attention).__name__} is not causal; only causal attention can be patched")
    tree_copy = copy.copy(attention)
    tree_copy.__dict__.pop("forward", None)
    tree_copy.config = copy.copy(attention.config)
    tree_copy.config._attn_implementation_internal = implementation
    with_fused_rotary(type(attention).forward)  # reads the device once for a class: now, not inside a step
    patch_mixer(attention, partial(_forward, tree_copy))
    return tree_copy


def _forward(tree_copy: Any, attention: Any, step: TreeStep, *args: Any, **kwargs: Any) -> Any:
    """Run the class's forward on the copy, with rotary positions in one launch."""
    kwargs["attention_mask"] = step  # reaches the implementation as its attention_mask
    return with_fused_rotary(type(attention).forward)(tree_copy, *args, **kwargs)


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
        module: the attention module's copy.
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
