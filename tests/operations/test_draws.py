"""Random numbers and draws of stree.kernels.ops against stree.sampling, kernels interpreted.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_draws.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.fast_cases import slow_unless
from hypothesis import given, settings
from hypothesis import strategies as st

from stree.kernels.ops import Backend, choice, draw_distinct, philox_uniform
from stree.kernels.sampling import blocks
from stree.sampling import Random

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS: tuple[Backend, ...] = ("reference", "triton")
SEEDS = (0, 1, 2**31, 2**40 + 3, 2**63 + 1, -1)
by_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.mark.parametrize(
    ("vocab", "count", "sharpness"),
    slow_unless(
        lambda vocab, _, sharpness: vocab < 999 and sharpness == 3 or vocab == 101,
        [(3, 4, 0.0), (3, 4, 3.0), (3, 4, 30.0), (101, 1, 3.0), (4097, 6, 0.0), (9000, 12, 30.0)],
        in_ci=lambda vocab, *_: vocab < 9000,
    ),
)
def test_distinct_draws_are_choices_from_what_the_earlier_ones_leave(vocab: int, count: int, sharpness: float) -> None:
    rng = torch.Generator().manual_seed(vocab)
    dist = (sharpness * torch.randn(2, 3, vocab, generator=rng)).softmax(-1).to(DEVICE)
    dist[0, 1] = torch.tensor([0.3, 0.2] + [0.0] * (vocab - 2))
    dist[1, 2] = 0.0
    uniform = torch.rand(2, 3, count, generator=rng, dtype=torch.float64).to(DEVICE)
    uniform[0, 0, -1] = 1 - 2.0**-53
    least = 2.0**-20
    tokens, probs = draw_distinct(dist, uniform, least=least, backend="triton")
    left, is_left = dist.clone(), probs > 0
    for place in range(count):
        assert torch.equal(is_left[..., place], left.double().sum(-1) > least * dist.double().sum(-1))
        one = choice(left, uniform[..., place].contiguous(), backend="reference")
        assert torch.equal(tokens[..., place][is_left[..., place]], one[is_left[..., place]])
        assert torch.equal(probs[..., place], dist.gather(-1, one[..., None]).squeeze(-1) * is_left[..., place])
        left.scatter_(-1, tokens[..., place, None], 0.0)
    expected = draw_distinct(dist, uniform, least=least, backend="reference")
    assert torch.equal(probs, expected[1]) and torch.equal(tokens[is_left], expected[0][is_left])
    strided = draw_distinct(dist.repeat(1, 2, 1)[:, ::2], uniform, least=least, backend="triton")
    assert strided[0].shape == uniform.shape
    for numbers in (torch.nn.functional.pad(uniform, (0, 3))[..., :count], uniform.mT.contiguous().mT):
        again = draw_distinct(dist, numbers, least=least, backend="triton")
        assert torch.equal(again[1], probs) and torch.equal(again[0], tokens)
    with pytest.raises(ValueError, match="uniform must be float64"):
        draw_distinct(dist, uniform[:1], least=least)


@by_backend
@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed{seed}")
def test_numbers_are_those_of_the_sampler_bit_for_bit(seed: int, backend: Backend) -> None:
    rng = torch.Generator().manual_seed(3)
    position, sequence, node = torch.randint(-(2**40), 2**40, (3, 5, 27), generator=rng)
    for purpose, number in (("target", 0), ("accept", 1), ("draft", 2)):
        rows = Random(seed, sequence.flatten(), torch.zeros(135, dtype=torch.long))
        expected = rows.uniform(purpose, position.flatten(), node.flatten()).view(5, 27)
        words = (position.to(DEVICE), sequence.to(DEVICE), node.to(DEVICE))
        found = philox_uniform(*words, seed=seed, purpose=number, backend=backend)
        assert torch.equal(found.cpu(), expected) and found.dtype == torch.float64


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 7, 33, 4096, 5001]), st.booleans())
@settings(max_examples=12, deadline=None)
@pytest.mark.slow
def test_choice_is_that_of_the_sampler(seed: int, vocab: int, is_sparse: bool) -> None:
    rng = torch.Generator().manual_seed(seed)
    dist = (3 * torch.randn(9, vocab, generator=rng)).softmax(-1)
    if is_sparse:
        dist = dist * (torch.rand(9, vocab, generator=rng) < 0.3)
        dist[0] = 0  # nothing to draw
    rows = Random(seed, torch.arange(9), torch.zeros(9, dtype=torch.long))
    offset = torch.arange(9)
    uniform = rows.uniform("target", offset).to(DEVICE)
    expected = rows.choice("target", dist, offset)
    for backend in BACKENDS:
        assert torch.equal(choice(dist.to(DEVICE), uniform, backend=backend).cpu(), expected)


@by_backend
def test_choice_on_every_boundary_takes_what_begins_there_and_never_a_weight_of_zero(backend: Backend) -> None:
    dist = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.0, 0.125, 0.125, 0.0], device=DEVICE)
    last = 1 - 2.0**-53
    numbers = torch.tensor([0.0, 0.25, 0.75, 0.875, last, 0.25 - 2.0**-53, 0.75 - 2.0**-53], dtype=torch.float64)
    expected = [1, 3, 5, 6, 6, 1, 3]
    for factor in (1.0, 2.0**-20, 3.0):
        dists = (dist * factor).expand(7, 8)
        assert choice(dists, numbers.to(DEVICE), backend=backend).tolist() == expected
    third = torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.0], device=DEVICE)  # the product of number and total may round up
    assert choice(third, torch.tensor(last, dtype=torch.float64, device=DEVICE), backend=backend).item() == 2


def test_sums_of_a_whole_vocabulary_are_the_same_in_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    dist = (4 * torch.randn(6, 40_003, generator=torch.Generator().manual_seed(0))).softmax(-1).to(DEVICE)
    uniform = torch.rand(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(DEVICE)
    expected = choice(dist, uniform, backend="reference")
    for block in (512, 4096, 65536):
        monkeypatch.setattr(blocks, "BLOCK", block)
        assert torch.equal(choice(dist, uniform, backend="triton"), expected)


NUMBER, WORDS = torch.zeros(1, dtype=torch.float64), torch.zeros(3, dtype=torch.long)
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: choice(torch.zeros(1, 0), NUMBER), ValueError, "choice needs that vocab > 0, got vocab = 0"),
    (lambda: choice(torch.ones(1, 3), NUMBER.float()), TypeError, r"uniform must be float64\[1\], got float32\[1\]"),
    (lambda: choice(torch.ones(1, 3).double(), NUMBER, backend="triton"), TypeError,
     "choice with backend='triton' takes float32, bfloat16 or float16"),
    (lambda: choice(torch.ones(1, 2**20 + 1), NUMBER, backend="triton"), NotImplementedError,
     "choice with backend='triton' takes a vocabulary up to 1048576, got 1048577"),
    (lambda: philox_uniform(WORDS[:2], WORDS[:2], WORDS, seed=0), ValueError,
     r"node must be int64\[2\], got int64\[3\]"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED, ids=[row[2][:30] for row in REFUSED])
def test_what_cannot_be_taken_is_refused(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
