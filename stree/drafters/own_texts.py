"""The texts of a drafter's run that is used without a decode step."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from stree.drafters.base import padded_prompts
from stree.kernels.step.texts import Seen
from stree.verify import Acceptance

__all__ = ["OwnTexts"]

ROOM = 1024  # tokens beyond the longest prompt


class OwnTexts:
    """Texts that a run follows itself, from the prompts on.

    Args:
        prompts: of the texts.
        device: of the run's tensors.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        tokens, lengths = padded_prompts(prompts)
        self._tokens = torch.nn.functional.pad(tokens, (0, ROOM)).to(device)
        self._lengths = lengths.to(device)
        self._most = max(map(len, prompts)) + 1  # bound of their tokens, the pending ones included

    def seen(self, pending: Tensor) -> Seen:
        """Return the texts with int64[batch] pending tokens behind them."""
        self._tokens.scatter_(1, self._lengths[:, None], pending[:, None])
        return Seen(self._tokens, self._lengths.clone(), pending)

    def append(self, tokens: Tensor, acceptance: Acceptance) -> None:
        """Append the accepted nodes of a tree with int64[batch, n] tokens."""
        place = torch.arange(acceptance.path.shape[1], device=tokens.device)
        lengths = acceptance.path_lengths.long()
        path = tokens.gather(1, acceptance.path.clamp(min=0).long())
        self._reserve(self._most + len(place))
        # What does not count writes the root once more, which is pending and in its place already.
        is_new = place < lengths[:, None]
        index = self._lengths[:, None] + torch.where(is_new, place, 0)
        self._tokens.scatter_(1, index, torch.where(is_new, path, tokens[:, :1]))
        self._lengths.add_(lengths)

    def select(self, rows: Tensor) -> OwnTexts:
        """Copy the texts of some rows, int64[batch']."""
        other = copy(self)
        other._tokens, other._lengths = self._tokens[rows], self._lengths[rows]
        return other

    def begin(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Begin other texts in some rows."""
        self._reserve(max(map(len, prompts)) + 1)
        for row, prompt in zip(rows, prompts, strict=True):
            self._tokens[row, : len(prompt)] = torch.tensor(prompt, device=self._tokens.device)
            self._lengths[row] = len(prompt)

    def _reserve(self, length: int) -> None:
        """Make room for texts of ``length`` tokens."""
        self._most = max(self._most, length)
        if self._most > self._tokens.shape[1]:
            self._tokens = torch.nn.functional.pad(self._tokens, (0, self._most + ROOM - self._tokens.shape[1]))
