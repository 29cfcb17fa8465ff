"""Exact output distributions of one step, by enumeration of all drafted trees and all outcomes of random choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from helpers.outcomes import Cells, MoreDraws, Outcomes, as_random
from helpers.table_models import TableLM, TableModel
from stree.kernels.tree_growth import operands
from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify import DELTA, SAMPLED, Acceptance, DraftProbs, accept

__all__ = [
    "EXACT",
    "PLAIN",
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
    "step_bias",
    "total_variation",
]

EXACT = 1e-12  # total variation: sums in float64
PLAIN = Sampling(1.0)

Verify = Callable[[TokenTree, Tensor, Random, DraftProbs | None], Acceptance]


@dataclass(frozen=True, slots=True, eq=False)
class DraftedTrees:
    """A batch of all trees that a draft model can draw, with their draft distributions and probabilities."""

    tokens: Tensor
    parents: Tensor
    probs: DraftProbs
    weight: Tensor

    @property
    def tree(self) -> TokenTree:
        return TokenTree(self.tokens, self.parents)

    def select(self, rows: Tensor) -> DraftedTrees:
        probs = DraftProbs(self.probs.probs[rows], self.probs.row[rows], self.probs.kind[rows])
        return DraftedTrees(self.tokens[rows], self.parents[rows], probs, self.weight[rows])


def drafted_trees(
    draft: TableModel, parents: Sequence[int], sampling: Sampling, delta: dict[int, int] | None = None
) -> DraftedTrees:
    """Draw the nodes of a fixed shape in every possible way, siblings in order and without replacement.

    Args:
        draft: the draft model.
        parents: the shape.
        sampling: sampling of the draft.
        delta: tokens of the DELTA nodes by index. They come before their sampled siblings, which are drawn from the
            distribution without these tokens.

    Returns:
        Trees; a node beyond the support of its distribution is padding.
    """
    delta = delta or {}
    draft_probs = sampling.probs(draft.logits)
    rows: list[tuple[float, list[int], list[int]]] = [(1.0, [0], [-1])]
    for node, parent in enumerate(parents[1:], 1):
        grown = []
        for weight, tokens, found in rows:
            is_there = parent == 0 or found[parent] >= 0
            rest = draft_probs[tokens[parent]].clone()
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
    probs = DraftProbs(draft_probs[nodes], found_parents, kind)
    return DraftedTrees(nodes, found_parents, probs, torch.tensor([row[0] for row in rows], dtype=torch.float64))


def emitted_probs(
    target: TableModel,
    trees: DraftedTrees,
    sampling: Sampling,
    verifier: str,
    length: int,
    verify: Verify | None = None,
) -> Tensor:
    """Compute the distribution of the first ``length`` tokens after a step; the target continues short outputs.

    Args:
        target: the target.
        trees: all drafted trees; the roots are token 0.
        sampling: sampling of the target.
        verifier: name of the rule; "match" gets no draft distributions.
        length: at least depth + 1.
        verify: replaces ``accept`` (for negative controls).

    Returns:
        float64[vocab ** length], summing to one.
    """
    joint = torch.zeros(target.vocab**length, dtype=torch.float64)
    for tokens, accepted, weight in every_outcome(target, trees, sampling, verifier, verify):
        joint += probs_of_texts(target, tokens, accepted, sampling, weight, length)
    return joint


def step_bias(
    target: TableModel,
    trees: DraftedTrees,
    verifier: str,
    sampling: Sampling = PLAIN,
    verify: Verify | None = None,
) -> float:
    """Total variation between what a step emits, continued by the target, and the target's distribution."""
    length = int(trees.tree.depths.max()) + 1
    emitted = emitted_probs(target, trees, sampling, verifier, length, verify)
    assert abs(float(emitted.sum()) - 1) < EXACT
    return total_variation(emitted, target.joint(sampling, length))


def expected_tokens(target: TableModel, trees: DraftedTrees, sampling: Sampling, verifier: str) -> float:
    """Expected number of tokens that a step emits; arguments as for ``emitted_probs``."""
    outcomes = every_outcome(target, trees, sampling, verifier)
    return sum(float((accepted.path_lengths * weight).sum()) for _, accepted, weight in outcomes)


def every_outcome(
    target: TableModel, trees: DraftedTrees, sampling: Sampling, verifier: str, verify: Verify | None = None
) -> Iterator[tuple[Tensor, Acceptance, Tensor]]:
    """Verify every tree with every outcome of every random choice: tokens, acceptances and their probabilities."""
    vocab, n = target.vocab, trees.tokens.shape[1]
    if verifier == "match":
        target_probs = sampling.probs(target.logits)
        levels = [target_probs[trees.tokens[:1, 0]]] + [target_probs] * int(trees.tree.depths.max())
        possible: Outcomes | Cells = Cells.of(levels)
    else:
        possible = Outcomes.all(n - 1, 1, vocab)
    count, drafts = len(possible.weight), len(trees.weight)
    step = max(1, 400_000 // count)  # trees per batch, to bound the memory
    for begin in range(0, drafts, step):
        chunk = trees.select(torch.arange(begin, min(begin + step, drafts)).repeat_interleave(count))
        copies = len(chunk.weight) // count
        rng = possible.repeat(copies)
        logits = target.logits[chunk.tokens]
        if verify is None:
            draft = None if verifier == "match" else chunk.probs
            accepted = accept(chunk.tree, logits, sampling, as_random(rng), draft, verifier)
        else:
            accepted = verify(chunk.tree, logits, as_random(rng), chunk.probs)
        weight = rng.finished_weight() if isinstance(rng, Outcomes) else rng.weight
        yield chunk.tokens, accepted, weight * chunk.weight


def probs_of_texts(
    target: TableModel, tokens: Tensor, accepted: Acceptance, sampling: Sampling, weight: Tensor, length: int
) -> Tensor:
    """Sum the weights of the outputs; the target's distribution continues each one to ``length`` tokens."""
    vocab, target_probs = target.vocab, sampling.probs(target.logits)
    place = torch.arange(length)
    drafted = tokens.gather(1, accepted.path.clamp(min=0).long())[:, 1:]
    drafted = torch.cat([drafted, drafted.new_zeros(len(tokens), length)], 1)[:, :length]
    emitted = accepted.path_lengths[:, None].long()  # accepted nodes and the next token
    text = torch.where(place == emitted - 1, accepted.next_token[:, None], drafted)
    texts = torch.cartesian_prod(*[torch.arange(vocab)] * length).reshape(-1, length)
    before = torch.cat([torch.zeros(len(texts), 1, dtype=torch.long), texts[:, :-1]], 1)
    steps = target_probs[before, texts]  # probability of each token of each text
    joint = torch.zeros(len(texts), dtype=torch.float64)
    for size in range(1, length + 1):
        rows = emitted[:, 0] == size
        number = (text[rows, :size] * vocab ** torch.arange(size - 1, -1, -1)).sum(1)
        prefixes = torch.zeros(vocab**size, dtype=torch.float64).index_add_(0, number, weight[rows])
        joint += prefixes.repeat_interleave(vocab ** (length - size)) * steps[:, size:].prod(1)
    return joint


@contextmanager
def short_texts() -> Iterator[None]:
    """Shrink the n-gram tables of runs that start in this context, which are thousands of short texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operands, "NUM_PLACES", 1 << 10)
        yield


def total_variation(left: Tensor, right: Tensor) -> float:
    """Total variation distance of two distributions."""
    return float((left - right).abs().sum()) / 2
