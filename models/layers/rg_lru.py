"""Adapter of RecurrentGemma's recurrent block: convolution and RG-LRU (Griffin, arXiv 2402.19427).

transformers stores the block's state on its modules, so a model has only one.  Prompts are therefore run by a copy of
the block that shares its weights and lives for one call; its states go to a ``BlockCache``.  The gates of the RG-LRU
stay transformers' code: a copy of the unit runs them with the scan replaced by a tree scan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache

from stree.kernels import ops
from stree.models.layers.base import LayerSpec, Placement, Prefilled, Zeros, state_dtype
from stree.models.layers.convolution import RecurrentStack
from stree.models.layers.mixer_patch import patch_mixer
from stree.models.tree_step import TreeStep

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


_scanned: ContextVar[tuple[RgLruStack, TreeStep]] = ContextVar("scanned")  # the layer and the step of ``_tree_scan``


def patch_rg_lru(block: Any, placement: Placement, layer: int) -> RgLruSpec:
    """Make recurrent block ``layer`` score trees when it is called with a ``TreeStep``; return its sizes."""
    unit = _copied(block.rg_lru)
    unit._rnn_scan = _tree_scan
    patch_mixer(block, partial(_forward, unit, layer), partial(_plain_forward, layer))
    return RgLruSpec(channels=block.lru_width, conv_width=block.conv1d_width, **placement)


def _copied(module: Any) -> Any:
    """Copy a module; the copy shares weights, parts and hooks, and has its class's own forward."""
    copied = copy.copy(module)
    copied.__dict__.pop("forward", None)
    return copied


def _plain_forward(
    layer: int, block: Any, unpatched: Callable[..., Any], input_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run the block's forward; with a ``BlockCache``, from an empty state and on a copy of the modules."""
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, BlockCache)), None)
    if cache is None:
        return unpatched(input_states, *args, **kwargs)
    copied, unit = _copied(block), _copied(block.rg_lru)
    copied.__dict__["_modules"] = {**block._modules, "rg_lru": unit}
    copied.conv1d_state = input_states.new_zeros(len(input_states), block.lru_width, block.conv1d_width - 1)
    unit.recurrent_states = None
    out = type(block).forward(copied, input_states, *args, **kwargs)
    cache.blocks[layer] = copied.conv1d_state, unit.recurrent_states
    return out


def _forward(unit: Any, layer: int, block: Any, step: TreeStep, input_states: Tensor, *_: Any, **kwargs: Any) -> Any:
    """Score a tree."""
    view, conv = step.state.layers[layer, RgLruSpec], block.conv_1d
    if conv._forward_hooks or conv._forward_pre_hooks:  # hooks of all modules are not refused: profilers set them
        raise NotImplementedError("conv_1d of a recurrent block has a forward hook, which trees do not run; remove it")
    x = view.convolve(step, block.linear_x(input_states), conv, activation=None)
    token = _scanned.set((view, step))
    try:
        y = unit(x, kwargs["position_ids"])
    finally:
        _scanned.reset(token)
    return block.linear_out(y * block.act_fn(block.linear_y(input_states))), None


def _tree_scan(hidden_states: Tensor, recurrent_gate: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Scan a tree in the place of transformers' scan; no ``reset``: the state of an empty text is zero."""
    view, step = _scanned.get()
    # transformers rounds the decay to the dtype of the model.
    gate = recurrent_gate.to(view.state.dtype)
    log_a = gate.clamp(min=torch.finfo(gate.dtype).tiny).log()
    out = ops.diagonal_step(
        view.state, view.stash_log_a, view.stash_x, step.path, None, log_a, hidden_states, step.topology,
        first=step.first,
    )  # fmt: skip
    return out, None
