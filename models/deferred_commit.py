"""A committed path that is not applied to the states yet: the next tree's scan applies it in its one pass over them.

The next tree overwrites the stash that holds the path.  What all programs of a scan read of it is copied here, the
rows of the path only, for all layers of a kind in a launch a tensor; so a step needs neither a second stash nor a
launch a layer.  TreeSizes and addresses never change, so a captured step finds what another step has committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stree.kernels.step.bookkeeping import CatchUp, copy_rows, defer_path
from stree.kernels.topology import AcceptedPath
from stree.models.layers.base import LayerSpec, LayerStack

__all__ = ["MAX_DEFERRED", "DeferredCommit"]

MAX_DEFERRED = 16  # the least tile of the kernels; longer paths are rare and are applied when they are committed


@dataclass(frozen=True, slots=True, eq=False)
class _PathRows:
    """Rows of a stack's stash along the path.

    Attributes:
        sources: stash tensors [layers, batch, ..., max_nodes, c].
        rows: [layers, batch, ..., MAX_DEFERRED, c] of each.
        begins: int64[layers, batch, ..., 1], where a tree's nodes begin among the rows of a flat source.
    """

    sources: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]
    begins: Tensor

    @classmethod
    def of(cls, stack: LayerStack) -> _PathRows:
        """Allocate rows for what the stack's scan shares."""
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
        rows: by spec, the rows of the path in what a scan shares, [layers, batch, ..., MAX_DEFERRED, c] each.
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
        """Take a path of the tree in the stash, copy its rows, and count it as committed.

        Args:
            path: int32[batch, m], m at most MAX_DEFERRED.
            path_lengths: int32[batch].
            lengths: int32[batch], committed tokens; advanced.
        """
        defer_path(path, path_lengths, CatchUp(self.path, self.lengths), lengths)
        for path_rows in self._path_rows.values():
            path_rows.copy(self.path)

    def clear(self) -> None:
        """Note that the path was applied, or is not needed."""
        self.lengths.zero_()

    def accepted(self, conv_width: int | None) -> tuple[AcceptedPath, AcceptedPath]:
        """Give the path as nodes of the stash, and as entries of ``rows``: 0, 1, 2, ..."""
        nodes = AcceptedPath.of(self.path, self.lengths, conv_width)
        return nodes, replace(nodes, rows=self._entries)  # rows past the length are those of the root
