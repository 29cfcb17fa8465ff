"""Deferred commit: the accepted path is applied to the recurrent states by the scan of the next tree.

That saves one read and one write of every state.  The next tree overwrites the stash that holds the path, so the rows
of the path are copied here first, with one launch per tensor for all layers of a kind.  Shapes and addresses never
change, so a captured step can apply what another step has committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stree.kernels.step.bookkeeping import DeferredPath, copy_rows, defer_path
from stree.kernels.topology import AcceptedPath
from stree.models.layers.base import LayerSpec, LayerStack

__all__ = ["MAX_DEFERRED", "DeferredCommit"]

MAX_DEFERRED = 16  # smallest tile of the kernels; longer paths are rare and are applied at once


@dataclass(frozen=True, slots=True, eq=False)
class _PathRows:
    """Copies of the rows of a stack's stash along the path.

    Attributes:
        sources: stash tensors [layers, batch, ..., max_nodes, c].
        rows: [layers, batch, ..., MAX_DEFERRED, c] of each.
        begins: int64[layers, batch, ..., 1], index of the root of each tree among the rows of a flat source.
    """

    sources: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]
    begins: Tensor

    @classmethod
    def of(cls, stack: LayerStack) -> _PathRows:
        """Allocate rows for the tensors named by the stack's ``shared``."""
        sources, dim = tuple(getattr(stack, name) for name in stack.shared or ()), stack.node_dim
        if not sources:
            return cls((), (), torch.empty(0))
        leading, nodes = sources[0].shape[:dim], sources[0].shape[dim]
        begins = torch.arange(0, nodes * leading.numel(), nodes, device=sources[0].device)
        rows = tuple(source.new_zeros(*leading, MAX_DEFERRED, *source.shape[dim + 1 :]) for source in sources)
        return cls(sources, rows, begins.view(*leading, 1))

    def copy(self, nodes: Tensor) -> None:
        """Copy the rows of int64[batch, MAX_DEFERRED] nodes."""
        if self.sources:
            copy_rows(nodes.to(self.begins.device), self.begins, self.sources, self.rows)


class DeferredCommit:
    """The path whose commit is deferred; its lengths are 0 where there is none.

    Args:
        stacks: the stacks whose scans apply it.
        lengths: int32[batch], committed tokens; only shape and device are used.

    Attributes:
        path: int64[batch, MAX_DEFERRED], nodes of the last tree; 0 past the length.
        lengths: int32[batch].
        rows: by spec, the rows of the path in each ``shared`` tensor, [layers, batch, ..., MAX_DEFERRED, c] each.
    """

    def __init__(self, stacks: Mapping[LayerSpec, LayerStack], lengths: Tensor) -> None:
        self.path = torch.zeros(*lengths.shape, MAX_DEFERRED, dtype=torch.int64, device=lengths.device)
        self.lengths = torch.zeros_like(lengths)
        self._entries = torch.arange(MAX_DEFERRED, device=lengths.device).repeat(*lengths.shape, 1)
        self._path_rows = {spec: _PathRows.of(stack) for spec, stack in stacks.items()}
        self.rows = {spec: path_rows.rows for spec, path_rows in self._path_rows.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of memory."""
        return sum(rows.nbytes for path_rows in self.rows.values() for rows in path_rows)

    def put(self, path: Tensor, path_lengths: Tensor, lengths: Tensor) -> None:
        """Store a path of the tree in the stash, copy its rows, and add its length to the committed lengths.

        Args:
            path: int32[batch, m], m at most MAX_DEFERRED.
            path_lengths: int32[batch].
            lengths: int32[batch], committed tokens; advanced.
        """
        defer_path(path, path_lengths, DeferredPath(self.path, self.lengths), lengths)
        for path_rows in self._path_rows.values():
            path_rows.copy(self.path)

    def clear(self) -> None:
        """Drop the path, after it was applied or when the state is replaced."""
        self.lengths.zero_()

    def accepted(self, conv_width: int | None) -> tuple[AcceptedPath, AcceptedPath]:
        """Return the path as nodes of the stash, and as entries of ``rows``: 0, 1, 2, ..."""
        nodes = AcceptedPath.of(self.path, self.lengths, conv_width)
        return nodes, replace(nodes, rows=self._entries)  # rows past the length are those of the root
