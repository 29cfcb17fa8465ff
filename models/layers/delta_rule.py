"""Adapter of gated delta rules: gated DeltaNet (arXiv 2412.06464) and Kimi delta attention (arXiv 2510.26692).

Both convolve q, k and v together, normalise q and k, and gate a normed output; KDA has a decay per key channel and a
module that computes it.  The projections differ by family and are recognised by their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from stree.kernels import ops
from stree.models.layers.base import LayerSpec, Placement, Zeros, state_dtype
from stree.models.layers.convolution import RecurrentStack
from stree.models.layers.mixer_patch import patch_mixer
from stree.models.patching import num_features
from stree.models.tree_step import TreeStep

__all__ = ["DeltaSpec", "DeltaStack", "patch_delta_rule"]

EPSILON = 1e-6  # of the normalisation of q and k, the same in all families

Columns = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec(LayerSpec):
    """Sizes of a gated delta layer; ``per_channel`` says whether every key channel has its decay (KDA)."""

    kind: ClassVar[str] = "gated delta rule"
    before_convolution: ClassVar[tuple[str, ...]] = ("in_proj_qkvz", "in_proj_qkv", "q_proj", "k_proj", "v_proj")

    key_heads: int
    heads: int
    dk: int
    dv: int
    conv_width: int
    per_channel: bool

    @property
    def splits(self) -> list[int]:
        """Channels of q, k and v, in the order of the convolution."""
        return [self.key_heads * self.dk, self.key_heads * self.dk, self.heads * self.dv]

    def allocate(self, layers: int, batch: int, max_length: int, max_nodes: int) -> DeltaStack:
        """Allocate zeroed tensors for ``layers`` layers."""
        zeros = Zeros((layers, batch), self.dtype, self.device)
        channels, wide = sum(self.splits), state_dtype(self.dtype)
        return DeltaStack(
            spec=self,
            window=zeros(channels, self.conv_width - 1),
            state=zeros(self.heads, self.dk, self.dv, dtype=wide),
            stash_conv=zeros(max_nodes, channels),
            stash_k=zeros(max_nodes, self.key_heads, self.dk),
            stash_u=zeros(max_nodes, self.heads, self.dv, dtype=wide),
            stash_g=zeros(max_nodes, self.heads, *[self.dk] * self.per_channel, dtype=wide),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class DeltaStack(RecurrentStack):
    """Gated delta layers: [layers, batch, ...]; the convolution's channels are q, k, v.

    Attributes:
        spec: the sizes.
        state: float32[heads, dk, dv].
        stash_k: float[max_nodes, key_heads, dk], normalised.
        stash_u: float32[max_nodes, heads, dv], the update of each node: its state gains k u^T.
        stash_g: float32[max_nodes, heads] or, per channel, [max_nodes, heads, dk], log decays.
    """

    shared: ClassVar[tuple[str, ...]] = ("stash_k", "stash_u", "stash_g")

    spec: DeltaSpec
    stash_k: Tensor
    stash_u: Tensor
    stash_g: Tensor

    def commit(self, path: Tensor, path_lengths: Tensor, lengths: Tensor) -> None:
        """Apply the paths to windows and states."""
        accepted = self.commit_window(path, path_lengths)
        k, u, g = self.stash_k.flatten(0, 1), self.stash_u.flatten(0, 1), self.stash_g.flatten(0, 1)
        ops.gated_delta_commit(self.state.flatten(0, 1), k, u, g, accepted, None)


def patch_delta_rule(mixer: Any, placement: Placement) -> DeltaSpec:
    """Make a gated DeltaNet or KDA mixer score trees when it is called with a ``TreeStep``; return its sizes."""
    per_channel = hasattr(mixer, "forget_gate")
    if per_channel:
        sizes = {"key_heads": mixer.num_heads, "heads": mixer.num_heads, "dk": mixer.head_dim, "dv": mixer.head_dim}
    else:
        sizes = {
            "key_heads": mixer.num_k_heads,
            "heads": mixer.num_v_heads,
            "dk": mixer.head_k_dim,
            "dv": mixer.head_v_dim,
        }
    columns = _columns(mixer, placement["device"]) if hasattr(mixer, "in_proj_qkvz") else None
    patch_mixer(mixer, partial(_forward, columns))
    return DeltaSpec(**sizes, conv_width=mixer.conv_kernel_size, per_channel=per_channel, **placement)


def _forward(columns: Columns | None, mixer: Any, step: TreeStep, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    """Score a tree."""
    layer = step.state.layers[mixer.layer_idx, DeltaSpec]
    spec, projected = layer.spec, _project(columns, mixer, hidden_states)
    qkv = layer.convolve(step, projected.qkv, mixer.conv1d, activation=mixer.activation)
    qk, v = qkv.split([2 * spec.key_heads * spec.dk, spec.heads * spec.dv], dim=-1)
    rates = () if projected.a is None else (projected.a, mixer.A_log, mixer.dt_bias)
    scale = 2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0
    q, k, g, beta = ops.delta_inputs(qk, projected.b, *rates, key_heads=spec.key_heads, eps=EPSILON, scale=scale)
    out = ops.gated_delta_step(
        layer.state, layer.stash_k, layer.stash_u, layer.stash_g, step.entries, None, q, k,
        v.unflatten(-1, (spec.heads, spec.dv)), mixer.forget_gate(hidden_states) if g is None else g, beta,
        step.topology, first=step.first, previous=step.deferred_rows.get((mixer.layer_idx, DeltaSpec)),
    )  # fmt: skip
    norm = mixer.norm if hasattr(mixer, "norm") else mixer.o_norm
    out = norm(out.flatten(0, 2), projected.gate.reshape(-1, spec.dv)).view(*hidden_states.shape[:2], -1)
    return _out_proj(mixer)(out)


def _columns(mixer: Any, device: torch.device) -> Columns:
    """Return int64 columns of Qwen3-Next's two projections: those of q, k and v, of the gate, and of b and a."""
    projections = mixer.in_proj_qkvz, mixer.in_proj_ba
    mixed, raw = (torch.arange(num_features(part)[1], device="cpu")[None, None] for part in projections)
    q, k, v, gate, b, a = (part.flatten() for part in mixer.fix_query_key_value_ordering(mixed, raw))
    return torch.cat((q, k, v)).to(device), gate.to(device), torch.cat((b, a)).to(device)


