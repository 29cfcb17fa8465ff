"""Counter-based random numbers, probabilities after temperature, top-k and top-p, draws without replacement."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.on_device import treat_as_on_device
from scipy import stats
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from stree.drafters.candidates import top_candidates
from stree.drafters.draws import Draws
from stree.kernels.sampling.philox import philox_words
from stree.sampling import MAX_RANKS, BatchSampling, Random, Sampling

ALPHA = 1e-6  # false alarms of a statistical test; the seeds are fixed, so a test passes always or never


def random_rows(batch: int, seed: int = 0, position: int = 5) -> Random:
    return Random(seed, torch.arange(batch), torch.full((batch,), position))


@dataclass(frozen=True, slots=True, eq=False)
class FixedRandom(Random):
    """One fixed number for every draw."""

    number: float = 0.0

    def uniform(self, purpose: str, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        shape = torch.broadcast_shapes(offset.shape, torch.as_tensor(node).shape)
        return torch.full(shape, self.number, dtype=torch.float64)


# Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds): counter, key, first words of the block. They need
# a private function, because no public one returns whole words.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_returns_the_published_words(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int]
) -> None:
    seed = key[0] | key[1] << 32
    c0, c1, c2, c3 = counter
    found = philox_words(np.array([c0]), np.array([c1]), c2, np.array([c3]), seed)
    assert tuple(int(word[0]) for word in found) == words


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


def transformers_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    text = torch.zeros(logits.shape[0], 1, dtype=torch.long)
    if sampling.is_greedy:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    logits = TemperatureLogitsWarper(sampling.temperature)(text, logits)
    if sampling.top_k is not None:
        logits = TopKLogitsWarper(sampling.top_k)(text, logits)
    if sampling.top_p is not None:
        logits = TopPLogitsWarper(sampling.top_p)(text, logits)
    if sampling.min_p is not None:
        logits = MinPLogitsWarper(sampling.min_p)(text, logits)
    return logits.softmax(-1)


KINDS = [
    Sampling(0.3), Sampling(1.7, 1), Sampling(1.7, 5, 0.35), Sampling(0.3, 500, 0.999), Sampling(1.7, top_p=1e-6),
    Sampling(0.3, top_p=0.35), Sampling(1.7, min_p=0.1), Sampling(1.1, 9, 0.9, 0.02),
    Sampling(0.9, top_p=1.0, min_p=0.0),
]  # fmt: skip


@pytest.mark.parametrize("sampling", KINDS, ids=repr)
def test_distributions_are_those_of_transformers(sampling: Sampling) -> None:
    logits = 3 * torch.randn(20, 61, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    dist = sampling.probs(logits)
    expected = transformers_probs(logits, sampling)
    assert torch.equal(dist > 0, expected > 0)
    assert (dist - expected).abs().max() < 1e-12


@pytest.mark.parametrize(
    "kinds", [KINDS, [Sampling(), *KINDS], KINDS[:1] * 2, [Sampling(), KINDS[0]], [Sampling()]], ids=len
)
def test_every_row_of_a_batch_has_its_own_distribution(kinds: list[Sampling]) -> None:
    batch = BatchSampling(kinds, len(kinds), torch.device("cpu"))
    for row, sampling in enumerate(kinds):
        batch.write(row, KINDS[0] if not batch.is_greedy else sampling)  # what stood in the row before
        batch.write(row, sampling)
    logits = 3 * torch.randn(len(kinds), 4, 61, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for found, part in ((batch.probs(logits), logits), (batch.probs(logits[:, 0])[:, None], logits[:, :1])):
        expected = torch.stack([transformers_probs(row, kind) for row, kind in zip(part, kinds, strict=True)])
        assert torch.equal(found > 0, expected > 0) and (found - expected).abs().max() < 1e-12
    drafts, rows = batch.draft_probs(logits)[0], torch.tensor([len(kinds) - 1, 0])
    for row, sampling in enumerate(kinds):
        of_temperature_one = logits[row].softmax(-1) if sampling.is_greedy else sampling.probs(logits[row])
        assert (drafts[row] - of_temperature_one).abs().max() < 1e-12
    assert torch.equal(batch.select(rows).probs(logits[rows]), batch.probs(logits)[rows])
    logits[:, 0, 3], logits[:, 1, 3] = torch.inf, torch.nan
    expected = torch.tensor([[kind.is_greedy, False, True, True] for kind in kinds])
    assert torch.equal(batch.has_distribution(logits), expected)


def test_parameters_that_a_batch_was_not_made_for_are_refused() -> None:
    for kinds, other in (([Sampling()], KINDS[0]), ([KINDS[0]], Sampling()), ([KINDS[0], Sampling()], KINDS[1])):
        with pytest.raises(ValueError, match=r"BatchSampling\(.*\) does not serve Sampling\("):
            BatchSampling(kinds, 2, torch.device("cpu")).write(0, other)


@pytest.mark.parametrize("triton", [False, True], ids=["host", "device"])
def test_every_row_has_its_own_seed(triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, node = [5, -(2**63), 7], torch.arange(4).expand(3, -1)
    rows = torch.arange(3)
    expected = torch.cat(
        [Random(seed, rows, rows).uniform("accept", node * 0, node)[row : row + 1] for row, seed in enumerate(seeds)]
    )
    if triton:
        treat_as_on_device(monkeypatch)
    rng = Random(torch.tensor(seeds), rows, rows)
    assert torch.equal(rng.uniform("accept", node * 0, node), expected)
    assert torch.equal(rng.select(rows[1:]).uniform("accept", node[1:] * 0, node[1:]), expected[1:])


def test_tokens_tied_with_the_last_of_top_k_are_kept() -> None:
    dist = Sampling(1.0, top_k=2).probs(torch.tensor([[2.0, 1.0, 1.0, 0.0]]))
    assert (dist > 0).tolist() == [[True, True, True, False]]


def test_the_token_that_reaches_top_p_is_kept() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    assert (Sampling(1.0, top_p=0.6).probs(logits) > 0).tolist() == [[True, True, False]]
    assert (Sampling(1.0, top_p=1.0).probs(logits) > 0).all()


def test_top_p_does_not_depend_on_the_order_in_which_a_device_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(1, 50_000)  # a number of equal tokens reaches each share: a rounding decides
    samplings = [Sampling(1.7, top_p=share / 100) for share in range(1, 100)]
    expected = [sampling.probs(logits) for sampling in samplings]
    real = torch.Tensor.cumsum

    def backwards(x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.sum(dim, keepdim=True) - real(x.flip(dim), dim).flip(dim) + x

    monkeypatch.setattr(torch.Tensor, "cumsum", backwards)
    for sampling, dist in zip(samplings, expected, strict=True):
        assert torch.equal(sampling.probs(logits), dist), sampling


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_truncation_does_not_hide_logits_that_are_no_distribution(value: float) -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    logits[0, 7] = value
    dist = Sampling(1.0, top_p=0.5).probs(logits)
    assert dist[0].isnan().all() and torch.equal(dist[1:], Sampling(1.0, top_p=0.5).probs(logits[1:]))


def test_the_greedy_distribution_is_one_hot_at_the_argmax() -> None:
    logits = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0))
    dist, out = Sampling().probs(logits), torch.full_like(logits, 0.5)
    assert Sampling().probs(logits, out) is out and torch.equal(out, dist)
    assert torch.equal(dist.argmax(-1), logits.argmax(-1))
    assert torch.equal(dist.sum(-1), torch.ones(3, 4))


@pytest.mark.parametrize(
    "values", [{"temperature": None}, {"temperature": "1"}, {"top_p": "0.9"}, {"min_p": "0"}], ids=str
)
def test_a_value_that_is_not_a_number_is_refused_by_name(values: Any) -> None:
    ((name, value),) = values.items()
    with pytest.raises(TypeError, match=f"{name} must be a number, got {value!r}"):
        Sampling(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.5}, "temperature must be finite and not negative, got -0.5"),
        ({"temperature": float("nan")}, "temperature must be finite and not negative, got nan"),
        ({"temperature": float("inf")}, "temperature must be finite and not negative, got inf"),
        ({"temperature": 1e-38}, "temperature must be 0 or at least 1e-30, got 1e-38"),
        ({"top_k": 0}, "top_k must be an integer of at least 1, got 0"),
        ({"top_k": 5.0}, "top_k must be an integer of at least 1, got 5.0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"top_p": float("nan")}, r"top_p must be in \(0, 1\], got nan"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\], got -0.1"),
        ({"min_p": 1.1}, r"min_p must be in \[0, 1\], got 1.1"),
    ],
    ids=str,
)
def test_a_value_outside_its_range_is_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**values)  # type: ignore[arg-type]


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
    for rng in (random_rows(1), ChoosingRandom(0, torch.arange(1), torch.full((1,), 5))):
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


def test_draws_beyond_the_support_have_probability_zero() -> None:
    dist = torch.tensor([[[0.0, 0.6, 0.0, 0.4]]])
    tokens, probs = Draws(random_rows(1), 1, 4).draw(dist, 0, 4)
    assert sorted(tokens[0, 0, :2].tolist()) == [1, 3]
    assert (probs[0, 0, :2] > 0).all()
    assert probs[0, 0, 2:].tolist() == [0, 0]


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-53])
def test_draws_at_the_ends_of_the_line_are_tokens_of_the_support(number: float) -> None:
    dist = torch.tensor([[[0.0, 0.3, 0.0, 0.5, 0.2, 0.0]]])
    rng = FixedRandom(0, torch.arange(1), torch.zeros(1, dtype=torch.long), number)
    tokens, probs = Draws(rng, 1, 3).draw(dist, 0, 3)
    assert (probs > 0).all()
    assert sorted(tokens.flatten().tolist()) == [1, 3, 4]


@pytest.mark.parametrize(("vocab", "count"), [(1, 1), (5, 5), (5, 8), (255, 6), (256, 6), (257, 8), (1000, 64)])
def test_the_most_probable_children_are_those_of_a_stable_sort(vocab: int, count: int) -> None:
    rng = torch.Generator().manual_seed(vocab)
    for step in (0, 30, vocab):
        dist = torch.randn(2, 3, vocab, generator=rng).softmax(-1)
        if step:  # many are equal, and many 0
            dist = (dist * step).round() / step
        for given in (dist, dist.double(), dist.transpose(0, 1)):
            expected = torch.sort(given, dim=-1, descending=True, stable=True)
            found = top_candidates(given, 0, count)
            kept = min(vocab, count)
            assert torch.equal(found.tokens[..., :kept], expected.indices[..., :kept])
            assert torch.equal(found.probs[..., :kept], expected.values[..., :kept])
            assert found.tokens.shape[-1] == count and not found.probs[..., kept:].any()
