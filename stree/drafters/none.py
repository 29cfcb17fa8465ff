"""No drafting at all: plain decoding in the same loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stree.drafters.base import Draft, Drafter, DraftRun
from stree.growth import Growth
from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify import Acceptance

__all__ = ["NoDrafter", "root_only"]


class NoDrafter(Drafter):
    """Plain decoding: every tree is its root."""

    uses_growth = False

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> _NoRun:
        """Begin a run, which has no state."""
        return _NoRun()


class _NoRun(DraftRun):
    can_begin = can_select = is_on_device = True

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        return Draft(root_only(pending), None, 0)

    def observe(self, acceptance: Acceptance) -> None:
        pass

    def begin(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        pass

    def select(self, rows: Tensor, rng: Random) -> _NoRun:
        return self


def root_only(pending: Tensor) -> TokenTree:
    """Trees of int64[batch] pending tokens alone."""
    depths = torch.zeros(len(pending), 1, dtype=torch.int32, device=pending.device)
    mask = torch.ones(len(pending), 1, 1, dtype=torch.bool, device=pending.device)
    return TokenTree.unchecked(pending[:, None], depths - 1, depths, mask)
