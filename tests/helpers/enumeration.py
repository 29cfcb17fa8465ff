"""Exact distributions by enumeration: outcomes of every random choice as rows of one batch, each with its probability.

``Outcomes`` stands in for ``stree.Random``.  Each row of the batch is told beforehand how every choice turns out, and
collects the probability that it does, so summing over all rows integrates over the random numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self, cast

import pytest
import torch
from torch import Tensor

from helpers.table_models import TableLM, TableModel
from stree.kernels.tree_growth import operands
from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify import DELTA, SAMPLED, Acceptance, DraftProbs, accept

__all__ = [
    "Cells",
    "DraftedTrees",
    "MoreDraws",
    "Outcomes",
    "TableLM",
    "TableModel",
    "as_random",
    "drafted_trees",
    "emitted_probs",
    "every_outcome",
    "expected_tokens",
    "probs_of_texts",
    "total_variation",
]

Verify = Callable[[TokenTree, Tensor, Random, DraftProbs | None], Acceptance]


class MoreDraws(Exception):
    """A draft asks for more draws than outcomes were made for; ``count`` are known to be needed."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} draws are asked for")
        self.count = count


@dataclass(slots=True, eq=False)
class Outcomes:
    """Random choices whose outcomes are fixed beforehand, one possibility a row.

    Attributes:
        coins: bool[batch, nodes], how the coin of each node falls.
        tokens: int64[batch, places], what the choice at each offset (or of each draft draw, in order) gives.
        weight: float64[batch], probability of what was asked so far.
    """

    coins: Tensor
    tokens: Tensor
    weight: Tensor = field(init=False)
    asked: Tensor = field(init=False)
    num_draft_draws: int = 0

    def __post_init__(self) -> None:
        self.weight = torch.ones(self.coins.shape[0], dtype=torch.float64)
        self.asked = torch.zeros_like(self.coins)

    @classmethod
    def all(cls, num_coins: int, num_places: int, vocab: int) -> Self:
        """Make every combination of coins and tokens."""
        falls = list(itertools.product((False, True), repeat=num_coins))
        coins = torch.tensor(falls, dtype=torch.bool).reshape(2**num_coins, num_coins)
        digits = itertools.product(range(vocab), repeat=num_places)
        tokens = torch.tensor(list(digits), dtype=torch.long).reshape(vocab**num_places, num_places)
        return cls(coins.repeat_interleave(len(tokens), 0), tokens.repeat(len(coins), 1))

    def at(self, positions: Tensor) -> Self:
        return self

    def bernoulli(self, purpose: str, probs: Tensor, offset: Tensor, node: Tensor) -> Tensor:
        """Toss coins: node i's first coin with probability above zero counts, a second would be a reused number."""
        assert purpose == "accept"
        coin = self.coins.gather(1, node - 1)
        is_asked = probs > 0
        assert not (is_asked & self.asked.gather(1, node - 1)).any(), "a coin is tossed twice"
        factor = torch.where(is_asked, torch.where(coin, probs, 1 - probs), 1.0)
        self.weight *= factor.prod(1)
        count = torch.zeros_like(self.asked, dtype=torch.long).scatter_add_(1, node - 1, is_asked.long())
        assert not (count > 1).any(), "a coin is tossed twice"
        self.asked |= count > 0
        return coin & is_asked

    def choice(self, purpose: str, probs: Tensor, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        """Choose: the target's token by its offset (tree positions count from 1), draft tokens in order of asking."""
        width = 1 if probs.dim() == 2 else probs.shape[1]
        if purpose == "draft":
            places = torch.arange(self.num_draft_draws, self.num_draft_draws + width).expand(len(probs), -1)
            self.num_draft_draws += width
            if self.num_draft_draws > self.tokens.shape[1]:
                raise MoreDraws(self.num_draft_draws)
        else:
            assert width == 1, "one draw a sequence"
            places = torch.zeros(len(probs), 1, dtype=torch.long)
        token = self.tokens.gather(1, places)
        dist = probs.reshape(len(probs), width, -1)
        total = dist.sum(-1)
        prob = dist.gather(-1, token[..., None]).squeeze(-1) / total.clamp(min=1e-300)
        # A distribution without mass belongs to a node that is not there: whatever is drawn must not matter, so one
        # row counts.
        prob = torch.where(total > 0, prob, (token == 0).to(prob.dtype))
        self.weight *= prob.prod(1)
        return token.reshape(probs.shape[:-1])

    def finished_weight(self) -> Tensor:
        """Probability of each row; a coin never asked for stands in two rows."""
        return self.weight * 0.5 ** (~self.asked).sum(1)


@dataclass(frozen=True, slots=True, eq=False)
class Cells(Random):
    """Uniform numbers by position, each row a cell on which every choice between the given distributions is constant.

    Attributes:
        numbers: float64[batch, positions], middle of each cell.
        weight: float64[batch], product of the cells' sizes.
    """

    numbers: Tensor
    weight: Tensor

    @classmethod
    def of(cls, dists: Sequence[Tensor]) -> Self:
        """Make every combination of the cells cut by float64[distributions, vocab] of each position."""
        middles, sizes = [], []
        for dist in dists:
            cuts = torch.cat([torch.zeros(1), (dist.cumsum(-1) / dist.sum(-1, keepdim=True)).flatten()]).unique()
            cuts = cuts[torch.cat([torch.tensor([True]), cuts.diff() > 1e-14])]
            cuts[-1] = 1.0
            middles.append((cuts[1:] + cuts[:-1]) / 2)
            sizes.append(cuts.diff())
        numbers = torch.cartesian_prod(*middles).reshape(-1, len(dists))
        weight = torch.cartesian_prod(*sizes).reshape(-1, len(dists)).prod(1)
        zero = torch.zeros(len(weight), dtype=torch.long)
        return cls(0, zero, zero, numbers, weight)

    def uniform(self, purpose: str, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        assert purpose == "target", "MATCH asks for the target's own draws only"
        flat = offset.reshape(len(offset), -1).long() - 1
        return self.numbers.gather(1, flat).reshape(offset.shape)


@dataclass(frozen=True, slots=True, eq=False)
class DraftedTrees:
    """Every tree that a draft can give, with its probability: a batch of trees and what they were drawn from."""

    tokens: Tensor
    parents: Tensor
    probs: DraftProbs
    weight: Tensor

    @property
    def tree(self) -> TokenTree:
        return TokenTree(self.tokens, self.parents)

    def select(self, rows: Tensor) -> DraftedTrees:
        dists = DraftProbs(self.probs.probs[rows], self.probs.row[rows], self.probs.kind[rows])
        return DraftedTrees(self.tokens[rows], self.parents[rows], dists, self.weight[rows])


def drafted_trees(
    draft: TableModel, parents: Sequence[int], sampling: Sampling, delta: dict[int, int] | None = None
) -> DraftedTrees:
    """Draw the nodes of a fixed shape in every possible way; siblings without replacement, in their order.

    Args:
        draft: the draft's distribution.
        parents: the shape.
        sampling: of the draft.
        delta: token of each node that is chosen without chance.  It must stand before its drawn siblings, which are
            then drawn from the distribution without its token.

    Returns:
        Trees, a node beyond the support of its distribution being padding.
    """
    delta = delta or {}
    dist = sampling.probs(draft.logits)
    rows: list[tuple[float, list[int], list[int]]] = [(1.0, [0], [-1])]
    for node, parent in enumerate(parents[1:], 1):
        grown = []
        for weight, tokens, found in rows:
            is_there = parent == 0 or found[parent] >= 0
            rest = dist[tokens[parent]].clone()
            for earlier in range(1, node):
                if found[earlier] == parent:
                    rest[tokens[earlier]] = 0
            if node in delta and is_there:
                grown.append((weight, [*tokens, delta[node]], [*found, parent]))
            elif not is_there or not rest.sum() > 0:
                grown.append((weight, [*tokens, 0], [*found, -1]))
            else:
                for token, prob in enumerate((rest / rest.sum()).tolist()):
                    if prob:
                        grown.append((weight * prob, [*tokens, token], [*found, parent]))
        rows = grown
    nodes = torch.tensor([row[1] for row in rows])
    found_parents = torch.tensor([row[2] for row in rows], dtype=torch.int32)
    kind = torch.full_like(found_parents, SAMPLED, dtype=torch.int8)
    kind[:, list(delta)] = DELTA
    dists = DraftProbs(dist[nodes], found_parents, kind)
    return DraftedTrees(nodes, found_parents, dists, torch.tensor([row[0] for row in rows], dtype=torch.float64))


def emitted_probs(
    target: TableModel,
    trees: DraftedTrees,
    sampling: Sampling,
    verifier: str,
    length: int,
    verify: Verify | None = None,
) -> Tensor:
    """Compute the distribution of the first ``length`` tokens that a step emits, continued by the target's own
    distribution.

    Args:
        target: the target.
        trees: what the draft can give, the roots being token 0.
        sampling: of the target.
        verifier: name of the rule; "match" is handed no distributions.
        length: at least depth + 1.
        verify: replaces ``accept`` (for negative controls).

    Returns:
        float64[vocab ** length], summing to one.
    """
    joint = torch.zeros(target.vocab**length, dtype=torch.float64)
    for tokens, accepted, weight in every_outcome(target, trees, sampling, verifier, verify):
        joint += probs_of_texts(target, tokens, accepted, sampling, weight, length)
    return joint


def expected_tokens(target: TableModel, trees: DraftedTrees, sampling: Sampling, verifier: str) -> float:
    """Compute the mean number of tokens that a step emits; arguments as for ``emitted_probs``."""
    outcomes = every_outcome(target, trees, sampling, verifier)
    return sum(float((accepted.path_lengths * weight).sum()) for _, accepted, weight in outcomes)


def every_outcome(
    target: TableModel, trees: DraftedTrees, sampling: Sampling, verifier: str, verify: Verify | None = None
) -> Iterator[tuple[Tensor, Acceptance, Tensor]]:
    """Accept from every tree with every outcome of every random choice: tokens, acceptances and their weights."""
    vocab, n = target.vocab, trees.tokens.shape[1]
    if verifier == "match":
        dist = sampling.probs(target.logits)
        levels = [dist[trees.tokens[:1, 0]]] + [dist] * int(trees.tree.depths.max())
        possible: Outcomes | Cells = Cells.of(levels)
    else:
        possible = Outcomes.all(n - 1, 1, vocab)
    count, drafts = len(possible.weight), len(trees.weight)
    step = max(1, 400_000 // count)  # trees a batch: bounds the memory
    for begin in range(0, drafts, step):
        chunk = trees.select(torch.arange(begin, min(begin + step, drafts)).repeat_interleave(count))
        copies = len(chunk.weight) // count
        rng = _repeated(possible, copies)
        logits = target.logits[chunk.tokens]
        if verify is None:
            dists = None if verifier == "match" else chunk.probs
            accepted = accept(chunk.tree, logits, sampling, as_random(rng), dists, verifier)
        else:
            accepted = verify(chunk.tree, logits, as_random(rng), chunk.probs)
        weight = rng.finished_weight() if isinstance(rng, Outcomes) else rng.weight
        yield chunk.tokens, accepted, weight * chunk.weight


def probs_of_texts(
    target: TableModel, tokens: Tensor, accepted: Acceptance, sampling: Sampling, weight: Tensor, length: int
) -> Tensor:
    """Sum the weights of what is emitted, each text continued to ``length`` tokens by the target's distribution."""
    vocab, dist = target.vocab, sampling.probs(target.logits)
    place = torch.arange(length)
    drafted = tokens.gather(1, accepted.path.clamp(min=0).long())[:, 1:]
    drafted = torch.cat([drafted, drafted.new_zeros(len(tokens), length)], 1)[:, :length]
    emitted = accepted.path_lengths[:, None].long()  # accepted nodes and the next token
    text = torch.where(place == emitted - 1, accepted.next_token[:, None], drafted)
    texts = torch.cartesian_prod(*[torch.arange(vocab)] * length).reshape(-1, length)
    before = torch.cat([torch.zeros(len(texts), 1, dtype=torch.long), texts[:, :-1]], 1)
    steps = dist[before, texts]  # probability of each token of each text
    joint = torch.zeros(len(texts), dtype=torch.float64)
    for size in range(1, length + 1):
        rows = emitted[:, 0] == size
        number = (text[rows, :size] * vocab ** torch.arange(size - 1, -1, -1)).sum(1)
        prefixes = torch.zeros(vocab**size, dtype=torch.float64).index_add_(0, number, weight[rows])
        joint += prefixes.repeat_interleave(vocab ** (length - size)) * steps[:, size:].prod(1)
    return joint


@contextmanager
def short_texts() -> Iterator[None]:
    """Let what begins within remember little of each text: there are thousands, and they are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operands, "NUM_PLACES", 1 << 10)
        yield


def as_random(outcomes: Outcomes | Cells) -> Random:
    """Pass outcomes off as the random numbers that they replace."""
    return cast(Random, outcomes)


def total_variation(left: Tensor, right: Tensor) -> float:
    """Half the sum of the differences of two distributions."""
    return float((left - right).abs().sum()) / 2


def _repeated(possible: Outcomes | Cells, copies: int) -> Outcomes | Cells:
    """Repeat all outcomes for some trees, the trees being the slower index."""
    if isinstance(possible, Outcomes):
        return Outcomes(possible.coins.repeat(copies, 1), possible.tokens.repeat(copies, 1))
    numbers, weight = possible.numbers.repeat(copies, 1), possible.weight.repeat(copies)
    zero = torch.zeros(len(weight), dtype=torch.long)
    return Cells(0, zero, zero, numbers, weight)
