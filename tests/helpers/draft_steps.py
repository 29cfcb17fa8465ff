"""Steps of a drafter's run without a target, where random paths are accepted, and growths and fixed trees for steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from helpers.random_rows import random_rows
from helpers.tiny_models import as_commit, extended, fresh_logits, path_to, random_path, real_nodes, relative_error
from stree import growth as growths
from stree.drafters import Draft, Drafter, DraftRun
from stree.growth import Chain, Growth
from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify import Acceptance

GROWTHS: dict[str, Growth | None] = {
    "none": None,
    "chain": growths.Chain(3),
    "static": growths.Static([2, 2]),
    "sequoia": growths.Sequoia(depth=3),
    "dyspec": growths.DySpec(depth=3),
    "heap": growths.DySpec(form="heap"),
    "calibrated": growths.Calibrated(depth=3),
    "specinfer": growths.SpecInfer([2, 2]),
    "rsds": growths.RSDS(3, 3),
    "opt-tree": growths.OptTree(depth=3),
    "eagle2": growths.DepthStop(growths.Eagle2(depth=3, beam=3), threshold=-2.0, layers=None),
    "decision": growths.DecisionStop(growths.Chain(3, stop=growths.Confidence(0.02)), threshold=0.1),
}


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

    def step_plainly(self) -> None:
        """Take two steps that draft nothing, which a drafter must still read."""
        assert self.step(budget=1).num_calls == 0
        self.step(budget=1)

    def change_last_tokens(self) -> None:
        """Put other tokens at the ends of the texts that drafts are compared with."""
        self.texts = [[*text[:-1], (text[-1] + 1) % 90] for text in self.texts]

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
