"""The shape of a batch of token trees and of their accepted paths, shared by the layers of a step.

Indices only: no tokens, no model, no layer.  Everything here has fixed shapes and never reads the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stree.kernels.dispatch import Backend, uses_triton
from stree.kernels.step.walk import depth_first_walk
from stree.kernels.tiles import MAX_NODES
from stree.kernels.tree_indices import ancestor_bits, ancestor_mask, conv_rows, jump_rows, take_rows

if TYPE_CHECKING:
    from stree.kernels.step.indices import TreeIndices  # imports Triton

__all__ = ["AcceptedPath", "Topology", "most_nodes"]


def most_nodes(device: torch.device, dtype: torch.dtype) -> int | None:
    """Return the most nodes of a tree on a device, None for any number: Triton's bound, and float64 runs without it."""
    return MAX_NODES if device.type == "cuda" and dtype != torch.float64 else None


@dataclass(frozen=True, eq=False)  # without slots: indices that are derived are kept
class Topology:
    """Parents of a batch of trees and what the operations need of them, which is made when a layer first reads it.

    Attributes:
        parents: int32[batch, n], topological order, -1 for the root and for padding nodes.
        mask: bool[batch, n, n], ancestors of each node, itself included.
        depths: int32[batch, n], edges from the root; 0 for padding.
        conv_width: taps of the model's short convolutions; None for a model that has none.
        made: what one launch has made of them on a GPU, else None.
    """

    parents: Tensor
    mask: Tensor
    depths: Tensor
    conv_width: int | None = None
    made: TreeIndices | None = None

    @property
    def num_nodes(self) -> int:
        """Nodes of a tree, padding included."""
        return self.parents.shape[1]

    @classmethod
    def of(
        cls,
        parents: Tensor,
        conv_width: int | None = None,
        *,
        mask: Tensor | None = None,
        depths: Tensor | None = None,
        backend: Backend = "auto",
    ) -> Topology:
        """Derive ancestors and depths from int32[batch, n] parents, without reading the device.

        Args:
            parents: int32[batch, n].
            conv_width: taps of the model's short convolutions; None for a model that has none.
            mask: bool[batch, n, n] where the caller has it already.
            depths: int32[batch, n] where the caller has them already.
            backend: "triton" to make indices in one launch, "reference" for torch, "auto" for Triton on a GPU.
        """
        mask = ancestor_mask(parents) if mask is None else mask
        depths = mask.sum(-1, dtype=torch.int32) - 1 if depths is None else depths
        made = None
        if backend == "triton" or (backend == "auto" and uses_triton(mask)):
            from stree.kernels.step.indices import tree_indices

            made = tree_indices(parents, mask, conv_width)
        return cls(parents, mask, depths, conv_width, made)

    @classmethod
    def cast(cls, parents: Tensor | Topology) -> Topology:
        """Take a topology as it is; derive one from bare parents."""
        return parents if isinstance(parents, Topology) else cls.of(parents)

    @cached_property
    def hidden(self) -> Tensor:
        """bool[batch, n, n], the complement of mask."""
        return ~self.mask if self.made is None else self.made.hidden

    @cached_property
    def path_sum(self) -> Tensor:
        """float64[batch, n, n], the mask as a matrix: path_sum @ g adds g up along every root path."""
        return self.mask.double() if self.made is None else self.made.path_sum

    @cached_property
    def bits(self) -> Tensor:
        """int32[batch, n, words], see `ancestor_bits`; what Triton kernels read."""
        return ancestor_bits(self.mask) if self.made is None else self.made.bits

    @cached_property
    def conv_index(self) -> Tensor | None:
        """int64[batch, n, conv_width], see `stree.kernels.tree_indices.conv_rows`; None without a width."""
        if self.conv_width is None:
            return None
        return conv_rows(self.parents, self.conv_width) if self.made is None else self.made.conv_index

    @cached_property
    def jumps(self) -> tuple[Tensor, ...]:
        """See `jump_rows`."""
        return jump_rows(self.parents)

    @cached_property
    def walk(self) -> Tensor:
        """int32[batch, n], see `depth_first_walk`; in place of jumps on a GPU."""
        return depth_first_walk(self.parents, self.mask)

    def conv_rows(self, width: int) -> Tensor:
        """Return the rows of `stree.kernels.tree_indices.conv_rows`; those of ``conv_width`` are kept."""
        index = self.conv_index if width == self.conv_width else None
        return conv_rows(self.parents, width) if index is None else index


