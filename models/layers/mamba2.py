"""Adapter of the Mamba-2 mixer: project, convolve along each path, scan, gate (Mamba-2, arXiv 2405.21060).

For every family whose mixer has in_proj, conv1d, A_log, dt_bias, D, norm and out_proj.  What differs between families
(group norms, multipliers, limits of the step size) is read from the mixer's attributes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stree.kernels import ops
from stree.kernels.dispatch import has_triton
from stree.kernels.tiles import MAX_MIXER_NODES
from stree.kernels.topology import AcceptedPath
from stree.models.fused.fused_layers import deferred_norm
from stree.models.fused.lazy_residual import with_row_norm
from stree.models.layers.base import LayerSpec, Placement, Zeros, state_dtype
from stree.models.layers.convolution import MambaStack
from stree.models.layers.mixer_patch import patch_mixer
from stree.models.tree_step import TreeStep

__all__ = ["Mamba2Spec", "Mamba2Stack", "patch_mamba2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec(LayerSpec):
    """Sizes of a Mamba-2 layer."""

    kind: ClassVar[str] = "Mamba-2"
    before_convolution: ClassVar[tuple[str, ...]] = ("in_proj",)

    nheads: int
    headdim: int
    dstate: int
    ngroups: int
    conv_width: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, then B, then C."""
        return self.nheads * self.headdim + 2 * self.ngroups * self.dstate

    def allocate(self, layers: int, batch: int, max_length: int, max_nodes: int) -> Mamba2Stack:
        """Allocate zeroed tensors for ``layers`` layers."""
        zeros = Zeros((layers, batch), self.dtype, self.device)
        wide = state_dtype(self.dtype)
        return Mamba2Stack(
            spec=self,
            window=zeros(self.channels, self.conv_width - 1),
            state=zeros(self.nheads, self.headdim, self.dstate, dtype=wide),
            stash_conv=zeros(max_nodes, self.channels),
            stash_xbc=zeros(max_nodes, self.channels),
            stash_dt=zeros(max_nodes, self.nheads, dtype=wide),
            A=torch.zeros(layers, self.nheads, dtype=wide, device=self.device),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Mamba2Stack(MambaStack):
    """Mamba-2 layers: [layers, batch, ...].

    Attributes:
        spec: the sizes.
        state: float32[nheads, headdim, dstate].
        stash_xbc: float[max_nodes, channels], outputs of the convolution: x, B, C.
        stash_dt: float32[max_nodes, nheads], step sizes after bias, softplus and limit.
        A: float32[nheads].
    """

    shared: ClassVar[tuple[str, ...]] = ("stash_xbc", "stash_dt")

    spec: Mamba2Spec
    stash_xbc: Tensor
    stash_dt: Tensor

    def with_fused_mixer(self) -> Mamba2Stack:  # noqa: D102
        return dataclasses.replace(self, has_fused_mixer=True)

    def commit(self, path: Tensor, path_lengths: Tensor, lengths: Tensor) -> None:
        """Apply the paths to windows and states."""
        self._commit_state(self.commit_window(path, path_lengths))

    def commit_early(self, path: Tensor, path_lengths: Tensor) -> None:
        """Apply the paths to windows that the scan reads."""
        if self.has_fused_mixer:
            self.commit_window(path, path_lengths)

    def commit_late(self, path: Tensor, path_lengths: Tensor, lengths: Tensor) -> None:
        """Apply the paths to states, and to windows that ``commit_early`` has left."""
        if not self.has_fused_mixer:
            return self.commit(path, path_lengths, lengths)
        layers = self.window.shape[0]
        self._commit_state(AcceptedPath.of(path.repeat(layers, 1), path_lengths.repeat(layers)))

    def _commit_state(self, accepted: AcceptedPath) -> None:
        """Apply the paths, one for every layer and sequence, to states."""
        batch = self.state.shape[1]
        spec, xbc = self.spec, self.stash_xbc.flatten(0, 1)
        inner, groups = spec.nheads * spec.headdim, spec.ngroups * spec.dstate
        x = xbc[..., :inner].view(*xbc.shape[:2], spec.nheads, spec.headdim)
        B = xbc[..., inner : inner + groups].view(*xbc.shape[:2], spec.ngroups, spec.dstate)
        dt, A = self.stash_dt.flatten(0, 1), self.A.repeat_interleave(batch, 0)
        ops.ssd_commit(self.state.flatten(0, 1), x, dt, A, B, accepted, None)


def patch_mamba2(mixer: Any, placement: Placement) -> Mamba2Spec:
    """Make a Mamba-2 mixer score trees when it is called with a ``TreeStep``; return its sizes."""
    spec = Mamba2Spec(
        nheads=mixer.num_heads,
        headdim=mixer.head_dim,
        dstate=mixer.ssm_state_size,
        ngroups=mixer.n_groups,
        conv_width=mixer.conv_kernel_size,
        **placement,
    )
    patch_mixer(mixer, _forward)
    return spec


def _forward(mixer: Any, step: TreeStep, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    """Score a tree."""
    layer = step.state.layers[mixer.layer_idx, Mamba2Spec]
    spec = layer.spec
    inner = spec.nheads * spec.headdim
    sizes = [inner, layer.stash_xbc.shape[-1], spec.nheads]
    gate, xbc, dt = _project(mixer, hidden_states).split(sizes, dim=-1)
    norm, conv = mixer.norm, mixer.conv1d
    stashes = layer.state, layer.stash_xbc, layer.stash_dt, step.entries, None
    options: dict[str, Any] = {
        "headdim": spec.headdim, "ngroups": spec.ngroups, "D": mixer.D, "dt_limit": mixer.time_step_limit,
        "first": step.first, "previous": step.deferred_rows.get((mixer.layer_idx, Mamba2Spec)),
    }  # fmt: skip
    fits = not has_triton("mamba2_step", xbc.device, xbc.dtype) or step.topology.num_nodes <= MAX_MIXER_NODES
    if layer.has_fused_mixer and fits and mixer.activation == "silu":
        eps = deferred_norm(norm, mixer.out_proj, gate)
        y, squares = ops.mamba2_step(
            layer.window, layer.stash_conv, conv.weight.squeeze(1), conv.bias, *stashes, xbc, dt, layer.A,
            mixer.dt_bias, step.topology, gating=None if eps is None else (gate, norm.weight), **options,
        )  # fmt: skip
        if squares is not None and eps is not None:
            y = mixer.out_proj(y.flatten(2).to(hidden_states.dtype))
            return with_row_norm(y, squares, inner, eps)
    else:
        xbc = layer.convolve(step, xbc, conv, activation=mixer.activation)
        y = ops.ssd_step(*stashes, xbc, dt, layer.A, mixer.dt_bias, step.topology, **options)
    y = y.flatten(2)
    y = ops.gated_activation(gate, y) if isinstance(norm, nn.Identity) else norm(y, gate)
    return mixer.out_proj(y.to(hidden_states.dtype))


def _project(mixer: Any, hidden_states: Tensor) -> Tensor:
    """Project to gate, x, B, C and dt, with Falcon-H1's multipliers where the mixer has them."""
    if "mup_vector" not in mixer._buffers:
        return mixer.in_proj(hidden_states)  # type: ignore[no-any-return]
    return mixer.in_proj(hidden_states * mixer.ssm_in_multiplier) * mixer.mup_vector  # type: ignore[no-any-return]
