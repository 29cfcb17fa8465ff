"""The Mamba-2 mixer on a tree: project, convolve along each path, scan, gate (Mamba-2, arXiv 2405.21060).

It serves every family whose mixer has in_proj, conv1d, A_log, dt_bias, D, norm and out_proj; per-family facts (group
norms, multipliers, limits of the step size) are the mixer's own attributes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stree.kernels import ops
from stree.kernels.topology import AcceptedPath
from stree.models.grafting import Zeros, graft_forward, take_window
from stree.models.lean import gated_norm
from stree.models.state import LayerSpec, LayerStack, Prefilled, TreeStep, state_dtype

__all__ = ["SsdSpec", "SsdStack", "graft_ssd"]


@dataclass(frozen=True, slots=True)
class SsdSpec(LayerSpec):
    """Sizes of a Mamba-2 layer."""

    nheads: int
    headdim: int
    dstate: int
    ngroups: int
    dconv: int
    dtype: torch.dtype
    device: torch.device

    @property
    def conv_width(self) -> int:
        """Taps of the convolution."""
        return self.dconv

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, then B, then C."""
        return self.nheads * self.headdim + 2 * self.ngroups * self.dstate

    def allocate(self, layers: int, batch: int, max_length: int, max_nodes: int) -> SsdStack:
        """Make zeroed tensors for some layers."""
        zeros = Zeros((layers, batch), self.dtype, self.device)
        wide = state_dtype(self.dtype)
        return SsdStack(
            spec=self,
            window=zeros(self.channels, self.dconv - 1),
            state=zeros(self.nheads, self.headdim, self.dstate, dtype=wide),
            stash_conv=zeros(max_nodes, self.channels),
            stash_xbc=zeros(max_nodes, self.channels),
            stash_dt=zeros(max_nodes, self.nheads, dtype=wide),
            A=torch.zeros(layers, self.nheads, dtype=wide, device=self.device),
        )


@dataclass(frozen=True, eq=False)
class SsdStack(LayerStack):
    """Mamba-2 layers: [layers, batch, ...].

    Attributes:
        spec: the sizes.
        window: float[channels, dconv - 1], last inputs of the convolution, oldest first.
        state: float32[nheads, headdim, dstate].
        stash_conv: float[max_nodes, channels], inputs of the convolution.
        stash_xbc: float[max_nodes, channels], its outputs: x, B, C.
        stash_dt: float32[max_nodes, nheads], step sizes after bias, softplus and limit.
        A: float32[nheads], decay rates, the same for all sequences.
    """

    weights: ClassVar[frozenset[str]] = frozenset({"A"})
    shared: ClassVar[tuple[str, ...]] = ("stash_xbc", "stash_dt")

    spec: SsdSpec
    window: Tensor
    state: Tensor
    stash_conv: Tensor
    stash_xbc: Tensor
    stash_dt: Tensor
    A: Tensor

    def commit(self, path: Tensor, path_lengths: Tensor, lengths: Tensor) -> None:
        """Fold the paths into windows and states."""
        layers, batch = self.state.shape[:2]
        accepted = AcceptedPath.of(path.repeat(layers, 1), path_lengths.repeat(layers), self.spec.dconv)
        ops.conv_commit(self.window.flatten(0, 1), self.stash_conv.flatten(0, 1), accepted, None)
        spec, xbc = self.spec, self.stash_xbc.flatten(0, 1)
        inner, groups = spec.nheads * spec.headdim, spec.ngroups * spec.dstate
        x = xbc[..., :inner].view(*xbc.shape[:2], spec.nheads, spec.headdim)
        B = xbc[..., inner : inner + groups].view(*xbc.shape[:2], spec.ngroups, spec.dstate)
        dt, A = self.stash_dt.flatten(0, 1), self.A.repeat_interleave(batch, 0)
        ops.ssd_commit(self.state.flatten(0, 1), x, dt, A, B, accepted, None)

    def bind(self, slot: int, mixer: Any) -> None:
        """Take over the decay rates."""
        self.A[slot].copy_(-torch.exp(mixer.A_log.detach().to(self.A.dtype)))

    def load(self, slot: int, prefilled: Prefilled) -> None:
        """Take over window and state."""
        cache_layer = prefilled.cache.layers[prefilled.layer]
        take_window(self.window[slot], cache_layer)
        self.state[slot].copy_(cache_layer.recurrent_states[0])


def graft_ssd(mixer: Any) -> SsdSpec:
    """Make a Mamba-2 mixer score trees when it is called with a ``TreeStep``; return its sizes."""
    weight = mixer.in_proj.weight
    spec = SsdSpec(
        nheads=mixer.num_heads,
        headdim=mixer.head_dim,
        dstate=mixer.ssm_state_size,
        ngroups=mixer.n_groups,
        dconv=mixer.conv_kernel_size,
        dtype=weight.dtype,
        device=weight.device,
    )
    graft_forward(mixer, _forward)
    return spec


def _forward(mixer: Any, step: TreeStep, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    """Score a tree."""
    layer = step.state.layers[mixer.layer_idx, SsdSpec]
    spec = layer.spec
    inner = spec.nheads * spec.headdim
    gate, xbc, dt = _project(mixer, hidden_states).split([inner, spec.channels, spec.nheads], dim=-1)
    conv = mixer.conv1d
    xbc = ops.conv_step(
        layer.window, layer.stash_conv, step.path, None, xbc, conv.weight.squeeze(1), conv.bias, step.topology,
        activation=mixer.activation, first=step.first,
    )  # fmt: skip
    y = ops.ssd_step(
        layer.state, layer.stash_xbc, layer.stash_dt, step.entries, None, xbc, dt, layer.A, mixer.dt_bias,
        step.topology, headdim=spec.headdim, ngroups=spec.ngroups, D=mixer.D, dt_limit=mixer.time_step_limit,
        first=step.first, folded=step.kept(mixer.layer_idx, SsdSpec),
    )  # fmt: skip
    y, norm = y.flatten(2), mixer.norm
    y = ops.gated_activation(gate, y) if isinstance(norm, nn.Identity) else gated_norm(norm, y, gate)
    return mixer.out_proj(y.to(hidden_states.dtype))


def _project(mixer: Any, hidden_states: Tensor) -> Tensor:
    """Project to gate, x, B, C and dt, with Falcon-H1's multipliers where the mixer has them."""
    if "mup_vector" not in mixer._buffers:
        return mixer.in_proj(hidden_states)  # type: ignore[no-any-return]
    return mixer.in_proj(hidden_states * mixer.ssm_in_multiplier) * mixer.mup_vector  # type: ignore[no-any-return]
