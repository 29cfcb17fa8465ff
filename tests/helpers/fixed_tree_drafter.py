"""A drafter that runs no model and proposes the same tree in every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stree.drafters import Draft, Drafter, DraftRun
from stree.growth import Growth
from stree.sampling import Random
from stree.tree import TokenTree
from stree.verify import Acceptance


class Retrieval(Drafter, DraftRun):
    """A drafter that always retrieves the same tree; it is its own run."""

    can_begin = can_extend = True

    def __init__(self, tokens: Sequence[int], parents: Sequence[int], values: Sequence[float] | None = None) -> None:
        self.tokens, self.parents = list(tokens), list(parents)
        self.values = list(values) if values is not None else [1.0] * len(self.tokens)

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> Retrieval:
        return self

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        batch = len(pending)
        tree = TokenTree(torch.tensor([self.tokens] * batch), torch.tensor([self.parents] * batch, dtype=torch.int32))
        return Draft(tree, None, int(tree.depths.max()), values=torch.tensor([self.values] * batch))

    def begin(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Propose the same tree for other texts."""

    def observe(self, acceptance: Acceptance) -> None:
        """Learn nothing."""
