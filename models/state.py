"""What a sequence leaves behind: recurrent states, convolution windows, keys, values, and the stash of a pending tree.

Layers of one kind and shape are stacked, so that committing a path is a few operations for all of them together.  It
knows shapes and tensors; what a layer computes is its adapter's business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from stree.kernels.topology import AcceptedPath, Topology, reads_freely
from stree.models.checks import describe, is_integer
from stree.models.unfolded import MOST_ENTRIES, Unfolded
from stree.tree import TokenTree

__all__ = ["DecodeState", "LayerSpec", "LayerStack", "Prefilled", "Site", "TreeStep", "state_dtype"]


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype of recurrent states and logits: float64 for float64 models, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """What transformers' own forward of the prompts has left of one layer.

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
        weights: names of the tensors [layers, ...] that a layer's sequences share, taken over by ``bind``.
        shared: names of the tensors of the stash that all programs of a scan read, if the scan of the next tree can
            fold a path; None where a path is folded when it is committed.
        node_dim: dimension of the nodes in those.
    """

    weights: ClassVar[frozenset[str]] = frozenset()
    shared: ClassVar[tuple[str, ...] | None] = None
    node_dim: ClassVar[int] = 2

    def commit(self, path: Tensor, path_lengths: Tensor, lengths: Tensor) -> None:
        """Fold int32[batch, m] paths of the stash into the state, in place; ``lengths`` are those before it."""
        raise NotImplementedError

    def load(self, slot: int, prefilled: Prefilled) -> None:
        """Take over what the prompts have left in layer ``slot``; masked padding leaves nothing behind."""
        raise NotImplementedError

    def bind(self, slot: int, mixer: Any) -> None:
        """Take over what committing needs of layer ``slot``'s weights; nothing unless a subclass says so."""

    def layer(self, slot: int) -> Self:
        """View one layer: the same fields without their first dimension."""
        return dataclasses.replace(self, **{name: tensor[slot] for name, tensor in self._tensors()})

    def select(self, rows: Tensor) -> Self:
        """Copy some sequences, int64[batch']; rows may repeat."""
        chosen = {name: tensor.index_select(1, rows.to(tensor.device)) for name, tensor in self._rows()}
        return dataclasses.replace(self, **chosen)

    def overwrite(self, other: Self) -> None:
        """Take over a stack of equal or smaller sizes."""
        for (_, mine), (_, theirs) in zip(self._tensors(), other._tensors(), strict=True):
            mine[tuple(slice(size) for size in theirs.shape)].copy_(theirs)

    def reset(self) -> None:
        """Forget every sequence."""
        for _, tensor in self._rows():
            tensor.zero_()

    def write_row(self, row: int, other: Self) -> None:
        """Take over sequence ``row`` from a stack of batch 1."""
        for (_, mine), (_, theirs) in zip(self._rows(), other._rows(), strict=True):
            mine[:, row].copy_(theirs[:, 0])

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, stash included."""
        return sum(tensor.nbytes for _, tensor in self._tensors())

    def _tensors(self) -> list[tuple[str, Tensor]]:
        """List the fields that are tensors, by name."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return [(name, value) for name, value in values if isinstance(value, Tensor)]

    def _rows(self) -> list[tuple[str, Tensor]]:
        """List the tensors that hold sequences, by name."""
        return [(name, tensor) for name, tensor in self._tensors() if name not in self.weights]


class LayerSpec:
    """Sizes and place of one layer, hashable; layers with equal specs share a stack."""

    device: torch.device

    @property
    def conv_width(self) -> int | None:
        """Taps of the layer's short convolution, if it has one: what it needs of a tree's topology."""
        return None

    @property
    def is_diagonal(self) -> bool:
        """Whether its state is diagonal, so that it needs the jumps of a tree's topology."""
        return False

    def allocate(self, layers: int, batch: int, max_length: int, max_nodes: int) -> LayerStack:
        """Make zeroed tensors for some layers."""
        raise NotImplementedError


