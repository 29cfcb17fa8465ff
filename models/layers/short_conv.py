"""Adapter of the gated short convolution of the LFM families: C * conv(B * x), whose only state is its window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from stree.models.layers.base import LayerSpec, Placement, Zeros
from stree.models.layers.convolution import ConvStack
from stree.models.layers.mixer_patch import patch_mixer
from stree.models.tree_step import TreeStep

__all__ = ["ShortConvSpec", "ShortConvStack", "patch_short_conv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec(LayerSpec):
    """Sizes of a short convolution."""

    kind: ClassVar[str] = "short convolution"
    before_convolution: ClassVar[tuple[str, ...]] = ("in_proj",)

    channels: int
    conv_width: int

    def allocate(self, layers: int, batch: int, max_length: int, max_nodes: int) -> ShortConvStack:
        """Allocate zeroed tensors for ``layers`` layers."""
        zeros = Zeros((layers, batch), self.dtype, self.device)
        return ShortConvStack(
            window=zeros(self.channels, self.conv_width - 1), stash_conv=zeros(max_nodes, self.channels)
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class ShortConvStack(ConvStack):
    """Short convolutions: [layers, batch, ...]."""

    shared: ClassVar[tuple[str, ...]] = ()

    def commit(self, path: Tensor, path_lengths: Tensor, lengths: Tensor) -> None:
        """Move the paths' last rows into the windows."""
        self.commit_window(path, path_lengths)


def patch_short_conv(mixer: Any, placement: Placement) -> ShortConvSpec:
    """Make a short convolution score trees when it is called with a ``TreeStep``; return its sizes."""
    patch_mixer(mixer, _forward)
    return ShortConvSpec(
        channels=mixer.conv.weight.shape[0],
        conv_width=mixer.conv_kernel_size,
        **placement,
    )


def _forward(mixer: Any, step: TreeStep, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
    """Score a tree."""
    layer = step.state.layers[mixer.layer_idx, ShortConvSpec]
    B, C, x = mixer.in_proj(hidden_states).chunk(3, dim=-1)
    return mixer.out_proj(C * layer.convolve(step, B * x, mixer.conv, activation=None))
