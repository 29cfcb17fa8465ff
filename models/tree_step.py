"""What a patched model is called with to score a tree: input tensors, and the cache object that its layers read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stree.kernels.topology import AcceptedPath, Topology
from stree.models.layers.base import Site
from stree.models.state import DecodeState

__all__ = ["TreeInputs", "TreeStep"]


@dataclass(frozen=True, slots=True, eq=False)
class TreeInputs:
    """The tensors with which a model is called to score nodes ``first``.. of a tree of n nodes.

    Attributes:
        tokens: int64[batch, n - first].
        parents: int32[batch, n].
        mask: bool[batch, n, n], ancestors, each node included.
        depths: int32[batch, n].
        positions: int64[batch, n - first], or None where the model takes none.
        others: further arguments of the model's forward, float[batch, n - first, ...] each.
    """

    tokens: Tensor
    parents: Tensor
    mask: Tensor
    depths: Tensor
    positions: Tensor | None
    others: dict[str, Tensor]

    @property
    def first(self) -> int:
        """Nodes that were scored by earlier calls."""
        return self.parents.shape[1] - self.tokens.shape[1]

    def tensors(self) -> list[Tensor]:
        """List the tensors."""
        positions = [] if self.positions is None else [self.positions]
        return [self.tokens, self.parents, self.mask, self.depths, *positions, *self.others.values()]

    def with_tensors(self, tensors: Sequence[Tensor]) -> TreeInputs:
        """Return the same with other tensors in the order of ``tensors``."""
        tokens, parents, mask, depths, *rest = tensors
        positions = None if self.positions is None else rest.pop(0)
        return TreeInputs(tokens, parents, mask, depths, positions, dict(zip(self.others, rest, strict=True)))


@dataclass(eq=False)  # without slots: transformers 5.17 sets attributes on a RecurrentGemma's cache
class TreeStep:
    """The cache object with which a patched model is called to score a tree.

    Attributes:
        state: the state read, whose stash is written.
        topology: the tree's shape, computed once for all layers.
        first: nodes below it are in the stash already.
        length_bound: int, rows of the context that attention reads; no sequence of the state is longer.
        path: the deferred path that every layer commits before it scans, as nodes of the stash, or None.
        entries: the same path as entries of ``deferred_rows``.
        deferred_rows: by site, the rows of that path, which a layer's scan commits; none where nothing was deferred.
        attending: index of the layer whose attention runs; a module that several layers share cannot store its own.
        copies: the same step on other devices that hold layers, by device.
    """

    state: DecodeState
    topology: Topology
    first: int
    length_bound: int
    path: AcceptedPath | None = None
    entries: AcceptedPath | None = None
    deferred_rows: Mapping[Site, Any] = dataclasses.field(default_factory=dict)
    attending: int = -1
    copies: dict[torch.device, TreeStep] = dataclasses.field(default_factory=dict)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the new rows unchanged and note the layer; the attention adapter stores them in the stash."""
        self.attending = layer
        return keys, values