# One state of a layer: its index and the class of its spec, as a layer may have a recurrence and attention.
Site = tuple[int, type[LayerSpec]]


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
        fixed_shapes: whether every step has the shapes of every other, as a captured graph needs: attention then looks
            at the whole memory of the context, whatever the lengths.
        is_lazy: whether a committed path waits for the next tree's scan, which folds it in the same pass over a state.
        unfolded: that path, where there are layers that can wait.
        kept: by site, the rows of that path in what a layer's scan shares.
        is_torn: whether something that changes every layer, as a path does, failed half way.  One who knows that it has
            changed none, as of a captured graph that was never run, may set it to False.
    """

    @torch.inference_mode(False)  # a state outlives the block that it is made in
    def __init__(
        self,
        specs: Mapping[Site, LayerSpec],
        batch: int,
        max_length: int,
        max_nodes: int,
        device: Any,
        *,
        fixed_shapes: bool = False,
        is_lazy: bool = False,
    ) -> None:
        self.max_length, self.max_nodes, self.fixed_shapes = max_length, max_nodes, fixed_shapes
        self.specs, self.is_lazy, self.is_torn = specs, is_lazy, False
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.pending: Pending | None = None
        self.length_bound = 0
        self._slots: dict[Site, tuple[LayerSpec, int]] = {}
        counts: dict[LayerSpec, int] = {}
        for site, spec in specs.items():
            self._slots[site] = (spec, counts.get(spec, 0))
            counts[spec] = counts.get(spec, 0) + 1
        self._set_stacks({spec: spec.allocate(count, batch, max_length, max_nodes) for spec, count in counts.items()})

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return self.lengths.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, stash included."""
        waiting = 0 if self.unfolded is None else self.unfolded.num_bytes
        return waiting + sum(stack.num_bytes for stack in self.stacks.values())

    def clone(self) -> DecodeState:
        """Copy the committed state; a pending tree is left out."""
        return self.select(torch.arange(self.batch_size, device=self.lengths.device))

    @torch.inference_mode(False)
    def select(self, batch_indices: Tensor) -> DecodeState:
        """Copy some sequences into a new state, int[batch']; indices may repeat; a pending tree is left out.

        Raises:
            ValueError: no list of indices, an empty one, or an index outside the batch (checked for CPU tensors).
        """
        rows = torch.as_tensor(batch_indices, device=self.lengths.device)
        if not rows.numel():
            raise ValueError("batch_indices must name at least one sequence, got none")
        if rows.dim() != 1 or not is_integer(rows):
            raise ValueError(f"batch_indices must be int[batch], got {describe(rows)}")
        rows = rows.long()
        if reads_freely(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.batch_size:
            raise ValueError(f"batch_indices must be in [0, {self.batch_size}), got {rows.tolist()}")
        self.fold()
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
        other = DecodeState(
            self.specs, self.batch_size, max_length, max_nodes, self.lengths.device,
            fixed_shapes=self.fixed_shapes, is_lazy=self.is_lazy,
        )  # fmt: skip
        other.overwrite(self)
        return other

    def overwrite(self, other: DecodeState) -> None:
        """Take over the sequences of a state of as many, with as much or less room; nothing moves to another place."""
        other.fold()
        with self.changing():
            for spec, stack in self.stacks.items():
                stack.overwrite(other.stacks[spec])
            if self.unfolded is not None:
                self.unfolded.lengths.zero_()
            self.lengths.copy_(other.lengths)
        self.length_bound, self.pending, self.is_torn = other.length_bound, None, other.is_torn

    def reset(self) -> None:
        """Forget every sequence; nothing moves to another place."""
        for stack in self.stacks.values():
            stack.reset()
        if self.unfolded is not None:
            self.unfolded.lengths.zero_()
        self.lengths.zero_()
        self.length_bound, self.pending, self.is_torn = 0, None, False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Leave the state torn if what is done inside fails."""
        was_torn, self.is_torn = self.is_torn, True
        yield
        self.is_torn = was_torn

    def commit(self, path: Tensor, path_lengths: Tensor) -> None:
        """Fold int32[batch, m] paths of the pending tree into every layer, or let them wait, and consume the tree."""
        if path.shape[1]:
            waits = self.unfolded if path.shape[1] <= MOST_ENTRIES else None
            with self.changing():
                for spec, stack in self.stacks.items():
                    if waits is None or stack.shared is None:
                        stack.commit(*(tensor.to(spec.device) for tensor in (path, path_lengths, self.lengths)))
                if waits is None:
                    self.lengths += path_lengths
                else:
                    waits.put(path, path_lengths, self.lengths)
        self.pending = None

    def fold(self) -> None:
        """Fold a path that waits, so that the states may be looked at; nothing happens where none does."""
        if self.unfolded is None:
            return
        path = self.unfolded.path.int(), self.unfolded.lengths
        with self.changing():
            for spec, stack in self.stacks.items():
                if stack.shared is not None:
                    stack.commit(*(tensor.to(spec.device) for tensor in (*path, self.lengths)))
            self.unfolded.lengths.zero_()

    def bind(self, mixers: Mapping[Site, Any]) -> None:
        """Take over what committing needs of the layers' weights."""
        for site, (spec, slot) in self._slots.items():
            self.stacks[spec].bind(slot, mixers[site])

    def load(self, cache: Any, mixers: Mapping[Site, Any], lengths: Tensor, padded_length: int) -> None:
        """Take over what prompts left-padded to ``padded_length`` have left in a transformers cache, or in modules."""
        padding = padded_length - lengths.long()
        for site, (spec, slot) in self._slots.items():
            self.stacks[spec].load(slot, Prefilled(cache, site[0], mixers[site], padding))
        self.lengths.copy_(lengths)
        self.length_bound = padded_length

    def write_row(self, row: int, other: DecodeState) -> None:
        """Take over sequence ``row`` from a state of batch 1 and equal sizes; a pending tree is dropped."""
        self.fold()
        other.fold()
        self.pending = None  # the row's stash is overwritten, too
        with self.changing():
            for spec, stack in self.stacks.items():
                stack.write_row(row, other.stacks[spec])
            self.lengths[row] = other.lengths[0]
        self.length_bound = max(self.length_bound, other.length_bound)
        self.is_torn |= other.is_torn

    def _set_stacks(self, stacks: dict[LayerSpec, LayerStack]) -> None:
        """Hold the stacks, and a view of every layer so that no step makes one."""
        self.stacks = stacks
        self.layers: dict[Site, Any] = {site: stacks[spec].layer(slot) for site, (spec, slot) in self._slots.items()}
        waiting = {spec: stack for spec, stack in stacks.items() if stack.shared is not None}
        self.unfolded = Unfolded(waiting, self.lengths) if self.is_lazy and waiting else None
        self.kept: dict[Site, tuple[Tensor, ...]] = {}
        if self.unfolded is not None:
            for site, (spec, slot) in self._slots.items():
                self.kept[site] = tuple(rows[slot] for rows in self.unfolded.kept.get(spec, ()))


@dataclass(eq=False)  # without slots: transformers 5.17 leaves notes of its own on a RecurrentGemma's cache
class TreeStep:
    """The cache object that a grafted model is called with: its presence makes the adapters score a tree.

    Attributes:
        state: the state read, whose stash is written.
        topology: the tree's shape, computed once for all layers.
        first: nodes below it stand in the stash already.
        length_bound: int, rows of the context that attention looks at; no sequence of the state is longer.
        path: the committed path that every layer folds before it scans, as nodes of the stash, or None.
        entries: the same path as entries of what ``kept`` gives.
        attending: the layer whose attention runs; a module that several layers share does not know its own.
        copies: the same step on other devices where layers stand, by device.
    """

    state: DecodeState
    topology: Topology
    first: int
    length_bound: int
    path: AcceptedPath | None = None
    entries: AcceptedPath | None = None
    attending: int = -1
    copies: dict[torch.device, TreeStep] = dataclasses.field(default_factory=dict)

    def kept(self, layer: int, spec: type[LayerSpec]) -> Any:
        """Give the rows of the path that a layer's scan folds from, or None where there is nothing to fold."""
        return None if self.entries is None else self.state.kept[layer, spec]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Pass the new rows on: they stay pending, the attention adapter stores them under the layer named here."""
        self.attending = layer
        return keys, values