@dataclass(frozen=True, slots=True, eq=False)
class AcceptedPath:
    """Accepted nodes of a batch of trees, from the root down, ready to be committed to any state.

    Every commit and step takes one in place of `path` (then `path_lengths` is None), so that the layers of a model
    share its indices.  Entries past a length are ignored whatever they hold.

    Attributes:
        batch: int64[batch, 1], 0, 1, 2, ...
        rows: int64[batch, m], accepted nodes; 0 past the length.
        lengths: int64[batch], nodes accepted, root included; 0 leaves a sequence untouched.
        beyond: bool[batch, m], True past the length.
        conv_from: int64[batch, width - 1], column of the old window that moves into each column of the new one; like
            the other two, made by `of` on a GPU and by `cast` for what reads them.
        conv_rows: int64[batch, width - 1], node that moves into each column of the new window.
        conv_keeps: bool[batch, 1, width - 1], which of the two it is: True for the old window.
    """

    batch: Tensor
    rows: Tensor
    lengths: Tensor
    beyond: Tensor
    conv_from: Tensor | None = None
    conv_rows: Tensor | None = None
    conv_keeps: Tensor | None = None

    @classmethod
    def of(
        cls, path: Tensor, path_lengths: Tensor, conv_width: int | None = None, *, backend: Backend = "auto"
    ) -> AcceptedPath:
        """Derive the indices from int32[batch, m] and int32[batch], without reading the device."""
        if path.shape[1] == 0:
            path = path.new_zeros(path.shape[0], 1)  # one entry, past every length
        if backend == "triton" or (backend == "auto" and uses_triton(path)):
            from stree.kernels.step.indices import path_indices

            made = path_indices(path, path_lengths, conv_width)
            window = made.conv_from, made.conv_rows, made.conv_keeps
            return cls(made.batch, made.rows, made.lengths, made.beyond, *window)
        size, m = path.shape
        batch = torch.arange(size, device=path.device)[:, None]
        lengths = path_lengths.long()
        beyond = torch.arange(m, device=path.device) >= lengths[:, None]
        path = path.contiguous()  # kernels read its rows one after the other
        rows = path.long().masked_fill_(beyond, 0) if path.dtype != torch.int64 else path.masked_fill(beyond, 0)
        return cls(batch, rows, lengths, beyond)

    @classmethod
    def cast(
        cls, path: Tensor | AcceptedPath, path_lengths: Tensor | None, conv_width: int | None = None
    ) -> AcceptedPath:
        """Take an accepted path as it is, derive one from tensors; make sure that it has what a convolution needs."""
        if not isinstance(path, AcceptedPath):
            assert path_lengths is not None, "a path given as a tensor needs path_lengths"
            path = cls.of(path, path_lengths, conv_width)
        has_conv = path.conv_from is not None and path.conv_from.shape[1] + 1 == conv_width
        return path if conv_width is None or conv_width < 2 or has_conv else path._with_window(conv_width - 1)

    def _with_window(self, history: int) -> AcceptedPath:
        """Return the same with what a convolution needs whose window has ``history`` columns."""
        # Column t of the new window is row lengths + t of the sequence [old window, accepted nodes].
        source = self.lengths[:, None] + torch.arange(history, device=self.rows.device)
        return replace(
            self,
            conv_from=source.clamp(max=history - 1),
            conv_rows=self.rows.gather(1, (source - history).clamp_(0, self.rows.shape[1] - 1)),
            conv_keeps=(source < history)[:, None],
        )

    def take(self, nodes: Tensor) -> Tensor:
        """Gather the accepted nodes' rows of [batch, n, ...] into [batch, m, ...]; zero past the length."""
        beyond = self.beyond.view(*self.rows.shape, *(1,) * (nodes.ndim - 2))
        return take_rows(nodes, self.rows, self.batch).masked_fill_(beyond, 0)
