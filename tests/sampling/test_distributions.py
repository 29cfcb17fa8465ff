"""Probabilities after temperature, top-k, top-p and min-p, and values that are refused.

Run: python -m pytest tests/sampling/test_distributions.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.on_device import treat_as_on_device
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from stree.sampling import BatchSampling, Random, Sampling


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
