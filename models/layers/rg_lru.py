"""Adapter of RecurrentGemma's recurrent block: convolution and RG-LRU (Griffin, arXiv 2402.19427).

transformers stores the block's state on its modules, so a model has only one.  Prompts are run with ``BlockCache``: the
new states are copied to it, and the modules get their previous states back.  The gates of the RG-LRU stay transformers'
code: a copy of the unit that shares its weights runs them with the scan replaced by a tree scan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache

from stree.kernels import ops
from stree.models.layers.base import LayerSpec, Prefilled, Zeros, state_dtype
from stree.models.layers.convolution import RecurrentStack
from stree.models.layers.mixer_patch import patch_mixer
from stree.models.patching import is_hooked
from stree.models.state import TreeStep

__all__ = ["BlockCache", "RgLruSpec", "RgLruStack", "patch_rg_lru"]


class BlockCache(DynamicCache):  # type: ignore[misc]  # transformers is not typed
    """A transformers cache with the window and state of recurrent blocks, by layer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.blocks: dict[int, tuple[Tensor, Tensor]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RgLruSpec(LayerSpec):
    """Sizes of a recurrent block."""

    kind: ClassVar[str] = "RG-LRU"
    is_diagonal: ClassVar[bool] = True

    channels: int
    conv_width: int

    def allocate(self, layers: int, batch: int, max_length: int, max_nodes: int) -> RgLruStack:
        """Allocate zeroed tensors for ``layers`` layers."""
        zeros = Zeros((layers, batch), self.dtype, self.device)
        wide = state_dtype(self.dtype)
        return RgLruStack(
            window=zeros(self.channels, self.conv_width - 1),
            state=zeros(self.channels, dtype=wide),
            stash_conv=zeros(max_nodes, self.channels),
            stash_log_a=zeros(max_nodes, self.channels, dtype=wide),
            stash_x=zeros(max_nodes, self.channels),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class RgLruStack(RecurrentStack):
    """Recurrent blocks: [layers, batch, ...].

    Attributes:
        state: float32[channels].
        stash_log_a: float32[max_nodes, channels], log decays.
        stash_x: float[max_nodes, channels], gated and normalised inputs of the recurrence.
    """

    shared: ClassVar[tuple[str, ...]] = ()

    stash_log_a: Tensor
    stash_x: Tensor

    def commit(self, path: Tensor, path_lengths: Tensor, lengths: Tensor) -> None:
        """Apply the paths to windows and states."""
        accepted = self.commit_window(path, path_lengths)
        log_a, x = self.stash_log_a.flatten(0, 1), self.stash_x.flatten(0, 1)
        ops.diagonal_commit(self.state.flatten(0, 1), log_a, x, accepted, None)

    def load(self, slot: int, prefilled: Prefilled) -> None:
        """Copy window and state."""
        window, state = prefilled.cache.blocks[prefilled.layer]
        self.window[slot].copy_(window)
        self.state[slot].copy_(state)


def patch_rg_lru(block: Any) -> RgLruSpec:
    """Make a recurrent block score trees when it is called with a ``TreeStep``; return its sizes."""
    unit = copy.copy(block.rg_lru)  # shares the weights and hooks
    unit.__dict__.pop("forward", None)  # accelerate's would run the block's own unit
    unit._rnn_scan = _tree_scan
    block.__dict__["tree_copy"] = unit  # not through setattr: it must not become a submodule
    patch_mixer(block, _forward, _plain_forward)
    weight = block.linear_x.weight
    return RgLruSpec(channels=block.lru_width, conv_width=block.conv1d_width, dtype=weight.dtype, device=weight.device)


def _plain_forward(block: Any, unpatched: Callable[..., Any], input_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run the block's forward; with a ``BlockCache``, restore the module's state afterwards."""
    cache = kwargs.get("past_key_values")
    if isinstance(cache, BlockCache):
        return _prefill(block, unpatched, cache, input_states, *args, **kwargs)
    return unpatched(input_states, *args, **kwargs)


def _forward(block: Any, step: TreeStep, input_states: Tensor, *_: Any, **kwargs: Any) -> Any:
    """Score a tree."""
    layer, conv = step.state.layers[block.layer_idx, RgLruSpec], block.conv_1d
    if is_hooked(conv):
        raise NotImplementedError("conv_1d of a recurrent block has a forward hook, which trees do not run; remove it")
    x = layer.convolve(step, block.linear_x(input_states), conv, activation=None)
    block.tree_copy.recurrent_states = (layer, step)  # its forward passes this to its scan
    y = block.tree_copy(x, kwargs["position_ids"])
    return block.linear_out(y * block.act_fn(block.linear_y(input_states))), None


def _prefill(
    block: Any, unpatched: Callable[..., Any], cache: BlockCache, input_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run the block's forward from an empty state, copy the new state to the cache and restore the previous one."""
    previous = block.conv1d_state, block.rg_lru.recurrent_states
    block.conv1d_state = input_states.new_zeros(len(input_states), block.lru_width, block.conv1d_width - 1)
    block.rg_lru.recurrent_states = None
    try:
        out = unpatched(input_states, *args, **kwargs)
        cache.blocks[block.layer_idx] = block.conv1d_state, block.rg_lru.recurrent_states
    finally:
        block.conv1d_state, block.rg_lru.recurrent_states = previous
    return out


def _tree_scan(
    hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, recurrent_states: tuple[RgLruStack, TreeStep]
) -> tuple[Tensor, None]:
    """Scan a tree with the signature of transformers' scan; no ``reset``: the state of an empty text is zero."""
    layer, step = recurrent_states
    # transformers rounds the decay to the dtype of the model.
    gate = recurrent_gate.to(layer.state.dtype)
    log_a = gate.clamp(min=torch.finfo(gate.dtype).tiny).log()
    out = ops.diagonal_step(
        layer.state, layer.stash_log_a, layer.stash_x, step.path, None, log_a, hidden_states, step.topology,
        first=step.first,
    )  # fmt: skip
    return out, None
