"""Accepted tokens that a draft model or head has not run yet, and runs before it drafts again."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

__all__ = ["CatchUpTokens"]


class CatchUpTokens:
    """A queue of tokens, and of what belongs to each, for every sequence of a batch.

    Args:
        entries: int64[batch, 0] tokens, and tensors [batch, 0, ...] of what is kept beside each, on the batch's device.

    Attributes:
        most: bound of a queue's length, known to the host.
    """

    def __init__(self, *entries: Tensor) -> None:
        # [batch, capacity + 1, ...], whose last column takes writes that are to be ignored, and each queue's length.
        self._entries = [_resized(entry, 1) for entry in entries]
        self._number = torch.zeros(len(entries[0]), dtype=torch.long, device=entries[0].device)
        self.most = 0

    def put(self, entries: Sequence[Tensor], count: Tensor, max_length: int | None) -> None:
        """Append the first ``count``, int64[batch], of [batch, m, ...] entries to the queues.

        Args:
            entries: of every sequence: int64[batch, m] tokens, and what is kept beside them.
            count: how many of them count.
            max_length: bound of a queue's length, where it is known, as it is where steps are captured.
        """
        width = entries[0].shape[1]
        self.most += width
        place = torch.arange(width, device=count.device)
        capacity = self._entries[0].shape[1] - 1
        if self.most > capacity and (max_length is None or capacity < max_length):
            self._entries = [_resized(entry, (max_length or 2 * self.most) + 1) for entry in self._entries]
        end = self._entries[0].shape[1] - 1
        index = torch.where(place < count[:, None], self._number[:, None] + place, end).clamp_(max=end)
        for held, entry in zip(self._entries, entries, strict=True):
            held.scatter_(1, _expanded(index, entry), entry)
        self._number += count

    def all(self) -> tuple[Sequence[Tensor], Tensor]:
        """Return [batch, m, ...] entries and int64[batch] lengths of the queues; they are valid until ``clear``."""
        return self._entries, self._number

    def reserve(self, max_length: int) -> None:
        """Allocate queues of this length at least."""
        if max_length >= self._entries[0].shape[1]:
            self._entries = [_resized(entry, max_length + 1) for entry in self._entries]

    def forget(self, row: int) -> None:
        """Empty the queue of a sequence."""
        self._number[row] = 0

    def select(self, rows: Tensor) -> CatchUpTokens:
        """Copy the queues of some sequences, int64[batch']."""
        other = copy(self)
        other._entries, other._number = [entry[rows] for entry in self._entries], self._number[rows]
        return other

    def clear(self) -> None:
        """Empty all queues."""
        self._number.zero_()
        self.most = 0


def _resized(entry: Tensor, length: int) -> Tensor:
    """Copy a tensor [batch, m, ...] into zeros [batch, length, ...]."""
    larger = entry.new_zeros(len(entry), length, *entry.shape[2:])
    larger[:, : entry.shape[1]] = entry
    return larger


def _expanded(index: Tensor, entry: Tensor) -> Tensor:
    """Expand int64[batch, m] indices to the shape of an entry."""
    return index.view(*index.shape, *[1] * (entry.dim() - 2)).expand(*index.shape, *entry.shape[2:])
