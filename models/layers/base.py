"""What every layer kind declares: the sizes of one layer, and the tensors of all layers of one kind and shape.

Layers of one kind and shape are stacked, so that committing a path is a few operations for all of them together.  This
file knows shapes and tensors; what a layer computes is in its adapter.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

__all__ = ["LayerSpec", "LayerStack", "Prefilled", "Site", "Zeros", "state_dtype"]


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype of recurrent states and logits: float64 for float64 models, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class Zeros:
    """Makes zeroed tensors for a stack of layers.

    Attributes:
        leading: sizes that every tensor begins with: layers and sequences.
        dtype: of the tensors unless told otherwise.
        device: of the tensors.
    """

    leading: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Make a tensor [*leading, *shape]."""
        return torch.zeros(*self.leading, *shape, dtype=dtype or self.dtype, device=self.device)


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """What transformers' own forward of the prompts has written for one layer.

    Attributes:
        cache: the transformers cache that the model filled.
        layer: index of the layer in it.
        mixer: the layer's module.
        padding: int64[batch], columns of left padding of each prompt.
    """

    cache: Any
    layer: int
    mixer: Any
    padding: Tensor


@dataclass(frozen=True, eq=False)
class LayerStack:
    """Tensors [layers, batch, ...] of all layers of one kind and shape; subclasses name them and say how to commit.

    Attributes:
        weights: names of the tensors [layers, ...] that a layer's sequences share, copied from the module by ``bind``.
        shared: names of the stash tensors that all programs of a scan read, if the scan of the next tree can commit a
            path; None where a path is always committed at once.
        node_dim: dimension of the nodes in those.
    """

    weights: ClassVar[frozenset[str]] = frozenset()
    shared: ClassVar[tuple[str, ...] | None] = None
    node_dim: ClassVar[int] = 2

    def commit(self, path: Tensor, path_lengths: Tensor, lengths: Tensor) -> None:
        """Apply int32[batch, m] paths of the stash to the state, in place; ``lengths`` are those before it."""
        raise NotImplementedError

    def load(self, slot: int, prefilled: Prefilled) -> None:
        """Copy what the prompts have written for layer ``slot``; masked padding contributes nothing."""
        raise NotImplementedError

    def bind(self, slot: int, mixer: Any) -> None:
        """Copy what committing needs of layer ``slot``'s weights; nothing unless a subclass overrides it."""

    def layer(self, slot: int) -> Self:
        """View one layer: the same fields without their first dimension."""
        return dataclasses.replace(self, **{name: tensor[slot] for name, tensor in self.tensors()})

    def select(self, rows: Tensor) -> Self:
        """Copy some sequences, int64[batch']; rows may repeat."""
        chosen = {name: tensor.index_select(1, rows.to(tensor.device)) for name, tensor in self.sequence_tensors()}
        return dataclasses.replace(self, **chosen)

    def overwrite(self, other: Self) -> None:
        """Copy in a stack of equal or smaller sizes."""
        for (_, mine), (_, theirs) in zip(self.tensors(), other.tensors(), strict=True):
            mine[tuple(slice(size) for size in theirs.shape)].copy_(theirs)

    def reset(self) -> None:
        """Zero every sequence."""
        for _, tensor in self.sequence_tensors():
            tensor.zero_()

    def write_row(self, row: int, other: Self) -> None:
        """Copy in sequence ``row`` from a stack of batch 1."""
        for (_, mine), (_, theirs) in zip(self.sequence_tensors(), other.sequence_tensors(), strict=True):
            mine[:, row].copy_(theirs[:, 0])

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, stash included."""
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def tensors(self) -> list[tuple[str, Tensor]]:
        """List the fields that are tensors, by name."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return [(name, value) for name, value in values if isinstance(value, Tensor)]

    def sequence_tensors(self) -> list[tuple[str, Tensor]]:
        """List the tensors that hold sequences, by name: all but copies of weights."""
        return [(name, tensor) for name, tensor in self.tensors() if name not in self.weights]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """TreeSizes and placement of one layer, hashable; layers with equal specs share a stack.

    Attributes:
        dtype: of the weights.
        device: of the weights.
        conv_width: taps of the layer's short convolution, if it has one: what it needs of a tree's topology.
        is_diagonal: whether its state is diagonal, so that it needs the jumps of a tree's topology.
    """

    is_diagonal: ClassVar[bool] = False

    dtype: torch.dtype
    device: torch.device
    conv_width: int | None = None

    def allocate(self, layers: int, batch: int, max_length: int, max_nodes: int) -> LayerStack:
        """Make zeroed tensors for some layers."""
        raise NotImplementedError


# One state of a layer: its index and the class of its spec, as a layer may have a recurrence and attention.
Site = tuple[int, type[LayerSpec]]
