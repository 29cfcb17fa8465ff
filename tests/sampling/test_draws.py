"""Draws without replacement, and the most probable candidates.

Run: python -m pytest tests/sampling/test_draws.py
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from helpers.on_device import treat_as_on_device
from helpers.random_rows import ALPHA, FixedRandom, random_rows
from scipy import stats
from torch import Tensor

from stree.drafters.candidates import top_candidates
from stree.drafters.draws import Draws
from stree.sampling import MAX_RANKS, Random


def test_draws_without_replacement_follow_the_sequential_distribution() -> None:
    dist = torch.tensor([0.45, 0.3, 0.2, 0.05], dtype=torch.float64)
    count = 20_000
    tokens, probs = Draws(random_rows(count), 1, 3).draw(dist.expand(count, 1, 4), 0, 3)
    assert torch.equal(probs, dist[tokens])
    seen = dict.fromkeys(itertools.permutations(range(4), 3), 0)
    for order in map(tuple, tokens[:, 0].tolist()):
        seen[order] += 1  # a repeated token is a KeyError
    expected = []
    for order in seen:
        rest, prob = 1.0, 1.0
        for token in order:
            prob, rest = prob * float(dist[token]) / rest, rest - float(dist[token])
        expected.append(prob * count)
    assert stats.chisquare(list(seen.values()), expected).pvalue > ALPHA


@dataclass(frozen=True, slots=True, eq=False)
class ChoosingRandom(Random):
    """The numbers of ``Random``, drawn one by one: the reference of draws at once."""

    def choice(self, purpose: str, probs: Tensor, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        return Random.choice(self, purpose, probs, offset, node)


@pytest.mark.parametrize(
    ("sharpness", "vocab", "dtype"),
    [(0.0, 23, torch.float64), (2.0, 700, torch.float32), (30.0, 23, torch.float32), (30.0, 700, torch.float64)],
    ids=["flat", "soft", "nearly-one-hot", "nearly-one-hot-float64"],
)
def test_draws_at_once_are_the_choices_made_one_after_the_other(
    sharpness: float, vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    dist = (sharpness * torch.randn(200, 3, vocab, generator=generator, dtype=dtype)).softmax(-1)
    dist[:, 1, 4:] = 0.0  # a support of four tokens, unnormalised: fewer than there are draws
    dist[:, 1, :4] = 0.3 * (sharpness * torch.randn(200, 4, generator=generator, dtype=dtype)).softmax(-1)
    dist[:50, 2] = 0.0
    index, position = torch.arange(200), torch.full((200,), 5)
    one_by_one, expected = Draws(ChoosingRandom(3, index, position), 7, 6).draw(dist, 4, 6)
    at_once = Draws(Random(3, index, position), 7, 6)
    on_host = at_once.draw(dist, 4, 6)
    treat_as_on_device(monkeypatch)
    for tokens, probs in (on_host, at_once.draw(dist, 4, 6)):
        assert torch.equal(probs > 0, expected > 0)
        assert torch.equal(probs, expected)
        assert torch.equal(tokens[probs > 0], one_by_one[probs > 0])
        assert (probs[:, 1, 4:] == 0).all()
        assert (probs[:50, 2] == 0).all()


def test_nothing_is_drawn_from_the_last_rounding_errors_of_a_distribution() -> None:
    dist = torch.tensor([[[1 - 3e-7, 1e-7, 2e-7, 0.0], [1 - 3e-6, 1e-6, 2e-6, 0.0]]], dtype=torch.float64)
    for rng in (random_rows(1), ChoosingRandom(0, torch.arange(1), torch.zeros(1, dtype=torch.long))):
        tokens, probs = Draws(rng, 2, 3).draw(dist, 0, 3)
        assert tokens[0, :, 0].tolist() == [0, 0]
        assert (probs[0] > 0).sum(-1).tolist() == [1, 3]


def test_every_draw_of_a_tree_has_its_own_number() -> None:
    dist = torch.full((1, 5, 1000), 1e-3, dtype=torch.float64)
    together, _ = Draws(random_rows(1), 9, 4).draw(dist, 2, 3)
    node = (torch.arange(2, 7) * MAX_RANKS)[None, :, None] + torch.arange(3)
    level = random_rows(1).uniform("draft", torch.zeros(1, 1, 1, dtype=torch.long), node)
    assert torch.equal(together[..., 0], (level[..., 0] * 1000).long())
    assert len(set(level.flatten().tolist())) == 15


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-53])
def test_draws_at_the_ends_of_the_line_are_tokens_of_the_support(number: float) -> None:
    dist = torch.tensor([[[0.0, 0.3, 0.0, 0.5, 0.2, 0.0]]])
    rng = FixedRandom(0, torch.arange(1), torch.zeros(1, dtype=torch.long), number)
    tokens, probs = Draws(rng, 1, 3).draw(dist, 0, 3)
    assert (probs > 0).all()
    assert sorted(tokens.flatten().tolist()) == [1, 3, 4]


@pytest.mark.parametrize(("vocab", "count"), [(1, 1), (5, 5), (5, 8), (255, 6), (256, 6), (257, 8), (1000, 64)])
def test_the_most_probable_children_are_those_of_a_sort(vocab: int, count: int) -> None:
    rng = torch.Generator().manual_seed(vocab)
    for step in (0, 30, vocab):
        dist = torch.randn(2, 3, vocab, generator=rng).softmax(-1)
        if step:  # many are equal, and many 0
            dist = (dist * step).round() / step
        for given in (dist, dist.double(), dist.transpose(0, 1)):
            expected = torch.sort(given, dim=-1, descending=True).values
            found = top_candidates(given, 0, count)
            kept = min(vocab, count)
            assert torch.equal(found.probs[..., :kept], expected[..., :kept])
            tokens = found.tokens[..., :kept]
            assert torch.equal(given.gather(-1, tokens), expected[..., :kept])
            assert (tokens.sort(-1).values.diff() > 0).all(), "no token twice"
            assert found.tokens.shape[-1] == count and not found.probs[..., kept:].any()
