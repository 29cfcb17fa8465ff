"""Softmax and its norms in two launches equal torch, for any layout of the rows.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_softmax.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.launch_keys import launch_keys
from helpers.on_device import treat_as_on_device, untouched_memory
from torch import Tensor

from stree.kernels.dispatch import as_on_device

pytest.importorskip("triton")

from stree.kernels.sampling import reference, softmax
from stree.kernels.sampling import softmax_kernel as kernels
from stree.kernels.sampling.blocks import BLOCK
from stree.sampling import Sampling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LARGEST = torch.finfo(torch.float32).max
VOCABS = (1, 2, 16, 33, 1000)
ONE_BLOCK, TWO_BLOCKS, THREE_BLOCKS = BLOCK, BLOCK + 1, 2 * BLOCK + 77
TEMPERATURES = (1e-3, 0.1, 0.8, 1.0, 1.7, 1e3)


def a_tail(row: Tensor) -> Tensor:
    """Make the last token the only probable one: a maximum in the last block."""
    row[-1] = 40
    return row


def a_head(row: Tensor) -> Tensor:
    """Make the first token the only probable one."""
    row[0] = 40
    return row


def cut(row: Tensor) -> Tensor:
    """Leave one token of three."""
    return row.masked_fill(torch.arange(len(row)) % 3 != 0, -torch.inf)


# How rows that are hard for a running maximum are made of one of normal numbers.
ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda row: row,
    "sharp": lambda row: 30 * row,
    "far below zero": lambda row: row - 1e4,
    "far above zero": lambda row: row + 1e4,
    "rising": lambda row: row.sort().values * 9,
    "falling": lambda row: row.sort(descending=True).values * 9,
    "equal": lambda row: row * 0 + 3.7,
    "tail": a_tail,
    "head": a_head,
    "cut": cut,
    "one left": lambda row: row.masked_fill(torch.arange(len(row)) != len(row) // 2, -torch.inf),
    "smallest": lambda row: row.clamp(max=0) * 0 - LARGEST,
}


def some_logits(vocab: int, seed: int = 0) -> Tensor:
    """Make float32[2, 6, vocab] logits, a row of each kind."""
    normal = torch.randn(len(ROWS), vocab, generator=torch.Generator().manual_seed(seed))
    rows = [make(row.clone()) for make, row in zip(ROWS.values(), normal, strict=True)]
    return torch.stack(rows).view(2, -1, vocab).to(DEVICE)


def exact_probs(logits: Tensor, temperature: float) -> Tensor:
    """Give float64 distributions."""
    return torch.softmax(logits.double() / temperature, -1)


def is_close(found: Tensor, logits: Tensor, temperature: float) -> bool:
    """Tell whether probabilities are as accurate as float32 quotients allow: 2^-23 of the quotient."""
    exact, quotient = exact_probs(logits, temperature), logits.double() / temperature
    counts = quotient.masked_fill(exact < 1e-40, 0).abs().amax(-1, keepdim=True)
    gap = (quotient.amax(-1, keepdim=True) - quotient).clamp(max=110)
    relative = 2.0**-22 * (counts + gap + 8)
    return bool(((found.double() - exact).abs() <= relative * exact + 1e-37).all())


def check(found: Tensor, norms: Tensor, logits: Tensor, temperature: float) -> None:
    """Check distributions and norms against float64 ones."""
    assert found.dtype == norms.dtype == torch.float32 and norms.shape == logits.shape[:-1]
    assert is_close(found, logits, temperature)
    assert ((found.double().sum(-1) - 1).abs() < 1e-6).all()
    assert bool((found[logits == -torch.inf] == 0).all())
    assert torch.allclose(norms.double(), torch.linalg.vector_norm(found.double(), dim=-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("vocab", "temperature"),
    slow_unless(
        lambda vocab, temperature: vocab in VOCABS and temperature < 0.5 or temperature == 0.8,
        zip([*VOCABS, ONE_BLOCK, TWO_BLOCKS, THREE_BLOCKS] * 3, TEMPERATURES * 4, strict=True),
        in_ci=lambda vocab, temperature: vocab > ONE_BLOCK,
    ),
)
def test_distributions_and_norms_of_rows_of_every_kind_are_exact_to_rounding(vocab: int, temperature: float) -> None:
    logits = some_logits(vocab, seed=vocab)
    if temperature < 1:  # quotients of such rows have no float32
        logits = logits.clamp(min=-LARGEST * temperature / 2).where(logits > -torch.inf, -torch.inf)
    before = logits.clone()
    found, norms = kernels.probs_and_norms(logits, temperature, None)
    check(found, norms, logits, temperature)
    assert torch.equal(kernels.probs(logits, temperature, None), found) and torch.equal(logits, before)
    assert is_close(reference.probs(logits, temperature), logits, temperature)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of inf - inf
def test_a_row_without_a_distribution_is_nan_and_none_beside_it() -> None:
    logits = torch.zeros(1, 5, 2 * BLOCK, device=DEVICE)
    logits[0, 0] = -torch.inf
    logits[0, 1, BLOCK + 3] = torch.inf
    logits[0, 2, [5, 5 + BLOCK]] = torch.inf  # in one lane
    logits[0, 3, BLOCK - 1] = torch.nan
    found, norms = kernels.probs_and_norms(logits, 1.3, None)
    assert found[0, :4].isnan().all() and norms[0, :4].isnan().all()
    check(found[:, 4:], norms[:, 4:], logits[:, 4:], 1.3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_read_as_they_are(dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(2, 3, 1001, generator=torch.Generator().manual_seed(2))).to(dtype).to(DEVICE)
    found, norms = kernels.probs_and_norms(logits, 0.7, None)
    check(found, norms, logits.float(), 0.7)
    assert torch.equal(found, kernels.probs(logits.float(), 0.7, None))


@pytest.mark.parametrize("vocab", slow_unless(lambda _: False, [37, 64], in_ci=(37).__eq__))
def test_rows_of_any_strides_are_read_and_written(vocab: int) -> None:
    whole = 3 * torch.randn(6, 8, 2 * vocab, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    views = {
        "every other row": whole[::2, 1::2, :vocab],
        "rows of one sequence": whole[:1, :, vocab:],
        "batch and rows swapped": whole.transpose(0, 1)[..., 3 : 3 + vocab],
        "every other token": whole[..., ::2],
        "one row again and again": whole[:1, :1, :vocab].expand(3, 4, -1),
        "no batch": whole[2, 1::3, 5 : 5 + vocab],
    }
    for name, logits in views.items():
        found, norms = kernels.probs_and_norms(logits, 0.8, None)
        check(found, norms, logits, 0.8)
        assert found.is_contiguous(), name
        room = torch.full((*logits.shape[:-2], logits.shape[-2] + 3, vocab + 5), 7.0, device=DEVICE)
        out = room[..., 1:-2, 2:-3]
        probs, same = kernels.probs_and_norms(logits, 0.8, out)
        assert probs is out and torch.equal(out, found) and torch.equal(same, norms), name
        out.fill_(7.0)
        assert bool((room == 7.0).all()), name


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1])
def test_rows_far_from_each_other_are_found(axis: int) -> None:
    far, near = 2**30, 2**5
    room = untouched_memory(2 * far + near, torch.bfloat16, DEVICE)
    shape, strides = ((3, 1, 20), (far, near, 1)) if axis == 0 else ((1, 3, 20), (near, far, 1))
    logits = room.as_strided(shape, strides)
    logits.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    check(*kernels.probs_and_norms(logits, 0.8, None), logits.float(), 0.8)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels do what they would do on a GPU."""
    treat_as_on_device(monkeypatch, triton=True, host_can_read=True)


