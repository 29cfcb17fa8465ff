"""Base classes of layers with a short convolution: its window of last inputs, and a recurrent state after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stree.kernels import ops
from stree.kernels.topology import AcceptedPath
from stree.models.layers.base import LayerStack, Prefilled
from stree.models.tree_step import TreeStep

__all__ = ["ConvStack", "MambaStack", "RecurrentStack"]


@dataclass(frozen=True, eq=False, kw_only=True)
class ConvStack(LayerStack):
    """Layers with a short convolution: [layers, batch, ...].

    Attributes:
        window: float[channels, width - 1], last inputs of the convolution, oldest first.
        stash_conv: float[max_nodes, channels], its inputs at the pending nodes.
        has_fused_mixer: whether a mixer runs in one launch on small trees.  Its programs share the window, so none may
            write it: the window is committed at once also where the state's commit is deferred.
    """

    window: Tensor
    stash_conv: Tensor
    has_fused_mixer: bool = False

    def commit_window(self, path: Tensor, path_lengths: Tensor) -> AcceptedPath:
        """Move the paths' last rows into the windows; return the paths repeated for every layer."""
        layers, width = self.window.shape[0], self.window.shape[-1] + 1
        accepted = AcceptedPath.of(path.repeat(layers, 1), path_lengths.repeat(layers), width)
        ops.conv_commit(self.window.flatten(0, 1), self.stash_conv.flatten(0, 1), accepted, None)
        return accepted

    def convolve(self, step: TreeStep, x: Tensor, conv: Any, *, activation: str | None) -> Tensor:
        """Convolve float[batch, n - first, channels] along each path, on the view of one layer."""
        return ops.conv_step(
            self.window, self.stash_conv, None if self.has_fused_mixer else step.path, None, x, conv.weight.squeeze(1),
            conv.bias, step.topology, activation=activation, first=step.first,
        )  # fmt: skip

    def load(self, slot: int, prefilled: Prefilled) -> None:
        """Copy the newest inputs of the convolution from a transformers cache layer."""
        inputs, window = prefilled.cache.layers[prefilled.layer].conv_states[0], self.window[slot]
        window.copy_(inputs[..., inputs.shape[-1] - window.shape[-1] :])

    def store(self, slot: int, cache: Any, layer: int, length: int) -> None:
        """Copy the window."""
        window = self.window[slot]
        cache.update_conv_state(window, layer, conv_kernel_size=window.shape[-1] + 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class RecurrentStack(ConvStack):
    """Layers with a short convolution and a recurrence: [layers, batch, ...].

    Attributes:
        state: float32[...], sizes set by the subclass.
    """

    state: Tensor

    def load(self, slot: int, prefilled: Prefilled) -> None:
        """Copy window and state."""
        super().load(slot, prefilled)
        state = prefilled.cache.layers[prefilled.layer].recurrent_states[0]
        self.state[slot].copy_(state.view_as(self.state[slot]))

    def store(self, slot: int, cache: Any, layer: int, length: int) -> None:
        """Copy window and state."""
        super().store(slot, cache, layer, length)
        cache.update_recurrent_state(self.state[slot], layer)


@dataclass(frozen=True, eq=False, kw_only=True)
class MambaStack(RecurrentStack):
    """Layers whose decay rates are -exp(A_log), Mamba-1 and Mamba-2: [layers, batch, ...].

    Attributes:
        A: float32[layers, ...], decay rates, the same for all sequences.
    """

    weights: ClassVar[frozenset[str]] = frozenset({"A"})

    A: Tensor

    def bind(self, slot: int, mixer: Any) -> None:
        """Copy the decay rates."""
        self.A[slot].copy_(-torch.exp(mixer.A_log.detach().to(self.A.dtype)))
