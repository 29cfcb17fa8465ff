"""No drafting at all: plain decoding in the same loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stree.drafters.base import Draft
from stree.growth import Growth
from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["NoDrafter"]


class NoDrafter:
    """Plain decoding: every tree is its root."""

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> _NoRun:
        """Begin a run."""
        return _NoRun()


class _NoRun:
    """A run that drafts nothing."""

    version = 0

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        """Return the roots."""
        batch = pending.shape[0]
        depths = torch.zeros(batch, 1, dtype=torch.int32, device=pending.device)
        mask = torch.ones(batch, 1, 1, dtype=torch.bool, device=pending.device)
        return Draft(TokenTree.unchecked(pending[:, None], depths - 1, depths, mask), None, 0)

    def observe(self, acceptance: Acceptance) -> None:
        """Ignore it."""

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        """Ignore it."""

    def restart(self, prompts: Sequence[Sequence[int]]) -> None:
        """Ignore them."""

    def settle(self, budget: int) -> int:
        """Do nothing: all steps are alike."""
        return 0

    def replayed(self, budget: int) -> None:
        """Ignore it."""

    def give_up(self) -> None:
        """Ignore it."""
