"""Exact output distributions of a step: every tree that can be drafted, with every outcome of verification."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from stree.checks import check_counts, check_object, integers
from stree.drafters import Draft, Drafter, DraftRun
from stree.drafters.checked import started
from stree.growth import Growth
from stree.sampling import Random, Sampling
from stree.testing.outcomes import all_outcomes
from stree.testing.tables import TableModel, exact_probs
from stree.tree import TokenTree
from stree.verify import DELTA, SAMPLED, Acceptance, DraftProbs, Verifier, accept

__all__ = [
    "EXACT",
    "PLAIN",
    "DraftedTrees",
    "check_enumeration",
    "drafted_trees",
    "drafts_of",
    "emitted_and_right",
    "emitted_by",
    "every_outcome",
    "step_bias",
    "strings_of",
    "total_variation",
    "with_own_probs",
]  # fmt: skip

EXACT = 1e-12  # total variation: sums in float64
PLAIN = Sampling(1.0)
MOST_TOKENS, MOST_BUDGET = 8, 16
MOST_DRAFTS = 200_000  # outcomes of the draws of one tree
DRAFTS = ("draft",)  # purpose of a drafter's numbers

Verify = Callable[[TokenTree, Tensor, Random, DraftProbs | None], Acceptance]


@dataclass(frozen=True, slots=True, eq=False)
class DraftedTrees:
    """A batch of all trees that can be drafted below a root, with their draft distributions and probabilities."""

    tokens: Tensor
    parents: Tensor
    probs: DraftProbs
    weight: Tensor

    @property
    def tree(self) -> TokenTree:
        """The trees."""
        return TokenTree(self.tokens, self.parents)

    def select(self, rows: Tensor) -> DraftedTrees:
        """Return some of them."""
        probs = DraftProbs(self.probs.probs[rows], self.probs.row[rows], self.probs.kind[rows])
        return DraftedTrees(self.tokens[rows], self.parents[rows], probs, self.weight[rows])


def drafted_trees(
    draft: TableModel,
    parents: Sequence[int],
    sampling: Sampling,
    delta: dict[int, int] | None = None,
    kind: int = SAMPLED,
) -> DraftedTrees:
    """Draw the nodes of a fixed shape in every possible way, siblings in order.

    Args:
        draft: the draft model.
        parents: the shape.
        sampling: sampling of the draft.
        delta: tokens of the DELTA nodes by index. They come before their sampled siblings, which are drawn from the
            distribution without these tokens.
        kind: SAMPLED (without replacement) or INDEPENDENT (with replacement) of the other nodes.

    Returns:
        Trees; a node beyond the support of its distribution is padding.
    """
    delta = delta or {}
    draft_probs = exact_probs(draft.logits, sampling)
    rows: list[tuple[float, list[int], list[int]]] = [(1.0, [0], [-1])]
    for node, parent in enumerate(parents[1:], 1):
        grown = []
        for weight, tokens, found in rows:
            is_there = parent == 0 or found[parent] >= 0
            rest = draft_probs[tokens[parent]].clone()
            for earlier in range(1, node):
                if found[earlier] == parent and kind == SAMPLED:
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
    kinds = torch.full_like(found_parents, kind, dtype=torch.int8)
    kinds[:, list(delta)] = DELTA
    probs = DraftProbs(draft_probs[nodes], found_parents, kinds)
    return DraftedTrees(nodes, found_parents, probs, torch.tensor([row[0] for row in rows], dtype=torch.float64))


def drafts_of(
    drafter: Drafter,
    growth: Growth | None,
    budget: int,
    sampling: Sampling,
    vocab: int,
    root: int = 0,
    seed: int = 0,
    *,
    rows: int = 8192,
    inspect: Callable[[DraftRun, Draft, Tensor], None] | None = None,
    prompt: Sequence[int] = (),
) -> DraftedTrees:
    """All trees that a drafter can propose below a root, by every outcome of every draw.

    Args:
        drafter: proposes the trees.
        growth: not yet bound to ``sampling``; None for a drafter that has none.
        budget: nodes of a tree, the root included.
        sampling: sampling of the draft.
        vocab: size of the vocabulary.
        root: the pending token.
        seed: of the uniform numbers that a growth asks for beside its draws.
        rows: most sequences of a batch.
        inspect: called with the run, every draft and its roots.
        prompt: the text before the root; none for the root's token alone.
    """
    text = [*prompt] or [root]
    bound = None if growth is None else growth.bind(sampling)

    def propose(rng: Random, cases: Tensor) -> Draft:
        run = started(drafter, vocab, [text] * len(cases), rng.at(torch.full_like(cases, len(text))))
        run.sampling, roots = sampling, torch.full_like(cases, root)
        draft = run.propose(roots, bound, budget)
        if inspect is not None:
            inspect(run, draft, roots)
        return draft

    found = []
    for draft, _, weight in all_outcomes(propose, 1, rows=rows, most=MOST_DRAFTS, seed=seed, purposes=DRAFTS):
        whole = (weight > 0).nonzero()[:, 0]
        if len(whole):
            found.append(with_own_probs(draft, vocab, weight).select(whole))
    return _united(found)


def with_own_probs(draft: Draft, vocab: int, weight: Tensor) -> DraftedTrees:
    """Return the trees of a batch with the distribution of every node in its own row; zeros for what is not drawn."""
    tree, (batch, n) = draft.tree, draft.tree.tokens.shape
    place, own = torch.arange(n, dtype=torch.int32).expand(batch, -1), torch.zeros(batch, n, vocab, dtype=torch.float64)
    kind = torch.full((batch, n), DELTA, dtype=torch.int8)
    if draft.probs is not None:
        kind, probs = draft.probs.kind.to(torch.int8), draft.probs.probs
        row = draft.probs.row.long().clamp(min=0, max=probs.shape[1] - 1)
        is_drawn = (tree.parents >= 0) & (kind != DELTA)
        own = probs.double().take_along_dim(row[..., None], 1).where(is_drawn[..., None], own)
    return DraftedTrees(tree.tokens, tree.parents, DraftProbs(own, place, kind), weight)


def _united(batches: list[DraftedTrees]) -> DraftedTrees:
    """Put batches together; merge trees that are equal for a verifier: they differ in draws that became no node."""
    tokens, parents = (
        _stacked([getattr(one, name) for one in batches], fill) for name, fill in (("tokens", 0), ("parents", -1))
    )
    kind = _stacked([one.probs.kind for one in batches], DELTA)
    own = _stacked([one.probs.probs for one in batches], 0)
    looks = torch.cat([tokens, parents, kind, own.flatten(1)], 1)
    which = looks.unique(dim=0, return_inverse=True)[1]
    weight = torch.zeros(int(which.max()) + 1, dtype=torch.float64)
    weight.index_add_(0, which, torch.cat([trees.weight for trees in batches]))
    first = torch.zeros_like(weight, dtype=torch.long).scatter_(0, which.flip(0), torch.arange(len(which)).flip(0))
    place = torch.arange(tokens.shape[1], dtype=torch.int32).expand(len(first), -1)
    return DraftedTrees(tokens[first], parents[first], DraftProbs(own[first], place, kind[first]), weight)


def _stacked(parts: list[Tensor], fill: int) -> Tensor:
    """Concatenate [batch, n, ...] tensors, filled up to the largest n."""
    width = max(part.shape[1] for part in parts)
    ends = [part.new_full((len(part), width - part.shape[1], *part.shape[2:]), fill) for part in parts]
    return torch.cat([torch.cat(pair, 1) for pair in zip(parts, ends, strict=True)])


def every_outcome(
    target: TableModel,
    trees: DraftedTrees,
    sampling: Sampling,
    verifier: str | Verifier,
    verify: Verify | None = None,
) -> Iterator[tuple[Tensor, Acceptance, Tensor]]:
    """Verify every tree with every outcome of every random choice: tokens, acceptances and their probabilities.

    Args:
        target: the target.
        trees: all drafted trees.
        sampling: sampling of the target.
        verifier: the rule; "match" gets no draft distributions.
        verify: replaces ``accept`` (for negative controls).
    """

    def run(rng: Random, cases: Tensor) -> tuple[Tensor, Acceptance]:
        chunk = trees.select(cases)
        logits = target.logits[chunk.tokens]
        if verify is not None:
            return chunk.tokens, verify(chunk.tree, logits, rng, chunk.probs)
        return chunk.tokens, accept(
            chunk.tree, logits, sampling, rng, None if verifier == "match" else chunk.probs, verifier
        )

    for (tokens, accepted), cases, weight in all_outcomes(run, len(trees.weight), purposes=("target", "accept")):
        yield tokens, accepted, weight * trees.weight[cases]


def step_bias(
    target: TableModel, trees: DraftedTrees, verifier: str | Verifier, sampling: Sampling = PLAIN,
    verify: Verify | None = None,
) -> float:  # fmt: skip
    """Total variation between both distributions of ``emitted_and_right``."""
    return total_variation(*emitted_and_right(target, trees, verifier, sampling, verify))


def emitted_and_right(
    target: TableModel, trees: DraftedTrees, verifier: str | Verifier, sampling: Sampling = PLAIN,
    verify: Verify | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the distribution of what a step emits, continued by the target, and the target's own.

    The roots are token 0; arguments are those of ``every_outcome``.
    """
    joint, *strings = strings_of(target, trees, sampling, verifier, verify)
    for emitted in strings:
        joint = target.continued(joint, sampling) + emitted
    return joint, target.joint(sampling, len(strings))


