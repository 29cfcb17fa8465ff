"""Exact distributions of texts of several steps, with trees from the drafters themselves.

``joint_of_steps`` enumerates one step from every root and joins steps by their distributions, which is cheap.
``joint_of_loop`` runs one drafter for several steps, so it also detects random numbers that are reused across steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from helpers.enumeration import DraftedTrees, emitted_by, short_texts
from helpers.outcomes import MoreDraws, Outcomes, as_random
from helpers.table_models import TableModel
from stree.drafters import Drafter
from stree.growth import Growth
from stree.sampling import Random, Sampling
from stree.verify import DELTA, DraftProbs, accept

__all__ = ["Turns", "drafts_of", "joint_of_loop", "joint_of_steps"]


class Timed(Outcomes):
    """Outcomes, and fixed uniform numbers by node for growths that draw numbers, such as exponential arrival times."""

    seed = 0

    def uniform(self, purpose: str, offset: Tensor, node: Tensor) -> Tensor:
        assert purpose == "draft", "verification uses outcomes only"
        return ((node.long() * 2654435761 % 2**32).double() / 2**32 + self.seed * 0.3819660113) % 1.0


def drafts_of(
    drafter: Drafter, growth: Growth, budget: int, sampling: Sampling, vocab: int, root: int = 0, seed: int = 0
) -> DraftedTrees:
    """All trees that a drafter can propose below a root, by every outcome of every draw.

    Args:
        drafter: proposes the trees.
        growth: not yet bound to ``sampling``.
        budget: nodes of a tree, the root included.
        sampling: sampling of the draft.
        vocab: size of the vocabulary.
        root: the pending token.
        seed: of the uniform numbers that a growth asks for beside its draws.
    """
    draws = 0
    while True:
        outcomes = Timed.all(0, draws, vocab)
        outcomes.seed = seed
        batch = len(outcomes.weight)
        run = drafter.start(vocab, [[root]] * batch, as_random(outcomes))
        try:
            with short_texts():
                draft = run.propose(torch.full((batch,), root), growth.bind(sampling), budget)
            break
        except MoreDraws as more:
            draws = more.count
    kind = torch.full_like(draft.tree.parents, DELTA, dtype=torch.int8)
    probs = draft.probs or DraftProbs(torch.zeros(batch, 1, vocab), torch.zeros_like(draft.tree.parents), kind)
    trees = DraftedTrees(draft.tree.tokens, draft.tree.parents, probs, outcomes.weight)
    return united(trees.select((outcomes.weight > 0).nonzero()[:, 0]))


def united(trees: DraftedTrees) -> DraftedTrees:
    """Merge trees that are equal for a verifier: they differ in draws that became no node."""
    draft, tokens, parents = trees.probs, trees.tokens, trees.parents
    drawn = (parents >= 0) & (draft.kind != DELTA)
    row = draft.row.long().clamp(min=0, max=draft.probs.shape[1] - 1)
    own = draft.probs.take_along_dim(row[..., None], 1) * drawn[..., None]  # [batch, n, vocab]
    looks = torch.cat([tokens, parents, draft.kind, own.flatten(1)], 1)
    which = looks.unique(dim=0, return_inverse=True)[1]
    weight = torch.zeros(int(which.max()) + 1, dtype=torch.float64).index_add_(0, which, trees.weight)
    first = torch.zeros_like(weight, dtype=torch.long).scatter_(0, which.flip(0), torch.arange(len(which)).flip(0))
    place = torch.arange(tokens.shape[1], dtype=torch.int32).expand(len(first), -1)
    return DraftedTrees(tokens[first], parents[first], DraftProbs(own[first], place, draft.kind[first]), weight)


def joint_of_steps(steps: Sequence[Sequence[Tensor]], length: int) -> Tensor:
    """Distribution of texts made of several steps.

    Args:
        steps: for each root, the result of ``strings_of``; the first step's root is token 0.
        length: length of the texts.

    Returns:
        float64[vocab ** length].
    """
    vocab = len(steps)
    reached = [torch.zeros(vocab**size, dtype=torch.float64) for size in range(length + 1)]
    reached[0][0] = 1.0
    for begin in range(length):
        roots = torch.arange(vocab**begin) % vocab
        for size in range(1, max(map(len, steps))):
            none = torch.zeros(vocab**size, dtype=torch.float64)
            strings = torch.stack([step[size] if size < len(step) else none for step in steps])
            texts = reached[begin][:, None] * strings[roots]
            end = min(begin + size, length)  # later tokens are cut off
            reached[end] += texts.view(vocab**end, -1).sum(1)
    return reached[length]


class Turns:
    """Outcomes of the random choices of several steps.

    Args:
        turns: outcomes of each step; the first place is the target's draw, the others are the draft's.
    """

    def __init__(self, turns: Sequence[Outcomes]) -> None:
        self.turns, self.turn = turns, 0
        for outcomes in turns:
            outcomes.num_draft_draws = 1

    @classmethod
    def all(cls, count: int, num_coins: int, num_draws: int, vocab: int) -> Turns:
        """Make every combination of the outcomes of ``count`` steps."""
        one = Outcomes.all(num_coins, 1 + num_draws, vocab)
        rows = torch.cartesian_prod(*[torch.arange(len(one.weight))] * count).view(-1, count)
        return cls([Outcomes(one.coins[rows[:, turn]], one.tokens[rows[:, turn]]) for turn in range(count)])

    def at(self, positions: Tensor) -> Turns:
        return self

    def bernoulli(self, purpose: str, probs: Tensor, offset: Tensor, node: Tensor) -> Tensor:
        return self.turns[self.turn].bernoulli(purpose, probs, offset, node)

    def choice(self, purpose: str, probs: Tensor, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        return self.turns[self.turn].choice(purpose, probs, offset, node)

    def finished_weight(self) -> Tensor:
        """Probability of each row."""
        return torch.stack([turn.finished_weight() for turn in self.turns]).prod(0)


def joint_of_loop(
    target: TableModel, drafter: Drafter, growth: Growth, budget: int, sampling: Sampling, verifier: str, rng: Turns
) -> Tensor:
    """Distribution of as many tokens as ``rng`` has steps, after token 0: float64[vocab ** steps]."""
    vocab, batch, length = target.vocab, len(rng.turns[0].weight), len(rng.turns)
    growth = growth.bind(sampling)
    run = drafter.start(vocab, [[0]] * batch, cast(Random, rng))
    pending = torch.zeros(batch, dtype=torch.long)
    text, count = torch.zeros(batch, length * (budget + 1), dtype=torch.long), torch.zeros(batch, 1, dtype=torch.long)
    for rng.turn in range(length):
        draft = run.propose(pending, growth, budget)
        logits = target.logits[draft.tree.tokens]
        accepted = accept(draft.tree, logits, sampling, cast(Random, rng), draft.probs, verifier, draft.max_depth)
        emitted = emitted_by(draft.tree.tokens, accepted.path, accepted.path_lengths, accepted.next_token)
        text.scatter_(1, count + torch.arange(emitted.shape[1]), emitted)  # the next step overwrites the invalid rest
        count += accepted.path_lengths[:, None]
        run.observe(accepted)
        pending = accepted.next_token
    number = (text[:, :length] * vocab ** torch.arange(length - 1, -1, -1)).sum(1)
    return torch.zeros(vocab**length, dtype=torch.float64).index_add_(0, number, rng.finished_weight())
