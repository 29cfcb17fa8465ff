"""A committed path that is not in the states yet: the scan of the next tree folds it in its one pass over them.

The next tree overwrites the stash that the path stands in.  What all programs of a scan read of it is copied here, the
rows of the path only, for all layers of a kind in a launch a tensor; so a step needs neither a second stash nor a
launch a layer.  Sizes and places never change: a step that was captured once finds what another one has committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stree.kernels.bookkeeping import Waiting, copy_rows, put_path
from stree.kernels.topology import AcceptedPath

if TYPE_CHECKING:
    from stree.models.state import LayerSpec, LayerStack

__all__ = ["MOST_ENTRIES", "Unfolded"]

MOST_ENTRIES = 16  # the least tile of the kernels; longer paths are rare and are folded when they are committed


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """Rows of a stack's stash along the path.

    Attributes:
        sources: stash tensors [layers, batch, ..., max_nodes, c].
        rows: [layers, batch, ..., MOST_ENTRIES, c] of each.
        begins: int64[layers, batch, ..., 1], where a tree's nodes begin among the rows of a flat source.
    """

    sources: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]
    begins: Tensor

    @classmethod
    def of(cls, stack: LayerStack) -> _Kept:
        """Make room for what the stack's scan shares."""
        sources, dim = tuple(getattr(stack, name) for name in stack.shared or ()), stack.node_dim
        if not sources:
            return cls((), (), torch.empty(0))
        leading, nodes = sources[0].shape[:dim], sources[0].shape[dim]
        begins = torch.arange(0, nodes * leading.numel(), nodes, device=sources[0].device)
        rows = tuple(source.new_zeros(*leading, MOST_ENTRIES, *source.shape[dim + 1 :]) for source in sources)
        return cls(sources, rows, begins.view(*leading, 1))

    def copy(self, nodes: Tensor) -> None:
        """Copy the rows of int64[batch, MOST_ENTRIES] nodes."""
        if self.sources:
            copy_rows(nodes.to(self.begins.device), self.begins, self.sources, self.rows)


class Unfolded:
    """The path that waits, or none: then its lengths are 0.

    Args:
        stacks: the stacks whose scans fold it.
        lengths: int32[batch], committed tokens; their shape and device are taken.

    Attributes:
        path: int64[batch, MOST_ENTRIES], nodes of the last tree; 0 past the length.
        lengths: int32[batch].
        kept: by spec, the rows of the path in what a scan shares, [layers, batch, ..., MOST_ENTRIES, c] each.
    """

    def __init__(self, stacks: Mapping[LayerSpec, LayerStack], lengths: Tensor) -> None:
        self.path = torch.zeros(*lengths.shape, MOST_ENTRIES, dtype=torch.int64, device=lengths.device)
        self.lengths = torch.zeros_like(lengths)
        self._entries = torch.arange(MOST_ENTRIES, device=lengths.device).repeat(*lengths.shape, 1)
        self._kept = {spec: _Kept.of(stack) for spec, stack in stacks.items()}
        self.kept = {spec: kept.rows for spec, kept in self._kept.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of memory."""
        return sum(rows.nbytes for kept in self.kept.values() for rows in kept)

    def put(self, path: Tensor, path_lengths: Tensor, lengths: Tensor) -> None:
        """Take over a path of the tree in the stash, copy its rows, and count it as committed.

        Args:
            path: int32[batch, m], m at most MOST_ENTRIES.
            path_lengths: int32[batch].
            lengths: int32[batch], committed tokens; advanced.
        """
        put_path(path, path_lengths, Waiting(self.path, self.lengths), lengths)
        for kept in self._kept.values():
            kept.copy(self.path)

    def accepted(self, conv_width: int | None) -> tuple[AcceptedPath, AcceptedPath]:
        """Give the path as nodes of the stash, and as entries of the kept rows: 0, 1, 2, ..."""
        nodes = AcceptedPath.of(self.path, self.lengths, conv_width)
        return nodes, replace(nodes, rows=self._entries)  # past the length there are rows, too: of the root
