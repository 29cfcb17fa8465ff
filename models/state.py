"""What a sequence leaves behind: recurrent states, convolution windows, keys, values, and the stash of a pending tree.

Layers of one kind and shape are stacked, so that committing a path is a few operations for all of them together.  It
knows shapes and tensors; what a layer computes is its adapter's business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from stree.kernels.topology import Topology
from stree.tree import TokenTree

__all__ = ["DecodeState", "LayerSpec", "LayerStack", "TreeStep", "state_dtype"]


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype of recurrent states and logits: float64 for float64 models, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class LayerStack:
    """Tensors [layers, batch, ...] of all layers of one kind and shape; subclasses name them and say how to commit."""

    def commit(self, path: Tensor, path_lengths: Tensor, lengths: Tensor) -> None:
        """Fold int32[batch, m] paths of the stash into the state, in place; ``lengths`` are those before it."""
        raise NotImplementedError

    def load(self, slot: int, cache_layer: Any, padding: Tensor) -> None:
        """Take over layer ``slot`` from a transformers cache layer of prompts left-padded by int64[batch]."""
        raise NotImplementedError

    def bind(self, slot: int, mixer: Any) -> None:
        """Take over what committing needs of layer ``slot``'s weights; nothing unless a subclass says so."""

    def layer(self, slot: int) -> Self:
        """View one layer: the same fields without their first dimension."""
        return dataclasses.replace(self, **{name: tensor[slot] for name, tensor in self._tensors()})

    def select(self, rows: Tensor) -> Self:
        """Copy some sequences, int64[batch']; rows may repeat."""
        return dataclasses.replace(self, **{name: tensor.index_select(1, rows) for name, tensor in self._tensors()})

    def overwrite(self, other: Self) -> None:
        """Take over a stack of equal or smaller sizes."""
        for (_, mine), (_, theirs) in zip(self._tensors(), other._tensors(), strict=True):
            mine[tuple(slice(size) for size in theirs.shape)].copy_(theirs)

    def write_row(self, row: int, other: Self) -> None:
        """Take over sequence ``row`` from a stack of batch 1."""
        for (_, mine), (_, theirs) in zip(self._tensors(), other._tensors(), strict=True):
            mine[:, row].copy_(theirs[:, 0])

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, stash included."""
        return sum(tensor.nbytes for _, tensor in self._tensors())

    def _tensors(self) -> list[tuple[str, Tensor]]:
        """List the fields that are tensors, by name."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return [(name, value) for name, value in values if isinstance(value, Tensor)]


