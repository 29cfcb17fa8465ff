"""Steps of a drafter's run without a target: random paths are accepted, as a verifier might."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from helpers.outcomes import random_rows
from helpers.tiny_models import as_commit, extended, fresh_logits, path_to, random_path, real_nodes, relative_error
from stree.drafters import Draft, Drafter
from stree.growth import Chain, Growth
from stree.sampling import Sampling
from stree.tree import TokenTree
from stree.verify import Acceptance


class DraftSteps:
    """A run of a drafter on some texts.

    Attributes:
        texts: what was accepted so far.
        pending: int64[batch], the token after each text.
    """

    def __init__(
        self, drafter: Drafter, vocab: int, texts: Sequence[Sequence[int]], growth: Growth, temperature: float = 0.0
    ) -> None:
        self.rng, self.vocab, self.texts = random.Random(0), vocab, [list(text) for text in texts]
        self.growth = growth.bind(Sampling(temperature))
        rows = random_rows(len(texts)).at(torch.tensor([len(text) for text in texts]))
        self.run = drafter.start(vocab, texts, rows)
        self.pending = self._tokens()

    def _tokens(self) -> torch.Tensor:
        return torch.tensor([self.rng.randrange(self.vocab) for _ in self.texts])

    def step(self, budget: int = 8) -> Draft:
        """Draft, and accept in every row any path, the path to the last node, or nothing, as in a finished sequence."""
        pending = self.pending.clone()
        draft = self.run.propose(pending, self.growth, budget)
        tree = TokenTree(draft.tree.tokens.clone(), draft.tree.parents)
        assert tree.tokens[:, 0].tolist() == self.pending.tolist()
        paths = []
        for row in range(len(self.texts)):
            last = path_to(tree, row, real_nodes(tree, row)[-1])
            paths.append(self.rng.choice([random_path(self.rng, tree, row), last, []]))
        self.accept(tree, paths)
        pending.zero_()  # as the decode loop does, which writes the next ones in their place
        return draft

    def accept(self, tree: TokenTree, paths: list[list[int]]) -> None:
        """Accept a path of every row; an empty one leaves the row as it is."""
        path, lengths = as_commit([*paths, [0]])  # a path has a column at least
        path, lengths = path[:-1], lengths[:-1]
        following = self._tokens()
        self.run.observe(Acceptance(path, lengths, following))
        self.texts = extended(self.texts, tree, paths)
        self.pending = torch.where(lengths > 0, following, self.pending)

    def error(self, model: Any) -> float:
        """Largest error of the distributions drafted from next, against fresh forwards of the whole texts."""
        draft = self.run.propose(self.pending, Chain(1).bind(Sampling(1.0)), 8)
        assert draft.probs is not None
        errors = []
        for row, text in enumerate(self.texts):
            fresh = fresh_logits(model, [*text, int(self.pending[row])])[-1].softmax(-1)
            errors.append(relative_error(draft.probs.probs[row, 0], fresh))
        self.accept(draft.tree, [[] for _ in self.texts])
        return max(errors)