def names_of(monkeypatch: pytest.MonkeyPatch, work: Callable[..., object], *args: object) -> list[str]:
    """List the kernels that something launches."""
    with launch_keys(monkeypatch) as keys:
        work(*args)
    return [name for name, _ in keys]


def test_what_no_kernel_takes_is_left_to_torch(launched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(2, 3, 20, device=DEVICE)
    monkeypatch.setattr(softmax, "MAX_VOCAB", 20)
    wide = torch.empty(2, 3, 40, device=DEVICE)[..., ::2]
    for rows, out in (
        (logits.double(), None),
        (logits[0, 0], None),
        (logits[None], None),
        (torch.randn(2, 3, 21, device=DEVICE), None),
        (logits, wide),
    ):
        assert names_of(monkeypatch, softmax.probs, rows, 0.8, out) == []
        found, norms = softmax.probs_and_norms(rows, 0.8, out)
        assert norms is None and torch.equal(found, reference.probs(rows, 0.8)) and (out is None or found is out)
    for work in (softmax.probs, softmax.probs_and_norms):
        for rows in (logits, logits[0], logits.bfloat16()):
            assert names_of(monkeypatch, work, rows, 0.8) == ["masses_kernel", "probs_kernel"]
    assert softmax.probs_and_norms(logits, 0.8)[1] is not None


def test_every_batch_entry_has_its_own_temperature(launched: None) -> None:
    logits = 3 * torch.randn(3, 2, 37, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    temperatures = torch.tensor([0.5, 1.0, 2.5], dtype=torch.float64, device=DEVICE)
    for rows in (logits, logits[:, 1]):  # rows of a batch, and a matrix with a temperature for every row
        found, norms = softmax.probs_and_norms(rows, temperatures)
        assert norms is not None and torch.equal(softmax.probs(rows, temperatures), found)
        for row, temperature in enumerate(temperatures.tolist()):
            check(found[row], norms[row], rows[row], temperature)
        assert is_close(reference.probs(rows, temperatures)[1], rows[1], 1.0)


def test_a_sampling_without_cuts_is_launched_and_others_are_what_they_were(
    launched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = 3 * torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    for plain in (Sampling(0.8), Sampling(0.8, top_p=1.0, min_p=0.0)):
        for out in (None, torch.empty(2, 3, 20, device=DEVICE)):
            assert names_of(monkeypatch, plain.probs, logits, out) == ["masses_kernel", "probs_kernel"]
            found, norms = plain.draft_probs(logits, out)
            assert norms is not None and (out is None or found is out)
            check(found, norms, logits, 0.8)
    for other in (Sampling(0.8, top_k=5), Sampling(0.8, top_p=0.9), Sampling(1.0, 3, 0.5)):
        assert names_of(monkeypatch, other.draft_probs, logits) == []
        found, norms = other.draft_probs(logits)
        with as_on_device(triton=False, host_can_read=True):
            assert norms is None and torch.equal(found, other.probs(logits))


# What is wrong, and distributions and norms that are wrong so.
CONTROLS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "another temperature": lambda logits: kernels.probs_and_norms(logits, 0.801, None),
    "a token left out": lambda logits: kernels.probs_and_norms(
        logits.masked_fill(torch.arange(logits.shape[-1], device=DEVICE) == 5, -torch.inf), 0.8, None
    ),
    "norms of other rows": lambda logits: (
        kernels.probs(logits, 0.8, None), kernels.probs_and_norms(logits.roll(1, 1), 0.8, None)[1]
    ),
    "norms of logits": lambda logits: (kernels.probs(logits, 0.8, None), torch.linalg.vector_norm(logits, dim=-1)),
    "not normalised": lambda logits: (
        kernels.probs(logits, 0.8, None) * (1 + 1e-5), kernels.probs_and_norms(logits, 0.8, None)[1] * (1 + 1e-5)
    ),
}  # fmt: skip


@pytest.mark.parametrize("control", CONTROLS)
def test_distributions_that_are_wrong_in_one_thing_are_rejected(control: str) -> None:
    logits = 3 * torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    check(*kernels.probs_and_norms(logits, 0.8, None), logits, 0.8)
    with pytest.raises(AssertionError):
        check(*CONTROLS[control](logits), logits, 0.8)