@dataclass(frozen=True, slots=True, eq=False)
class _Projected:
    """Projections of a layer's input: q, k and v before the convolution, the gate of the output, and the raw b and a.

    a is None where a module of the mixer computes the decays.
    """

    qkv: Tensor
    gate: Tensor
    b: Tensor
    a: Tensor | None


def _project(columns: Columns | None, mixer: Any, hidden_states: Tensor) -> _Projected:
    """Run a mixer's projections."""
    if columns is not None:  # Qwen3-Next: interleaved by key head
        mixed, raw = mixer.in_proj_qkvz(hidden_states), mixer.in_proj_ba(hidden_states)
        qkv, gate, ba = columns
        b, a = raw[..., ba].chunk(2, dim=-1)
        return _Projected(mixed[..., qkv], mixed[..., gate], b, a)
    if hasattr(mixer, "in_proj_qkv"):  # Qwen3.5
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        return _Projected(*(getattr(mixer, name)(hidden_states) for name in names))
    # OlmoHybrid, Kimi-Linear and BailingHybrid
    qkv = torch.cat([getattr(mixer, name)(hidden_states) for name in ("q_proj", "k_proj", "v_proj")], dim=-1)
    low_rank = not hasattr(mixer, "g_proj")
    gate = mixer.g_b_proj(mixer.g_a_proj(hidden_states)) if low_rank else mixer.g_proj(hidden_states)
    a = None if hasattr(mixer, "forget_gate") else mixer.a_proj(hidden_states)
    return _Projected(qkv, gate, mixer.b_proj(hidden_states), a)


def _out_proj(mixer: Any) -> Any:
    """Return the output projection."""
    return mixer.out_proj if hasattr(mixer, "out_proj") else mixer.o_proj
