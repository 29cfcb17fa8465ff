"""Adapter of the Mamba-1 mixer: project, convolve along each path, scan, gate (Mamba, arXiv 2312.00752).

For every family whose mixer has in_proj, conv1d, A_log, D and out_proj, and for Zamba, whose mixer has several heads
after one convolution, each with its own B, C and step size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.kernels import ops
from stree.kernels.topology import AcceptedPath
from stree.models.layers.base import LayerSpec, Placement, Zeros, state_dtype
from stree.models.layers.convolution import MambaStack
from stree.models.layers.mixer_patch import patch_mixer
from stree.models.tree_step import TreeStep

__all__ = ["Mamba1Spec", "Mamba1Stack", "patch_mamba1"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Spec(LayerSpec):
    """Sizes of a Mamba-1 layer; channels are those of one head."""

    kind: ClassVar[str] = "Mamba-1"
    before_convolution: ClassVar[tuple[str, ...]] = ("in_proj",)

    nheads: int
    channels: int
    dstate: int
    conv_width: int

    def allocate(self, layers: int, batch: int, max_length: int, max_nodes: int) -> Mamba1Stack:
        """Allocate zeroed tensors for ``layers`` layers."""
        zeros = Zeros((layers,), self.dtype, self.device)
        wide, inner = state_dtype(self.dtype), self.nheads * self.channels
        return Mamba1Stack(
            spec=self,
            window=zeros(batch, inner, self.conv_width - 1),
            state=zeros(batch, self.nheads, self.channels, self.dstate, dtype=wide),
            stash_conv=zeros(batch, max_nodes, inner),
            stash_x=zeros(batch, self.nheads, max_nodes, self.channels),
            stash_dt=zeros(batch, self.nheads, max_nodes, self.channels, dtype=wide),
            stash_B=zeros(batch, self.nheads, max_nodes, self.dstate),
            A=zeros(self.nheads, self.channels, self.dstate, dtype=wide),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Mamba1Stack(MambaStack):
    """Mamba-1 layers: [layers, batch, ...].

    Attributes:
        spec: the sizes.
        state: float32[nheads, channels, dstate].
        stash_x: float[nheads, max_nodes, channels], outputs of the convolution.
        stash_dt: float32[nheads, max_nodes, channels], step sizes after bias and softplus.
        stash_B: float[nheads, max_nodes, dstate].
        A: float32[nheads, channels, dstate].
    """

    shared: ClassVar[tuple[str, ...]] = ("stash_x", "stash_dt", "stash_B")
    node_dim: ClassVar[int] = 3

    spec: Mamba1Spec
    stash_x: Tensor
    stash_dt: Tensor
    stash_B: Tensor

    def commit(self, path: Tensor, path_lengths: Tensor, lengths: Tensor) -> None:
        """Apply the paths to windows and states."""
        layers, batch, heads = self.state.shape[:3]
        accepted = self.commit_window(path, path_lengths)
        if heads > 1:
            path, path_lengths = path.repeat_interleave(heads, 0), path_lengths.repeat_interleave(heads)
            accepted = AcceptedPath.of(path.repeat(layers, 1), path_lengths.repeat(layers))
        A = self.A[:, None].expand(-1, batch, -1, -1, -1).flatten(0, 2)
        state, x, dt, B = (t.flatten(0, 2) for t in (self.state, self.stash_x, self.stash_dt, self.stash_B))
        ops.selective_commit(state, x, dt, A, B, accepted, None)


def patch_mamba1(mixer: Any, placement: Placement) -> Mamba1Spec:
    """Make a Mamba-1 mixer score trees when it is called with a ``TreeStep``; return its sizes."""
    nheads = getattr(mixer, "n_mamba_heads", 1)
    spec = Mamba1Spec(
        nheads=nheads,
        channels=mixer.intermediate_size // nheads,
        dstate=mixer.ssm_state_size,
        conv_width=mixer.conv_kernel_size,
        **placement,
    )
    patch_mixer(mixer, _forward)
    return spec


def _forward(mixer: Any, step: TreeStep, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    """Score a tree."""
    layer = step.state.layers[mixer.layer_idx, Mamba1Spec]
    if "parametrizations" in mixer._modules:  # an adapter of peft on A_log parametrizes it during each call alone
        layer.A.copy_(-torch.exp(mixer.A_log.to(layer.A.dtype)))
    projected, by_head = mixer.in_proj(hidden_states), hasattr(mixer, "x_proj_weight")
    # Zamba's projection interleaves x and gate; kernels need contiguous channels.
    x, gate = projected.unflatten(2, (-1, 2)).movedim(3, 0).contiguous() if by_head else projected.chunk(2, dim=2)
    x = layer.convolve(step, x, mixer.conv1d, activation=mixer.activation)
    x = x.unflatten(2, (layer.spec.nheads, -1)).transpose(1, 2)  # [batch, nheads, rows, channels]
    dt, B, C, bias, D = (_head_parameters if by_head else _parameters)(mixer, x)
    rows = step.deferred_rows.get((mixer.layer_idx, Mamba1Spec))
    heads = [
        ops.selective_step(
            layer.state[:, head], layer.stash_x[:, head], layer.stash_dt[:, head], layer.stash_B[:, head], step.entries,
            None, x[:, head], dt[:, head], layer.A[head], B[:, head], C[:, head], bias[head], step.topology,
            D=D[head], first=step.first, previous=None if rows is None else tuple(part[:, head] for part in rows),
        )
        for head in range(layer.spec.nheads)
    ]  # fmt: skip
    y = ops.gated_activation(gate, heads[0] if len(heads) == 1 else torch.cat(heads, 2))
    return mixer.out_proj(y.to(hidden_states.dtype))


def _parameters(mixer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dt without bias, B and C, projected from x[batch, 1, rows, channels], and by head the bias of dt and D."""
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    dt, B, C = mixer.x_proj(x).split(sizes, dim=3)
    if hasattr(mixer, "dt_layernorm"):
        dt, B, C = mixer.dt_layernorm(dt), mixer.b_layernorm(B), mixer.c_layernorm(C)
    return F.linear(dt, mixer.dt_proj.weight), B, C, mixer.dt_proj.bias[None], mixer.D[None]


def _head_parameters(mixer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the same for x[batch, nheads, rows, channels], whose heads have separate projections (Zamba)."""
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    dt, B, C = (x @ mixer.x_proj_weight.transpose(1, 2)).split(sizes, dim=3)
    return dt @ mixer.dt_proj_weight.transpose(1, 2), B, C, mixer.dt_proj_bias, mixer.D
