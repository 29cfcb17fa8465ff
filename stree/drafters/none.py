"""No drafting at all: plain decoding in the same loop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from stree.drafters.base import Draft, Drafter, DraftRun
from stree.growth import Growth
from stree.kernels.dispatch import host_can_read
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
    shape = _shape_on_host if host_can_read(pending) else _shape  # a graph's memory must not be kept
    return TokenTree.unchecked(pending[:, None], *shape(len(pending), pending.device))


def _shape(batch: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return parents, depths and masks of trees of one node."""
    depths = torch.zeros(batch, 1, dtype=torch.int32, device=device)
    return depths - 1, depths, torch.ones(batch, 1, 1, dtype=torch.bool, device=device)


_shape_on_host = lru_cache(64)(_shape)  # read-only: made once, as a plain step on a CPU is short
