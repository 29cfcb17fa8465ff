"""The gated short convolution of the LFM families on a tree: C * conv(B * x), with no state but its window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stree.kernels import ops
from stree.kernels.topology import AcceptedPath
from stree.models.grafting import Zeros, graft_forward, take_window
from stree.models.state import LayerSpec, LayerStack, Prefilled, TreeStep

__all__ = ["ShortConvSpec", "ShortConvStack", "graft_short_conv"]


@dataclass(frozen=True, slots=True)
class ShortConvSpec(LayerSpec):
    """Sizes of a short convolution."""

    channels: int
    dconv: int
    dtype: torch.dtype
    device: torch.device

    @property
    def conv_width(self) -> int:
        """Taps of the convolution."""
        return self.dconv

    def allocate(self, layers: int, batch: int, max_length: int, max_nodes: int) -> ShortConvStack:
        """Make zeroed tensors for some layers."""
        zeros = Zeros((layers, batch), self.dtype, self.device)
        return ShortConvStack(zeros(self.channels, self.dconv - 1), zeros(max_nodes, self.channels))


@dataclass(frozen=True, eq=False)
class ShortConvStack(LayerStack):
    """Short convolutions: [layers, batch, ...].

    Attributes:
        window: float[channels, dconv - 1], last inputs of the convolution, oldest first.
        stash_conv: float[max_nodes, channels], its inputs at the pending nodes.
    """

    shared: ClassVar[tuple[str, ...]] = ()

    window: Tensor
    stash_conv: Tensor

    def commit(self, path: Tensor, path_lengths: Tensor, lengths: Tensor) -> None:
        """Move the paths' last rows into the windows."""
        layers, dconv = self.window.shape[0], self.window.shape[-1] + 1
        accepted = AcceptedPath.of(path.repeat(layers, 1), path_lengths.repeat(layers), dconv)
        ops.conv_commit(self.window.flatten(0, 1), self.stash_conv.flatten(0, 1), accepted, None)

    def load(self, slot: int, prefilled: Prefilled) -> None:
        """Take over the window."""
        take_window(self.window[slot], prefilled.cache.layers[prefilled.layer])


def graft_short_conv(mixer: Any) -> ShortConvSpec:
    """Make a short convolution score trees when it is called with a ``TreeStep``; return its sizes."""
    graft_forward(mixer, _forward)
    weight = mixer.in_proj.weight
    return ShortConvSpec(mixer.conv.weight.shape[0], mixer.conv_kernel_size, weight.dtype, weight.device)


def _forward(mixer: Any, step: TreeStep, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    """Score a tree."""
    layer = step.state.layers[mixer.layer_idx, ShortConvSpec]
    B, C, x = mixer.in_proj(hidden_states).chunk(3, dim=-1)
    y = ops.conv_step(
        layer.window, layer.stash_conv, step.path, None, B * x, mixer.conv.weight.squeeze(1), mixer.conv.bias,
        step.topology, activation=None, first=step.first,
    )  # fmt: skip
    return mixer.out_proj(C * y)