def strings_of(
    target: TableModel,
    trees: DraftedTrees,
    sampling: Sampling,
    verifier: str | Verifier,
    verify: Verify | None = None,
) -> list[Tensor]:
    """Output distribution of one step: float64[vocab ** s] for each number s of emitted tokens."""
    vocab, most = target.vocab, int(trees.tree.depths.max()) + 1
    strings = [torch.zeros(vocab**size, dtype=torch.float64) for size in range(most + 1)]
    for tokens, accepted, weight in every_outcome(target, trees, sampling, verifier, verify):
        text = emitted_by(tokens, accepted.path, accepted.path_lengths, accepted.next_token)
        for size in range(1, min(most, text.shape[1]) + 1):
            rows = accepted.path_lengths == size
            number = (text[rows, :size] * vocab ** torch.arange(size - 1, -1, -1)).sum(1)
            strings[size].index_add_(0, number, weight[rows])
    return strings


def emitted_by(tokens: Tensor, path: Tensor, path_lengths: Tensor, next_token: Tensor) -> Tensor:
    """Append the next token to the accepted ones: int64[batch, m], of which ``path_lengths`` are valid."""
    drafted = pad(tokens.gather(1, path.clamp(min=0).long())[:, 1:], (0, 1))
    return drafted.scatter(1, path_lengths[:, None].long() - 1, next_token[:, None])


def total_variation(left: Tensor, right: Tensor) -> float:
    """Total variation distance of two distributions."""
    return float((left - right).abs().sum()) / 2


def check_enumeration(
    vocab_size: Any, seeds: Any, budget: Any = 1, sampling: Any = PLAIN, least: int = 2
) -> tuple[int, ...]:
    """Refuse arguments of a check for which nothing can be enumerated; return the seeds.

    Raises:
        TypeError: a value of another kind.
        ValueError: a vocabulary or a budget that is too small or too large.
    """
    check_counts(vocab_size=vocab_size, budget=budget)
    if not least <= vocab_size <= MOST_TOKENS:
        raise ValueError(f"vocab_size must be in [{least}, {MOST_TOKENS}] for enumeration, got {vocab_size}")
    if budget > MOST_BUDGET:
        raise ValueError(f"budget must be at most {MOST_BUDGET} for enumeration, got {budget}")
    if not (found := integers("seeds", seeds)):
        raise ValueError("seeds must hold at least one integer, got none")
    if not all(0 <= seed < 1 << 31 for seed in found):
        raise ValueError(f"seeds must be in [0, 2**31), got {found!r:.80}")
    check_object("sampling", sampling, "draft_probs", "stree.Sampling(1.0)")
    return found
