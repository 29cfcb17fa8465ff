"""Stochastic beam search and drawing with replacement: their trees against the papers' procedures, and exactness."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from helpers.random_rows import random_rows
from helpers.table_drafts import draft_of, nodes_by_path
from torch import Tensor

from stree.growth import RSDC, RSDS, Growth, SpecInfer
from stree.sampling import MAX_RANKS, Sampling
from stree.testing.enumeration import EXACT, PLAIN, drafts_of, step_bias
from stree.testing.tables import TableModel, table_drafter
from stree.verify import INDEPENDENT, SAMPLED

CRITICAL = 6.0  # standard deviations of a chi-square statistic above its mean


def gumbel_beams(dist: TableModel, width: int, depth: int, count: int) -> Tensor:
    """Perturb and keep the greatest: RSD-S by its listing, vectorised over runs; int64[count, width * depth] paths."""
    generator = torch.Generator().manual_seed(7)
    vocab, log_probs = dist.vocab, dist.logits.log_softmax(-1)
    last, phi, g = (torch.zeros(count, 1, dtype=dtype) for dtype in (torch.long, torch.float64, torch.float64))
    path = torch.zeros(count, 1, dtype=torch.long)  # the tokens below the root as digits from 1
    found = []
    for _ in range(depth):
        phi = phi[..., None] + log_probs[last]
        noise = -torch.empty(phi.shape, dtype=torch.float64).exponential_(generator=generator).log()
        perturbed = phi + noise
        greatest = perturbed.amax(-1, keepdim=True)
        g = -((-g[..., None]).exp() - (-greatest).exp() + (-perturbed).exp()).log()
        g, kept = g.flatten(1).topk(width)
        phi, last = phi.flatten(1).gather(1, kept), kept % vocab
        path = path.gather(1, kept // vocab) * (vocab + 1) + last + 1
        found.append(path)
    return torch.cat(found, 1)


def drafted_beams(dist: TableModel, growth: Growth, count: int) -> Tensor:
    """Draft with the growth; paths as above."""
    tree = draft_of(dist, growth, 32, PLAIN, random_rows(count), count).tree
    paths = torch.zeros_like(tree.tokens)
    for node in range(1, tree.tokens.shape[1]):
        above = paths.gather(1, tree.parents[:, node : node + 1].long())[:, 0]
        paths[:, node] = above * (dist.vocab + 1) + tree.tokens[:, node] + 1
    return paths[:, 1:]


def distance(left: Tensor, right: Tensor) -> float:
    """Compare two samples of int64[count, ...] outcomes by chi-square, in standard deviations above its mean."""
    counts = [Counter(map(tuple, sample.tolist())) for sample in (left, right)]
    cells = [[count[key] for count in counts] for key in counts[0] | counts[1]]
    common = [cell for cell in cells if sum(cell) >= 10]
    rare = [sum(column) for column in zip(*[cell for cell in cells if sum(cell) < 10], strict=True)]
    common += [rare] if rare else []
    statistic = sum((first - second) ** 2 / (first + second) for first, second in common)
    freedom = len(common) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


def test_arrival_times_give_the_gumbel_beams_of_the_paper() -> None:
    dist, count = TableModel.random(4, 3), 20_000
    ours, theirs = drafted_beams(dist, RSDS(2, 2), count), gumbel_beams(dist, 2, 2, count)
    assert abs(distance(ours, theirs)) < CRITICAL
    assert distance(drafted_beams(dist, RSDC([2, 1]), count), theirs) > CRITICAL


def test_a_beam_is_full_and_its_siblings_differ() -> None:
    dist = TableModel.random(6, 1)
    for sampling in (Sampling(), PLAIN):
        tree = draft_of(dist, RSDS(3, 4), 13, sampling, random_rows(50), 50).tree
        tree.check()
        assert (tree.num_nodes == 13).all()
        assert torch.equal(tree.depths, torch.tensor([0, *(1 + node // 3 for node in range(12))]).expand(50, -1).int())
        for row in range(50):
            paths = nodes_by_path(tree, row)
            assert len(set(paths)) == len(paths)


def test_children_drawn_with_replacement_are_those_of_their_numbers() -> None:
    dist, sampling = TableModel.random(4, 5), Sampling(0.8)
    draft = draft_of(dist, SpecInfer([3, 2]), 10, sampling, random_rows(300), 300)
    assert draft.probs is not None and (draft.probs.kind == INDEPENDENT).all()
    rng, zero = random_rows(300).at(torch.ones(300, dtype=torch.long)), torch.zeros(300, dtype=torch.long)
    table = sampling.probs(dist.logits)
    for node, (parent, rank) in enumerate([(0, 0), (0, 1), (0, 2), *((1 + n // 2, n % 2) for n in range(6))], 1):
        above = draft.tree.tokens[:, parent]
        drawn = rng.choice("draft", table[above], zero, parent * MAX_RANKS + rank)
        assert torch.equal(draft.tree.tokens[:, node], drawn)
    repeated = draft.tree.tokens[:, 1] == draft.tree.tokens[:, 2]
    assert 0 < int(repeated.sum()) < 300


def test_independent_siblings_declared_as_drawn_without_replacement_are_biased() -> None:
    biases = []
    for seed in range(4):
        target, dist = TableModel.random(4, 40 + seed), TableModel.random(4, 50 + seed, scale=0.5)
        trees = drafts_of(table_drafter(dist), SpecInfer([3]), 4, PLAIN, 4)
        assert step_bias(target, trees, "rejection") < EXACT
        wrong = replace(trees.probs, kind=torch.full_like(trees.probs.kind, SAMPLED))
        biases.append(step_bias(target, replace(trees, probs=wrong), "rejection"))
    assert max(biases) > 0.005
