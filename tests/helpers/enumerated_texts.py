"""Exact distributions of whole texts: every step's trees come from the drafters themselves, every outcome of every
draw.

Two ways over the border between steps.  ``joint_of_steps`` enumerates one step from every root and joins steps by their
distributions, which is cheap.  ``joint_of_loop`` lets one run of a drafter propose and observe step after step, so
that random numbers may be reused where they must not be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from helpers.enumeration import DraftedTrees, MoreDraws, Outcomes, Verify, as_random, every_outcome, short_texts
from helpers.table_models import TableModel
from stree.drafters import Drafter
from stree.growth import Growth
from stree.sampling import Random, Sampling
from stree.verify import DELTA, DraftProbs, accept

__all__ = ["Turns", "drafts_of", "joint_of_loop", "joint_of_steps", "strings_of"]


class Timed(Outcomes):
    """Outcomes with fixed uniform numbers besides, by node: a growth may ask for them, such as for waiting times."""

    def uniform(self, purpose: str, offset: Tensor, node: Tensor) -> Tensor:
        assert purpose == "draft", "verification asks for outcomes"
        return (node.long() * 2654435761 % 2**32).double() / 2**32


def drafts_of(
    drafter: Drafter, growth: Growth, budget: int, sampling: Sampling, vocab: int, root: int = 0
) -> DraftedTrees:
    """Let a drafter propose below a root with every outcome of every draw."""
    draws = 0
    while True:
        outcomes = Timed.all(0, draws, vocab)
        batch = len(outcomes.weight)
        run = drafter.start(vocab, [[root]] * batch, as_random(outcomes))
        try:
            with short_texts():
                draft = run.propose(torch.full((batch,), root), growth.bind(sampling), budget)
            break
        except MoreDraws as more:
            draws = more.count
    kind = torch.full_like(draft.tree.parents, DELTA, dtype=torch.int8)
    dists = draft.probs or DraftProbs(torch.zeros(batch, 1, vocab), torch.zeros_like(draft.tree.parents), kind)
    trees = DraftedTrees(draft.tree.tokens, draft.tree.parents, dists, outcomes.weight)
    return united(trees.select((outcomes.weight > 0).nonzero()[:, 0]))


def united(trees: DraftedTrees) -> DraftedTrees:
    """Make one of the trees that differ in nothing that a verifier looks at, such as draws that became no node."""
    dists, tokens, parents = trees.probs, trees.tokens, trees.parents
    drawn = (parents >= 0) & (dists.kind != DELTA)
    row = dists.row.long().clamp(min=0, max=dists.probs.shape[1] - 1)
    own = dists.probs.take_along_dim(row[..., None], 1) * drawn[..., None]  # [batch, n, vocab]
    looks = torch.cat([tokens, parents, dists.kind, own.flatten(1)], 1)
    which = looks.unique(dim=0, return_inverse=True)[1]
    weight = torch.zeros(int(which.max()) + 1, dtype=torch.float64).index_add_(0, which, trees.weight)
    first = torch.zeros_like(weight, dtype=torch.long).scatter_(0, which.flip(0), torch.arange(len(which)).flip(0))
    place = torch.arange(tokens.shape[1], dtype=torch.int32).expand(len(first), -1)
    return DraftedTrees(tokens[first], parents[first], DraftProbs(own[first], place, dists.kind[first]), weight)


def strings_of(
    target: TableModel, trees: DraftedTrees, sampling: Sampling, verifier: str, verify: Verify | None = None
) -> list[Tensor]:
    """Return the distribution of one step's output: float64[vocab ** s] for each number s of tokens."""
    vocab, most = target.vocab, int(trees.tree.depths.max()) + 1
    dists = [torch.zeros(vocab**size, dtype=torch.float64) for size in range(most + 1)]
    for tokens, accepted, weight in every_outcome(target, trees, sampling, verifier, verify):
        text = emitted_by(tokens, accepted.path, accepted.path_lengths, accepted.next_token)
        for size in range(1, most + 1):
            rows = accepted.path_lengths == size
            number = (text[rows, :size] * vocab ** torch.arange(size - 1, -1, -1)).sum(1)
            dists[size].index_add_(0, number, weight[rows])
    return dists


def emitted_by(tokens: Tensor, path: Tensor, path_lengths: Tensor, next_token: Tensor) -> Tensor:
    """Put the next token behind the accepted ones: int64[batch, m], of which ``path_lengths`` count."""
    drafted = torch.nn.functional.pad(tokens.gather(1, path.clamp(min=0).long())[:, 1:], (0, 1))
    return drafted.scatter(1, path_lengths[:, None].long() - 1, next_token[:, None])


def joint_of_steps(steps: Sequence[Sequence[Tensor]], length: int) -> Tensor:
    """Join steps to texts, however they divide them.

    Args:
        steps: for each root, what ``strings_of`` gives; the first step's root is token 0.
        length: of the texts.

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
            strings = torch.stack([dists[size] if size < len(dists) else none for dists in steps])
            texts = reached[begin][:, None] * strings[roots]
            end = min(begin + size, length)  # what is emitted beyond is cut off
            reached[end] += texts.view(vocab**end, -1).sum(1)
    return reached[length]


class Turns:
    """Random choices of one step after the other.

    Args:
        turns: outcomes of each step, whose first place is the target's and the others the draft's.
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
    """Return the distribution of as many tokens as ``rng`` has turns, after token 0: float64[vocab ** turns]."""
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
        text.scatter_(1, count + torch.arange(emitted.shape[1]), emitted)  # the next step's are written over the rest
        count += accepted.path_lengths[:, None]
        run.observe(accepted)
        pending = accepted.next_token
    number = (text[:, :length] * vocab ** torch.arange(length - 1, -1, -1)).sum(1)
    return torch.zeros(vocab**length, dtype=torch.float64).index_add_(0, number, rng.finished_weight())
