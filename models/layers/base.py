"""Base classes of an adapter: the sizes of one layer, and the tensors of all layers of one kind and shape.

Layers of one kind and shape are stacked, so that committing a path is a few operations for all of them together.  An
adapter subclasses both and has a function that patches its module; `stree.models.families` names that function.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypedDict

import torch
from torch import Tensor

__all__ = ["LayerSpec", "LayerStack", "Placement", "Prefilled", "Site", "Zeros", "state_dtype"]


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of recurrent states and logits: float64 for float64 models, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Placement(TypedDict):
    """Where a layer's tensors are: the dtype of its activations, which quantised weights do not have, and the device.

    Attributes:
        dtype: of the layer's input and output.
        device: of its weights.
    """

    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Zeros:
    """Allocates zeroed tensors for a stack of layers.

    Attributes:
        leading: sizes that every tensor begins with: layers and sequences.
        dtype: default of the tensors.
        device: of the tensors.
    """

    leading: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate a tensor [*leading, *shape]."""
        return torch.zeros(*self.leading, *shape, dtype=dtype or self.dtype, device=self.device)


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """Result of transformers' forward of the prompts for one layer.

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
    """Tensors [layers, batch, ...] of all layers of one kind and shape; subclasses add them as fields.

    Attributes:
        weights: names of the tensors [layers, ...] without a batch dimension, copied from the module by ``bind``.
        shared: names of the stash tensors whose rows a deferred commit copies, because several programs of the scan
            read them; None if the layer cannot defer a commit.
        node_dim: dimension of the nodes in ``shared`` tensors.
    """

    weights: ClassVar[frozenset[str]] = frozenset()
    shared: ClassVar[tuple[str, ...] | None] = None
    node_dim: ClassVar[int] = 2

    def commit(self, path: Tensor, path_lengths: Tensor, lengths: Tensor) -> None:
        """Apply int32[batch, m] paths of the stash to the state, in place; ``lengths`` are those before it."""
        raise NotImplementedError

    def commit_early(self, path: Tensor, path_lengths: Tensor) -> None:
        """Apply now the part of a deferred commit that the next scan cannot apply; nothing by default."""

    def commit_late(self, path: Tensor, path_lengths: Tensor, lengths: Tensor) -> None:
        """Apply a deferred commit without its early part."""
        self.commit(path, path_lengths, lengths)

    def with_fused_mixer(self) -> Self:
        """Return the same for mixers that run in one launch where they can."""
        return self

    def load(self, slot: int, prefilled: Prefilled) -> None:
        """Copy the state after the prompts into layer ``slot``."""
        raise NotImplementedError

    def store(self, slot: int, cache: Any, layer: int, length: int) -> None:
        """Copy the state of layer ``slot`` after ``length`` tokens into a layer of an empty transformers cache."""
        raise NotImplementedError

    def bind(self, slot: int, mixer: Any) -> None:
        """Copy the weights of layer ``slot`` that committing needs; none by default."""

    def layer(self, slot: int) -> Self:
        """View one layer: the same fields without their first dimension."""
        return dataclasses.replace(self, **{name: tensor[slot] for name, tensor in self.tensors()})

    def select(self, rows: Tensor) -> Self:
        """Copy some sequences, int64[batch']; rows may repeat."""
        chosen = {name: tensor.index_select(1, rows.to(tensor.device)) for name, tensor in self.sequence_tensors()}
        return dataclasses.replace(self, **chosen)

    def overwrite(self, other: Self) -> None:
        """Copy in what both have room for of a stack of other sizes."""
        for (_, mine), (_, theirs) in zip(self.tensors(), other.tensors(), strict=True):
            both = tuple(slice(min(sizes)) for sizes in zip(mine.shape, theirs.shape, strict=True))
            mine[both].copy_(theirs[both])

    def reset(self) -> None:
        """Zero every sequence."""
        for _, tensor in self.sequence_tensors():
            tensor.zero_()

    def reset_rows(self, rows: Tensor) -> None:
        """Zero some sequences, int64[batch']."""
        for _, tensor in self.sequence_tensors():
            tensor.index_fill_(1, rows.to(tensor.device), 0)

    def write_row(self, row: int, other: Self) -> None:
        """Copy in sequence ``row`` from a stack of batch 1, and the weights, which are the newer ones there."""
        for (name, mine), (_, theirs) in zip(self.tensors(), other.tensors(), strict=True):
            if name in self.weights:
                mine.copy_(theirs)
            else:
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
    """Sizes and placement of one layer, hashable; layers with equal specs share a stack.

    Attributes:
        kind: name of the layer kind for users.
        before_convolution: names of the mixer's projections whose output is convolved; a mixer may lack some.
        dtype: of the activations.
        device: of the weights.
        conv_width: taps of the layer's short convolution, or None.
    """

    kind: ClassVar[str]
    before_convolution: ClassVar[tuple[str, ...]] = ()

    dtype: torch.dtype
    device: torch.device
    conv_width: int | None = None

    def allocate(self, layers: int, batch: int, max_length: int, max_nodes: int) -> LayerStack:
        """Allocate zeroed tensors for ``layers`` layers."""
        raise NotImplementedError


# One state of a layer: its index and the class of its spec, as a layer may have a recurrence and attention.
Site = tuple[int, type[LayerSpec]]
