"""The Mamba-1 mixer on a tree: project, convolve along each path, scan, gate (Mamba, arXiv 2312.00752).

It serves every family whose mixer has in_proj, conv1d, A_log, D and out_proj, and Zamba, whose mixer is so many small
ones ("heads") behind one convolution, each with its own B, C and step size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.kernels import ops
from stree.kernels.topology import AcceptedPath
from stree.models.grafting import Zeros, graft_forward, take_window
from stree.models.state import LayerSpec, LayerStack, Prefilled, TreeStep, state_dtype

__all__ = ["SelectiveSpec", "SelectiveStack", "graft_selective"]


@dataclass(frozen=True, slots=True)
class SelectiveSpec(LayerSpec):
    """Sizes of a Mamba-1 layer; channels are those of one head."""

    nheads: int
    channels: int
    dstate: int
    dconv: int
    dtype: torch.dtype
    device: torch.device

    @property
    def conv_width(self) -> int:
        """Taps of the convolution."""
        return self.dconv

    @property
    def is_diagonal(self) -> bool:
        """The state decays by channel and state."""
        return True

    def allocate(self, layers: int, batch: int, max_length: int, max_nodes: int) -> SelectiveStack:
        """Make zeroed tensors for some layers."""
        zeros = Zeros((layers,), self.dtype, self.device)
        wide, inner = state_dtype(self.dtype), self.nheads * self.channels
        return SelectiveStack(
            spec=self,
            window=zeros(batch, inner, self.dconv - 1),
            state=zeros(batch, self.nheads, self.channels, self.dstate, dtype=wide),
            stash_conv=zeros(batch, max_nodes, inner),
            stash_x=zeros(batch, self.nheads, max_nodes, self.channels),
            stash_dt=zeros(batch, self.nheads, max_nodes, self.channels, dtype=wide),
            stash_B=zeros(batch, self.nheads, max_nodes, self.dstate),
            A=zeros(self.nheads, self.channels, self.dstate, dtype=wide),
        )


@dataclass(frozen=True, eq=False)
class SelectiveStack(LayerStack):
    """Mamba-1 layers: [layers, batch, ...].

    Attributes:
        spec: the sizes.
        window: float[nheads * channels, dconv - 1], last inputs of the convolution, oldest first.
        state: float32[nheads, channels, dstate].
        stash_conv: float[max_nodes, nheads * channels], inputs of the convolution.
        stash_x: float[nheads, max_nodes, channels], its outputs.
        stash_dt: float32[nheads, max_nodes, channels], step sizes after bias and softplus.
        stash_B: float[nheads, max_nodes, dstate].
        A: float32[nheads, channels, dstate], decay rates, the same for all sequences.
    """

    weights: ClassVar[frozenset[str]] = frozenset({"A"})
    shared: ClassVar[tuple[str, ...]] = ("stash_x", "stash_dt", "stash_B")
    node_dim: ClassVar[int] = 3

    spec: SelectiveSpec
    window: Tensor
    state: Tensor
    stash_conv: Tensor
    stash_x: Tensor
    stash_dt: Tensor
    stash_B: Tensor
    A: Tensor

    def commit(self, path: Tensor, path_lengths: Tensor, lengths: Tensor) -> None:
        """Fold the paths into windows and states."""
        layers, batch, heads = self.state.shape[:3]
        accepted = AcceptedPath.of(path.repeat(layers, 1), path_lengths.repeat(layers), self.spec.dconv)
        ops.conv_commit(self.window.flatten(0, 1), self.stash_conv.flatten(0, 1), accepted, None)
        if heads > 1:
            path, path_lengths = path.repeat_interleave(heads, 0), path_lengths.repeat_interleave(heads)
            accepted = AcceptedPath.of(path.repeat(layers, 1), path_lengths.repeat(layers))
        A = self.A[:, None].expand(-1, batch, -1, -1, -1).flatten(0, 2)
        state, x, dt, B = (t.flatten(0, 2) for t in (self.state, self.stash_x, self.stash_dt, self.stash_B))
        ops.selective_commit(state, x, dt, A, B, accepted, None)

    def bind(self, slot: int, mixer: Any) -> None:
        """Take over the decay rates."""
        self.A[slot].copy_(-torch.exp(mixer.A_log.detach().to(self.A.dtype)))

    def load(self, slot: int, prefilled: Prefilled) -> None:
        """Take over window and state."""
        cache_layer = prefilled.cache.layers[prefilled.layer]
        take_window(self.window[slot], cache_layer)
        self.state[slot].copy_(cache_layer.recurrent_states[0].view_as(self.state[slot]))


def graft_selective(mixer: Any) -> SelectiveSpec:
    """Make a Mamba-1 mixer score trees when it is called with a ``TreeStep``; return its sizes."""
    weight = mixer.in_proj.weight
    nheads = getattr(mixer, "n_mamba_heads", 1)
    spec = SelectiveSpec(
        nheads=nheads,
        channels=mixer.intermediate_size // nheads,
        dstate=mixer.ssm_state_size,
        dconv=mixer.conv_kernel_size,
        dtype=weight.dtype,
        device=weight.device,
    )
    graft_forward(mixer, _forward)
    return spec


def _forward(mixer: Any, step: TreeStep, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    """Score a tree."""
    layer = step.state.layers[mixer.layer_idx, SelectiveSpec]
    projected, by_head = mixer.in_proj(hidden_states), hasattr(mixer, "x_proj_weight")
    # Zamba's projection holds x and gate of a channel side by side; kernels want channels without gaps.
    x, gate = projected.unflatten(2, (-1, 2)).movedim(3, 0).contiguous() if by_head else projected.chunk(2, dim=2)
    conv = mixer.conv1d
    x = ops.conv_step(
        layer.window, layer.stash_conv, step.path, None, x, conv.weight.squeeze(1), conv.bias, step.topology,
        activation=mixer.activation, first=step.first,
    )  # fmt: skip
    x = x.unflatten(2, (layer.spec.nheads, -1)).transpose(1, 2)  # [batch, nheads, rows, channels]
    dt, B, C, bias, D = (_head_parameters if by_head else _parameters)(mixer, x)
    kept = step.kept(mixer.layer_idx, SelectiveSpec)
    heads = [
        ops.selective_step(
            layer.state[:, head], layer.stash_x[:, head], layer.stash_dt[:, head], layer.stash_B[:, head], step.entries,
            None, x[:, head], dt[:, head], layer.A[head], B[:, head], C[:, head], bias[head], step.topology,
            D=D[head], first=step.first, folded=None if kept is None else tuple(rows[:, head] for rows in kept),
        )
        for head in range(layer.spec.nheads)
    ]  # fmt: skip
    y = ops.gated_activation(gate, heads[0] if len(heads) == 1 else torch.cat(heads, 2))
    return mixer.out_proj(y.to(hidden_states.dtype))


def _parameters(mixer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Project x[batch, 1, rows, channels]: dt without bias, B, C; and the bias of dt and D, by head."""
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    dt, B, C = mixer.x_proj(x).split(sizes, dim=3)
    if hasattr(mixer, "dt_layernorm"):
        dt, B, C = mixer.dt_layernorm(dt), mixer.b_layernorm(B), mixer.c_layernorm(C)
    return F.linear(dt, mixer.dt_proj.weight), B, C, mixer.dt_proj.bias[None], mixer.D[None]


def _head_parameters(mixer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Do the same where every head of x[batch, nheads, rows, channels] has projections of its own."""
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    dt, B, C = (x @ mixer.x_proj_weight.transpose(1, 2)).split(sizes, dim=3)
    return dt @ mixer.dt_proj_weight.transpose(1, 2), B, C, mixer.dt_proj_bias, mixer.D
