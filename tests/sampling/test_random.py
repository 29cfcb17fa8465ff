"""Counter-based random numbers, and single draws by them.

Run: python -m pytest tests/sampling/test_random.py
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.on_device import treat_as_on_device
from helpers.random_rows import ALPHA, FixedRandom, random_rows
from scipy import stats

from stree.kernels.ops import philox_uniform
from stree.sampling import Random


# Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds): counter, key, first words of the block.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB)),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_returns_the_published_words(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int]
) -> None:
    position, sequence, purpose, node = counter
    operands = (torch.tensor([word]) for word in (position, sequence, node))
    found = philox_uniform(*operands, seed=key[0] | key[1] << 32, purpose=purpose)
    assert found.item() == ((words[0] >> 5) * 2**26 + (words[1] >> 6)) * 2.0**-53  # its 53 bits


@pytest.mark.parametrize("seed", [0, 2**40 + 3, -1, 2**64 + 1])
def test_a_device_s_numbers_are_the_cpu_s_whether_the_seed_is_a_tensor_or_not(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = torch.randint(0, 1 << 32, (2, 1000), generator=torch.Generator().manual_seed(0))
    rng = Random(seed, words[0], words[1])
    node = torch.arange(1000)
    on_host = rng.uniform("draft", node, node)
    treat_as_on_device(monkeypatch)
    assert torch.equal(rng.uniform("draft", node, node), on_host)
    key = torch.tensor((seed + 2**63) % 2**64 - 2**63)
    rng = replace(rng, seed=key)
    assert torch.equal(rng.uniform("draft", node, node), on_host)
    key += 1
    assert not torch.equal(rng.uniform("draft", node, node), on_host)


def test_numbers_do_not_depend_on_the_batch_around_them() -> None:
    rng = Random(3, torch.tensor([4, 9, 2]), torch.tensor([10, 20, 30]))
    offset, node = torch.tensor([[0, 1], [2, 3], [4, 5]]), torch.tensor([[0, 7], [1, 1], [2, 9]])
    together = rng.uniform("accept", offset, node)
    for row in range(3):
        rows = torch.tensor([row])
        assert torch.equal(rng.select(rows).uniform("accept", offset[rows], node[rows])[0], together[row])


def test_numbers_depend_on_the_absolute_position_only() -> None:
    rng = random_rows(2, position=5)
    moved = rng.at(torch.tensor([8, 8]))
    assert torch.equal(rng.uniform("target", torch.tensor([4, 4])), moved.uniform("target", torch.tensor([1, 1])))


def test_every_key_has_its_own_number() -> None:
    keys = itertools.product((0, 1, 2**32, 2**63 + 1), range(4), range(4), ("target", "accept", "draft"), range(4))
    numbers = [
        float(Random(seed, torch.tensor([row]), torch.tensor([position])).uniform(purpose, torch.tensor([0]), node))
        for seed, row, position, purpose, node in keys
    ]
    assert len(set(numbers)) == len(numbers) == 4 * 4 * 4 * 3 * 4


@pytest.mark.parametrize(
    ("axis", "purpose"), [("sequence", "target"), ("position", "accept"), ("node", "draft"), ("seed", "target")]
)
def test_numbers_are_uniform_along_every_part_of_the_key(axis: str, purpose: str) -> None:
    count = 20_000 if axis != "seed" else 2_000
    index, zero = torch.arange(count), torch.zeros(count, dtype=torch.long)
    if axis == "seed":
        rngs = [Random(seed, zero[:1], zero[:1]) for seed in range(count)]
        numbers = torch.cat([rng.uniform(purpose, zero[:1]) for rng in rngs])
    else:
        rng = Random(0, index if axis == "sequence" else zero, index if axis == "position" else zero)
        numbers = rng.uniform(purpose, zero, index if axis == "node" else zero)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert stats.kstest(numbers.numpy(), "uniform").pvalue > ALPHA
    neighbours = np.corrcoef(numbers[:-1].numpy(), numbers[1:].numpy())[0, 1]
    assert abs(neighbours) < 5 / count**0.5  # five standard deviations of the correlation of independent numbers


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_choice_never_returns_a_token_of_probability_zero(number: float, dtype: torch.dtype) -> None:
    probs = torch.tensor(
        [
            [0.0, 0.3, 0.0, 0.7, 0.0],
            [0.0, 0.0, 1e-30, 0.0, 0.0],
            [1 / 3, 1 / 3, 1 / 3, 0.0, 0.0],
            [0.0, 0.1, 0.2, 0.3, 0.0],
            [1e-300, 0.0, 1.0, 0.0, 1e-300],
        ],
        dtype=dtype,
    )
    rng = FixedRandom(0, torch.arange(5), torch.zeros(5, dtype=torch.long), number)
    index = rng.choice("target", probs, torch.zeros(5, dtype=torch.long))
    assert (probs.gather(1, index[:, None]) > 0).all()


def test_choice_from_a_distribution_without_mass_gives_index_zero() -> None:
    assert random_rows(2).choice("draft", torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)).tolist() == [0, 0]


def test_choice_follows_its_distribution_whether_or_not_it_is_normalised() -> None:
    dist = torch.tensor([0.05, 0.0, 0.4, 0.25, 0.3], dtype=torch.float64)
    for scale in (1.0, 7.5):
        index = random_rows(50_000).choice("target", (scale * dist).repeat(50_000, 1), torch.zeros(50_000).long())
        counts = torch.bincount(index, minlength=5)
        assert counts[1] == 0
        kept = dist > 0
        assert stats.chisquare(counts[kept].numpy(), 50_000 * dist[kept].numpy()).pvalue > ALPHA


def test_bernoulli_follows_its_probabilities() -> None:
    probs = torch.tensor([0.0, 0.2, 0.75, 1.0])
    shown = random_rows(20_000).bernoulli("accept", probs.expand(20_000, 4), torch.arange(4).expand(20_000, 4))
    counts = shown.sum(0).tolist()
    assert counts[0] == 0
    assert counts[3] == 20_000
    for count, prob in zip(counts[1:3], (0.2, 0.75), strict=True):
        assert stats.binomtest(count, 20_000, prob).pvalue > ALPHA