class LayerSpec(Protocol, Hashable):
    """Sizes of one layer; layers with equal specs share a stack."""

    def allocate(self, layers: int, batch: int, max_length: int, max_nodes: int) -> LayerStack:
        """Make zeroed tensors for some layers."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """The last verified tree: what ``commit`` needs and what ``verify(first=k)`` compares with."""

    tree: TokenTree
    topology: Topology


class DecodeState:
    """The state of a batch of sequences: memory for ``max_length`` tokens and ``max_nodes`` pending nodes each.

    ``TreeLM.prefill`` fills it, ``TreeLM.commit`` advances it; ``verify`` writes the stash only.

    Attributes:
        lengths: int32[batch], committed tokens of each sequence.
        max_length: most committed tokens a sequence.
        max_nodes: most nodes of a tree, root included.
        pending: the last verified and not yet committed tree, or None.
        length_bound: int, known to the host; no sequence is longer.
    """

    def __init__(
        self, specs: Mapping[int, LayerSpec], batch: int, max_length: int, max_nodes: int, device: Any
    ) -> None:
        self.max_length, self.max_nodes = max_length, max_nodes
        self.specs = specs
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.pending: Pending | None = None
        self.length_bound = 0
        self._slots: dict[int, tuple[LayerSpec, int]] = {}
        counts: dict[LayerSpec, int] = {}
        for layer, spec in specs.items():
            self._slots[layer] = (spec, counts.get(spec, 0))
            counts[spec] = counts.get(spec, 0) + 1
        self._set_stacks({spec: spec.allocate(count, batch, max_length, max_nodes) for spec, count in counts.items()})

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return self.lengths.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, stash included."""
        return sum(stack.num_bytes for stack in self.stacks.values())

    def clone(self) -> DecodeState:
        """Copy the committed state; a pending tree is left out."""
        return self.select(torch.arange(self.batch_size, device=self.lengths.device))

    def select(self, batch_indices: Tensor) -> DecodeState:
        """Copy some sequences into a new state, int[batch']; indices may repeat; a pending tree is left out.

        Raises:
            ValueError: an index outside the batch (checked for CPU tensors).
        """
        rows = torch.as_tensor(batch_indices, device=self.lengths.device).long()
        if rows.dim() != 1:
            raise ValueError(f"batch_indices must be int[batch], got {[*rows.shape]}")
        if rows.device.type == "cpu" and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < self.batch_size:
            raise ValueError(f"batch_indices must be in [0, {self.batch_size}), got {rows.tolist()}")
        other = object.__new__(DecodeState)
        other.__dict__.update(self.__dict__)
        other.pending = None
        other.lengths = self.lengths[rows]
        other._set_stacks({spec: stack.select(rows) for spec, stack in self.stacks.items()})
        return other

    def resized(self, max_length: int, max_nodes: int) -> DecodeState:
        """Copy the committed state into one with more room; a pending tree is left out.

        Raises:
            ValueError: a size below the present one.
        """
        if max_length < self.max_length or max_nodes < self.max_nodes:
            present = f"max_length {self.max_length} and max_nodes {self.max_nodes}"
            raise ValueError(f"a resized state must have at least {present}, got {max_length} and {max_nodes}")
        other = DecodeState(self.specs, self.batch_size, max_length, max_nodes, self.lengths.device)
        for spec, stack in self.stacks.items():
            other.stacks[spec].overwrite(stack)
        other.lengths.copy_(self.lengths)
        other.length_bound = self.length_bound
        return other

    def commit(self, path: Tensor, path_lengths: Tensor) -> None:
        """Fold int32[batch, m] paths of the pending tree into every layer and consume the tree."""
        if path.shape[1]:
            for stack in self.stacks.values():
                stack.commit(path, path_lengths, self.lengths)
            self.lengths += path_lengths
        self.pending = None

    def bind(self, layer: int, mixer: Any) -> None:
        """Take over what committing needs of a layer's weights."""
        spec, slot = self._slots[layer]
        self.stacks[spec].bind(slot, mixer)

    def load(self, cache: Any, lengths: Tensor, padded_length: int) -> None:
        """Take over a transformers cache that holds prompts left-padded to ``padded_length``."""
        for layer, (spec, slot) in self._slots.items():
            self.stacks[spec].load(slot, cache.layers[layer], padded_length - lengths.long())
        self.lengths.copy_(lengths)
        self.length_bound = padded_length

    def write_row(self, row: int, other: DecodeState) -> None:
        """Take over sequence ``row`` from a state of batch 1 and equal sizes."""
        for spec, stack in self.stacks.items():
            stack.write_row(row, other.stacks[spec])
        self.lengths[row] = other.lengths[0]
        self.length_bound = max(self.length_bound, other.length_bound)

    def _set_stacks(self, stacks: dict[LayerSpec, LayerStack]) -> None:
        """Hold the stacks, and a view of every layer so that no step makes one."""
        self.stacks = stacks
        self.layers: dict[int, Any] = {layer: stacks[spec].layer(slot) for layer, (spec, slot) in self._slots.items()}


@dataclass(slots=True, eq=False)
class TreeStep:
    """The cache object that a grafted model is called with: its presence makes the adapters score a tree.

    Attributes:
        state: the state read, whose stash is written.
        topology: the tree's shape, computed once for all layers.
        first: nodes below it stand in the stash already.
        length_bound: int, known to the host; no sequence of the state is longer.
    """

    state: DecodeState
    topology: Topology
    first: int
    length_bound: int

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Pass the new rows on: they stay pending, the attention adapter stores them."""
        return keys, values
