"""Accepted tokens that a draft model has not run yet, and runs before it drafts again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stree.kernels.dispatch import host_can_read

__all__ = ["CatchUpTokens"]


class CatchUpTokens:
    """A queue of tokens for every sequence of a batch.

    Args:
        batch: sequences.
        device: where their tokens are.

    Attributes:
        most: bound of a queue's length, known to the host.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        # int64[batch, capacity + 1], whose last column takes writes that are to be ignored, and each queue's length.
        self._tokens = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self._number = torch.zeros(batch, dtype=torch.long, device=device)
        self._parts: list[tuple[Tensor, Tensor]] = []  # on the CPU they are concatenated when needed
        self.most = 0

    def put(self, tokens: Tensor, count: Tensor, max_length: int | None) -> None:
        """Append the first ``count``, int64[batch], of int64[batch, m] tokens to the queues.

        Args:
            tokens: of every sequence.
            count: how many of them count.
            max_length: bound of a queue's length, where it is known, as it is where steps are captured.
        """
        self.most += tokens.shape[1]
        if host_can_read(tokens):
            self._parts.append((tokens, count))
            return
        place = torch.arange(tokens.shape[1], device=tokens.device)
        capacity = self._tokens.shape[1] - 1
        if self.most > capacity and (max_length is None or capacity < max_length):
            self._tokens = torch.nn.functional.pad(self._tokens, (0, (max_length or 2 * self.most) - capacity))
        end = self._tokens.shape[1] - 1
        index = torch.where(place < count[:, None], self._number[:, None] + place, end).clamp_(max=end)
        self._tokens.scatter_(1, index, tokens)
        self._number += count

    def all(self) -> tuple[Tensor, Tensor]:
        """Return int64[batch, m] tokens and int64[batch] lengths of the queues; they are valid until ``clear``."""
        return _concatenated(self._parts) if self._parts else (self._tokens, self._number)

    def reserve(self, max_length: int) -> None:
        """Allocate queues of this length, while they are empty."""
        self._tokens = self._tokens.new_zeros(len(self._tokens), max_length + 1)

    def forget(self, row: int) -> None:
        """Empty the queue of a sequence."""
        self._number[row] = 0
        for _, count in self._parts:
            count[row] = 0

    def clear(self) -> None:
        """Empty all queues."""
        self._number.zero_()
        self._parts, self.most = [], 0


def _concatenated(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate the first int64[batch] of each int64[batch, m] tokens: int64[batch, sum of m] and their number."""
    is_one = torch.cat([torch.arange(tokens.shape[1]) < count[:, None] for tokens, count in parts], 1)
    order = is_one.to(torch.int8).sort(dim=1, descending=True, stable=True).indices
    return torch.cat([tokens for tokens, _ in parts], 1).gather(1, order), is_one.sum(1)
