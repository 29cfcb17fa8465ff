"""Tokens that numba's code draws are those of torch's operators, and those of sums by hand."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

from stree.kernels.dispatch import as_on_device
from stree.kernels.sampling.inversion import invert

LAST = 1 - 2.0**-53  # the greatest share


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 2, 37, 4096])
def test_numba_draws_the_tokens_of_torch(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    probs = torch.randn(4, 50, vocab).exp() * (torch.rand(4, 50, vocab) < 0.7)
    probs[0, 0], probs[1, :2] = 0, torch.eye(vocab)[-1]
    probs = probs.to(dtype)
    uniform = torch.rand(4, 50, dtype=torch.float64)
    uniform[:, 0], uniform[:, 1] = 0, LAST
    for given in (probs, probs.transpose(0, 1).contiguous().transpose(0, 1), probs[:1, 3].expand(4, 50, -1)):
        with as_on_device(triton=False):
            expected = invert(given, uniform)
        found = invert(given, uniform)
        assert torch.equal(found, expected)
        total = given.sum(-1) > 0
        assert bool((given.gather(-1, found[..., None]).squeeze(-1) > 0)[total].all())
        assert not total.all() or not torch.equal(invert(given, uniform.flip(1)), found) or vocab < 3


def test_shares_by_hand() -> None:
    rng = random.Random(0)
    counts = [[rng.randrange(5) for _ in range(9)] + [1] for _ in range(200)]
    shares = [Fraction(rng.randrange(1 << 20), 1 << 20) for _ in counts]
    expected = [
        next(token for token in range(10) if sum(row[: token + 1]) > share * sum(row))
        for row, share in zip(counts, shares, strict=True)
    ]
    found = invert(torch.tensor(counts).float(), torch.tensor([float(share) for share in shares]).double())
    assert found.tolist() == expected


def test_one_distribution_for_all_shares() -> None:
    assert invert(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0.0, 0.24, 0.25]).double()).tolist() == [0, 0, 2]
