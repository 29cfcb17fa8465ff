"""Exact output distributions of one step, by enumeration of all drafted trees and all outcomes of random choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from helpers.outcomes import Cells, Outcomes, as_random
from helpers.table_models import TableLM, TableModel
from stree.kernels.tree_growth import operands
from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify import DELTA, SAMPLED, Acceptance, DraftProbs, accept

__all__ = [
    "EXACT", "PLAIN", "DraftedTrees", "TableLM", "TableModel", "drafted_trees", "emitted_by", "every_outcome",
    "expected_tokens", "step_bias", "strings_of", "total_variation",
]  # fmt: skip

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


def step_bias(
    target: TableModel, trees: DraftedTrees, verifier: str, sampling: Sampling = PLAIN, verify: Verify | None = None
) -> float:
    """Total variation between what a step emits, continued by the target, and the target's distribution.

    Args:
        target: the target.
        trees: all drafted trees; the roots are token 0.
        verifier: name of the rule; "match" gets no draft distributions.
        sampling: sampling of the target.
        verify: replaces ``accept`` (for negative controls).
    """
    joint, *strings = strings_of(target, trees, sampling, verifier, verify)
    for emitted in strings:
        joint = target.continued(joint, sampling) + emitted
    assert abs(float(joint.sum()) - 1) < EXACT
    return total_variation(joint, target.joint(sampling, len(strings)))


def strings_of(
    target: TableModel, trees: DraftedTrees, sampling: Sampling, verifier: str, verify: Verify | None = None
) -> list[Tensor]:
    """Output distribution of one step: float64[vocab ** s] for each number s of emitted tokens."""
    vocab, most = target.vocab, int(trees.tree.depths.max()) + 1
    strings = [torch.zeros(vocab**size, dtype=torch.float64) for size in range(most + 1)]
    for tokens, accepted, weight in every_outcome(target, trees, sampling, verifier, verify):
        text = emitted_by(tokens, accepted.path, accepted.path_lengths, accepted.next_token)
        for size in range(1, most + 1):
            rows = accepted.path_lengths == size
            number = (text[rows, :size] * vocab ** torch.arange(size - 1, -1, -1)).sum(1)
            strings[size].index_add_(0, number, weight[rows])
    return strings


def emitted_by(tokens: Tensor, path: Tensor, path_lengths: Tensor, next_token: Tensor) -> Tensor:
    """Append the next token to the accepted ones: int64[batch, m], of which ``path_lengths`` are valid."""
    drafted = torch.nn.functional.pad(tokens.gather(1, path.clamp(min=0).long())[:, 1:], (0, 1))
    return drafted.scatter(1, path_lengths[:, None].long() - 1, next_token[:, None])


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


@contextmanager
def short_texts() -> Iterator[None]:
    """Shrink the n-gram tables of runs that start in this context, which are thousands of short texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operands, "NUM_PLACES", 1 << 10)
        yield


def total_variation(left: Tensor, right: Tensor) -> float:
    """Total variation distance of two distributions."""
    return float((left - right).abs().sum()) / 2
