"""Adapter of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), whose cache holds latents.

Keys and values are linear in the latents, so their projection is applied to the queries and to the outputs instead, and
attention runs over the latents with one key and value head: no step expands the committed context.  Queries, norms and
rotary positions stay transformers' code, run by a copy of the module that does not expand latents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AttentionInterface

from stree.kernels import ops
from stree.models.layers.attention import patch_with_copy, shifted_left
from stree.models.layers.base import LayerSpec, LayerStack, Placement, Prefilled, Zeros
from stree.models.patching import is_linear
from stree.models.tree_step import TreeStep

__all__ = ["LatentSpec", "LatentStack", "patch_mla"]

IMPLEMENTATION = "stree_latent"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec(LayerSpec):
    """Sizes of a latent attention layer's cache."""

    kind: ClassVar[str] = "latent attention"

    rank: int
    rotary: int

    def allocate(self, layers: int, batch: int, max_length: int, max_nodes: int) -> LatentStack:
        """Allocate zeroed tensors for ``layers`` layers."""
        zeros, width = Zeros((layers, batch), self.dtype, self.device), self.rank + self.rotary
        return LatentStack(self, zeros(1, max_length, width), zeros(max_nodes, 1, width))


@dataclass(frozen=True, eq=False)
class LatentStack(LayerStack):
    """Latent attention layers: [layers, batch, ...].

    Attributes:
        spec: the sizes.
        keys: float[1, max_length, rank + rotary], the latent, then the part of the key that all heads share, rotated
            where the family rotates; its first ``rank`` columns are the values, too.
        stash_keys: float[max_nodes, 1, rank + rotary], of the pending tree.
    """

    spec: LatentSpec
    keys: Tensor
    stash_keys: Tensor

    def commit(self, path: Tensor, path_lengths: Tensor, lengths: Tensor) -> None:
        """Append the paths' rows."""
        keys, stash_keys, rank = self.keys.flatten(0, 1), self.stash_keys.flatten(0, 1), self.spec.rank
        ops.kv_commit(keys, keys[..., :rank], lengths, stash_keys, stash_keys[..., :rank], path, path_lengths)

    def load(self, slot: int, prefilled: Prefilled) -> None:
        """Copy the latents, moved left by the padding."""
        cache_layer = prefilled.cache.layers[prefilled.layer]
        latents = torch.cat((cache_layer.keys, cache_layer.values), dim=-1)
        length = latents.shape[2]
        self.keys[slot, :, :, :length] = shifted_left(latents, prefilled.padding, length)

    def store(self, slot: int, cache: Any, layer: int, length: int) -> None:
        """Copy the latents and the rotated parts."""
        latents = self.keys[slot, :, :, :length]
        cache.update(latents[..., : self.spec.rank], latents[..., self.spec.rank :], layer)


def patch_mla(attention: Any, placement: Placement) -> LatentSpec:
    """Make a latent attention module score trees when it is called with a ``TreeStep``; return its sizes."""
    patch_with_copy(attention, IMPLEMENTATION).expand_kv = _latents
    return LatentSpec(rank=attention.kv_lora_rank, rotary=attention.qk_rope_head_dim, **placement)


def _latents(latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Replace transformers' expansion of float[batch, 1, n, rank] latents: keys and values of one head."""
    return torch.cat((latent, rotary), dim=-1), latent


def latent_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: TreeStep,
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend from new nodes to latents of the committed context and of their ancestors.

    Args:
        module: the attention module's copy.
        query: float[batch, heads, n - first, nope + rotary].
        key: float[batch, 1, n - first, rank + rotary], new rows only.
        value: float[batch, 1, n - first, rank].
        attention_mask: the ``TreeStep`` put there by the adapter.
        scaling: factor of the scores.

    Returns:
        float[batch, n - first, heads, headdim of the values], and None for the weights.
    """
    step, nope = attention_mask, module.qk_nope_head_dim
    layer = step.state.layers[step.attending, LatentSpec]
    rank, keys = layer.spec.rank, layer.keys[:, :, : step.length_bound]
    matrix, bias = _linear(module.kv_b_proj)
    expand = matrix.unflatten(0, (query.shape[1], -1))  # [heads, nope + values, rank]
    query = torch.cat((query[..., :nope] @ expand[:, :nope], query[..., nope:]), dim=-1)
    out = ops.attention_step(
        keys, keys[..., :rank], step.state.lengths, layer.stash_keys, layer.stash_keys[..., :rank], None, None,
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), step.topology,
        scale=scaling, first=step.first,
    )  # fmt: skip
    out = torch.einsum("bnhr,hvr->bnhv", out, expand[:, nope:])
    if bias is not None:  # the bias of the keys adds the same to all scores of a query
        out = out + bias.unflatten(0, (query.shape[1], -1))[:, nope:]
    return out, None


def _linear(projection: Any) -> tuple[Tensor, Tensor | None]:
    """Return matrix float[out, in] and bias of a projection; those of a wrapped one (LoRA) are found by running it."""
    weight = projection.weight
    if is_linear(projection):
        return weight, projection.bias
    unit = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
    rows = projection(torch.cat((torch.zeros_like(unit[:1]), unit)))
    return (rows[1:] - rows[0]).T, rows[0]


AttentionInterface.register(IMPLEMENTATION, latent_attention_forward)
