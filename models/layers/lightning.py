"""Adapter of lightning attention (MiniMax-01, arXiv 2501.08313): the Mamba-2 recurrence with a constant decay per head.

x are values, B keys, C queries; every step size is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stree.kernels import ops
from stree.models.layers.base import LayerSpec, LayerStack, Placement, Prefilled, Zeros, state_dtype
from stree.models.layers.mixer_patch import patch_mixer
from stree.models.tree_step import TreeStep

__all__ = ["LightningSpec", "LightningStack", "lightning_cache", "patch_lightning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningSpec(LayerSpec):
    """Sizes of a lightning attention layer."""

    kind: ClassVar[str] = "lightning attention"

    heads: int
    headdim: int

    def allocate(self, layers: int, batch: int, max_length: int, max_nodes: int) -> LightningStack:
        """Allocate zeroed tensors for ``layers`` layers."""
        zeros = Zeros((layers, batch), self.dtype, self.device)
        wide = state_dtype(self.dtype)
        return LightningStack(
            spec=self,
            state=zeros(self.heads, self.headdim, self.headdim, dtype=wide),
            stash_vkq=zeros(max_nodes, 3 * self.heads * self.headdim),
            stash_dt=zeros(max_nodes, self.heads, dtype=wide),
            A=torch.zeros(layers, self.heads, dtype=wide, device=self.device),
        )


@dataclass(frozen=True, eq=False)
class LightningStack(LayerStack):
    """Lightning attention layers: [layers, batch, ...].

    Attributes:
        spec: the sizes.
        state: float32[heads, headdim of v, headdim of k], the transpose of transformers'.
        stash_vkq: float[max_nodes, 3 * heads * headdim], values, keys, queries.
        stash_dt: float32[max_nodes, heads], ones at verified nodes.
        A: float32[heads], log decays, the same for all sequences.
    """

    weights: ClassVar[frozenset[str]] = frozenset({"A"})
    shared: ClassVar[tuple[str, ...]] = ("stash_vkq", "stash_dt")

    spec: LightningSpec
    state: Tensor
    stash_vkq: Tensor
    stash_dt: Tensor
    A: Tensor

    def commit(self, path: Tensor, path_lengths: Tensor, lengths: Tensor) -> None:
        """Apply the paths to the states."""
        layers, batch = self.state.shape[:2]
        v, k, _ = self.stash_vkq.flatten(0, 1).unflatten(-1, (3, self.spec.heads, self.spec.headdim)).unbind(2)
        dt, A = self.stash_dt.flatten(0, 1), self.A.repeat_interleave(batch, 0)
        path, path_lengths = path.repeat(layers, 1), path_lengths.repeat(layers)
        ops.ssd_commit(self.state.flatten(0, 1), v, dt, A, k, path, path_lengths)

    def bind(self, slot: int, mixer: Any) -> None:
        """Copy the decays."""
        self.A[slot].copy_(-mixer.slope_rate.flatten())

    def load(self, slot: int, prefilled: Prefilled) -> None:
        """Copy the state."""
        self.state[slot].copy_(prefilled.cache.get_linear_cache(prefilled.layer).transpose(-1, -2))


def lightning_cache(_: Any) -> Any:
    """Make the cache class that MiniMax requires."""
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    return MiniMaxCache()


def patch_lightning(mixer: Any, placement: Placement) -> LightningSpec:
    """Make lightning attention score trees when it is called with a ``TreeStep``; return its sizes."""
    patch_mixer(mixer, _forward)
    return LightningSpec(heads=mixer.num_attention_heads, headdim=mixer.head_dim, **placement)


def _forward(mixer: Any, step: TreeStep, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    """Score a tree."""
    layer = step.state.layers[mixer.layer_idx, LightningSpec]
    heads, headdim = layer.spec.heads, layer.spec.headdim
    qkv = mixer.act_fn(mixer.qkv_proj(hidden_states)).unflatten(-1, (heads, 3 * headdim))
    q, k, v = qkv.split(headdim, dim=-1)
    vkq = torch.cat((v.flatten(2), k.flatten(2), q.flatten(2)), dim=-1)
    y = ops.ssd_step(
        layer.state, layer.stash_vkq, layer.stash_dt, step.entries, None, vkq,
        vkq.new_zeros(*vkq.shape[:2], heads), layer.A, None, step.topology, headdim=headdim, ngroups=heads,
        dt_limit=(1.0, 1.0), first=step.first, previous=step.deferred_rows.get((mixer.layer_idx, LightningSpec)),
    )  # fmt: skip
    y = torch.sigmoid(mixer.output_gate(hidden_states)) * mixer.norm(y.flatten(2))
    return mixer.out_proj(y), None
