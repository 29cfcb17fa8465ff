"""The shape of a batch of token trees and of their accepted paths, computed once a step and read by every layer.

Indices only: no tokens, no model, no layer.  Everything here has fixed shapes and never reads the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stree.kernels.dispatch import Backend, uses_triton
from stree.kernels.step.walk import depth_first_walk
from stree.kernels.tiles import MAX_NODES
from stree.kernels.tree_indices import ancestor_bits, ancestor_mask, conv_rows, jump_rows, take_rows

__all__ = ["AcceptedPath", "Topology", "most_nodes"]


def most_nodes(device: torch.device, dtype: torch.dtype) -> int | None:
    """Return the most nodes of a tree on a device, None for any number: Triton's bound, and float64 runs without it."""
    return MAX_NODES if device.type == "cuda" and dtype != torch.float64 else None


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """Parents of a batch of trees and what the operations need of them.

    Attributes:
        parents: int32[batch, n], topological order, -1 for the root and for padding nodes.
        mask: bool[batch, n, n], ancestors of each node, itself included.
        depths: int32[batch, n], edges from the root; 0 for padding.
        hidden: bool[batch, n, n], the complement of mask.
        path_sum: float64[batch, n, n], the mask as a matrix: path_sum @ g adds g up along every root path.
        conv_index: int64[batch, n, width], see `conv_rows`; None unless asked for.
        jumps: see `jump_rows`; None unless asked for.
        bits: int32[batch, n, words], see `ancestor_bits`; what Triton kernels read, so None unless on a GPU.
        walk: int32[batch, n], see `depth_first_walk`; in place of jumps on a GPU, for Triton kernels.
    """

    parents: Tensor
    mask: Tensor
    depths: Tensor
    hidden: Tensor
    path_sum: Tensor
    conv_index: Tensor | None = None
    jumps: tuple[Tensor, ...] | None = None
    bits: Tensor | None = None
    walk: Tensor | None = None

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
        jumps: bool = False,
        backend: Backend = "auto",
    ) -> Topology:
        """Derive everything from int32[batch, n] parents, without reading the device.

        Args:
            parents: int32[batch, n].
            conv_width: taps of the model's short convolutions; None for a model that has none.
            mask: bool[batch, n, n] where the caller has it already.
            depths: int32[batch, n] where the caller has them already.
            jumps: whether the model has layers with a diagonal state (Mamba-1, RG-LRU).
            backend: "triton" for one launch, "reference" for torch, "auto" for Triton on a GPU.
        """
        mask = ancestor_mask(parents) if mask is None else mask
        depths = mask.sum(-1, dtype=torch.int32) - 1 if depths is None else depths
        if backend == "triton" or (backend == "auto" and uses_triton(mask)):
            from stree.kernels.step.indices import tree_indices

            made = tree_indices(parents, mask, conv_width)
            walk = depth_first_walk(parents, mask) if jumps else None
            return cls(parents, mask, depths, made.hidden, made.path_sum, made.conv_index, bits=made.bits, walk=walk)
        return cls(
            parents=parents,
            mask=mask,
            depths=depths,
            hidden=~mask,
            path_sum=mask.double(),
            conv_index=None if conv_width is None else conv_rows(parents, conv_width),
            jumps=jump_rows(parents) if jumps else None,
        )

    @classmethod
    def cast(cls, parents: Tensor | Topology) -> Topology:
        """Take a topology as it is; derive one from bare parents."""
        return parents if isinstance(parents, Topology) else cls.of(parents)

    def conv_rows(self, width: int) -> Tensor:
        """Return the rows of `conv_rows`, computed here only if they were not asked for in `of`."""
        if self.conv_index is not None and self.conv_index.shape[2] == width:
            return self.conv_index
        return conv_rows(self.parents, width)

    def jump_rows(self) -> tuple[Tensor, ...]:
        """Return the rows of `jump_rows`, computed here only if they were not asked for in `of`."""
        return jump_rows(self.parents) if self.jumps is None else self.jumps

    def ancestor_bits(self) -> Tensor:
        """Return the words of `ancestor_bits`, computed here only if `of` did not."""
        return ancestor_bits(self.mask) if self.bits is None else self.bits

    def depth_first_walk(self) -> Tensor:
        """Return the entries of `depth_first_walk`, computed here only if `of` did not."""
        return depth_first_walk(self.parents, self.mask) if self.walk is None else self.walk


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
        conv_from: int64[batch, width - 1], column of the old window that moves into each column of the new one.
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
        if conv_width is None or conv_width < 2:
            return cls(batch, rows, lengths, beyond)
        history = conv_width - 1
        # Column t of the new window is row lengths + t of the sequence [old window, accepted nodes].
        source = lengths[:, None] + torch.arange(history, device=path.device)
        return cls(
            batch,
            rows,
            lengths,
            beyond,
            conv_from=source.clamp(max=history - 1),
            conv_rows=rows.gather(1, (source - history).clamp_(0, m - 1)),
            conv_keeps=(source < history)[:, None],
        )

    @classmethod
    def cast(
        cls, path: Tensor | AcceptedPath, path_lengths: Tensor | None, conv_width: int | None = None
    ) -> AcceptedPath:
        """Take an accepted path as it is, derive one from tensors; make sure that it has what a convolution needs."""
        if not isinstance(path, AcceptedPath):
            assert path_lengths is not None, "a path given as a tensor needs path_lengths"
            return cls.of(path, path_lengths, conv_width)
        has_conv = path.conv_from is not None and path.conv_from.shape[1] + 1 == conv_width
        if conv_width is None or conv_width < 2 or has_conv:
            return path
        return cls.of(path.rows, path.lengths, conv_width)

    def take(self, nodes: Tensor) -> Tensor:
        """Gather the accepted nodes' rows of [batch, n, ...] into [batch, m, ...]; zero past the length."""
        beyond = self.beyond.view(*self.rows.shape, *(1,) * (nodes.ndim - 2))
        return take_rows(nodes, self.rows, self.batch).masked_fill_(beyond, 0)
