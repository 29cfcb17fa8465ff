"""The gated norm and the norm of a residual sum against transformers' own modules and float64.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_norms.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.operation_problem import DEVICE, error
from torch import Tensor

from stree.kernels import ops
from stree.kernels.precision import float32_tolerance

# Largest error as a share of the largest value of the oracle, which sees the same rounded inputs.
TOLERANCE = {torch.float64: 1e-12, torch.float32: float32_tolerance(1024), torch.bfloat16: 2e-2, torch.float16: 2e-3}
CASES = [(b, d) for b in ("reference", "triton") for d in TOLERANCE if (b, d) != ("triton", torch.float64)]
CASES += [("auto", torch.float32), ("auto", torch.float64)]  # numba on a CPU
BACKENDS = pytest.mark.parametrize(("backend", "dtype"), CASES, ids=[f"{b}-{str(d)[6:]}" for b, d in CASES])
EPS = 1e-5


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def gated(x: Tensor, gate: Tensor, weight: Tensor, groups: int, first: bool, sigmoid: bool) -> Tensor:
    """Write the distribution out in float64, group by group."""
    x, gate, weight = x.double(), gate.double(), weight.double()
    opening = 1 / (1 + torch.exp(-gate)) * (1 if sigmoid else gate)
    y = x if first else x * opening
    width = x.shape[-1] // groups
    parts = [y[..., g * width : (g + 1) * width] for g in range(groups)]
    y = torch.cat([part / ((part**2).sum(-1, keepdim=True) / width + EPS).sqrt() for part in parts], -1) * weight
    return y * opening if first else y


@BACKENDS
@pytest.mark.parametrize(
    ("first", "sigmoid"), [(False, False), (True, True)], ids=["gate-first-silu", "norm-first-sigmoid"]
)
def test_gated_norm_of_strided_rows_equals_its_distribution(
    backend: ops.Backend, dtype: torch.dtype, first: bool, sigmoid: bool
) -> None:
    projected = draw(2, 5, 100).to(dtype)
    x, gate, weight = projected[..., :39], projected[..., 50:89], draw(39, seed=1).to(dtype)
    options: dict[str, Any] = {"groups": 3, "norm_before_gate": first, "activation": "sigmoid" if sigmoid else "silu"}
    y = ops.gated_rms_norm(x, gate, weight, eps=EPS, backend=backend, **options)
    assert y.dtype == dtype and y.is_contiguous()
    assert error(y, gated(x, gate, weight, 3, first, sigmoid)) < TOLERANCE[dtype]


def test_a_gate_of_another_dtype_is_opened_in_float32_or_wider() -> None:
    x, gate, weight = draw(2, 5, 36), draw(2, 5, 36, seed=1), draw(36, seed=2)
    for rows, narrow in ((x, gate.bfloat16()), (x.double(), gate)):
        y = ops.gated_rms_norm(rows, narrow, weight, eps=EPS)
        assert error(y, gated(rows, narrow, weight, 1, False, False)) < TOLERANCE[rows.dtype]


def test_a_wrong_order_of_norm_and_gate_is_seen() -> None:
    x, gate, weight = draw(2, 5, 36), draw(2, 5, 36, seed=1), draw(36, seed=2)
    y = ops.gated_rms_norm(x, gate, weight, eps=EPS, norm_before_gate=True)
    assert error(y, gated(x, gate, weight, 1, False, False)) > 1e-2


@BACKENDS
def test_norm_of_a_residual_sum_equals_its_distribution(backend: ops.Backend, dtype: torch.dtype) -> None:
    x, weight = draw(2, 5, 90)[..., :41].to(dtype), draw(41, seed=2).to(dtype)
    # Some models keep the stream in float32; a narrow stream shows that the sum is rounded before it is normalised.
    for wide in {dtype, torch.promote_types(dtype, torch.float32), torch.bfloat16}:
        residual = draw(2, 5, 41, seed=1).to(wide)
        before = residual.clone()
        y, total = ops.rms_norm_add(x, residual, weight, eps=EPS, offset=0.5, backend=backend)
        assert y.dtype == dtype and total.dtype == wide and torch.equal(residual, before)
        assert error(total, residual.double() + x.double()) < TOLERANCE[wide]
        stored = total.double()
        expected = stored / ((stored**2).mean(-1, keepdim=True) + EPS).sqrt() * (weight.double() + 0.5)
        assert error(y, expected) < TOLERANCE[dtype]


@BACKENDS
def test_norm_of_rows_equals_its_distribution(backend: ops.Backend, dtype: torch.dtype) -> None:
    x, weight = draw(2, 5, 90)[..., :41].to(dtype), draw(41, seed=2).to(dtype)
    y = ops.rms_norm(x, weight, eps=EPS, offset=1.0, backend=backend)
    rows = x.double()
    expected = rows / ((rows**2).mean(-1, keepdim=True) + EPS).sqrt() * (weight.double() + 1)
    assert y.dtype == dtype and y.is_contiguous() and error(y, expected) < TOLERANCE[dtype]


@BACKENDS
@pytest.mark.parametrize("other_scale", [None, 0.7], ids=["one-term", "two-terms"])
def test_scaled_terms_of_a_residual_sum_are_rounded_once(
    backend: ops.Backend, dtype: torch.dtype, other_scale: float | None
) -> None:
    x, residual, other = (draw(2, 5, 41, seed=seed).to(dtype) for seed in range(3))
    terms: dict[str, Any] = {} if other_scale is None else {"other": other, "other_scale": other_scale}
    weight = torch.ones(41, dtype=dtype, device=DEVICE)
    y, total = ops.rms_norm_add(x, residual, weight, eps=EPS, scale=-1.3, **terms, backend=backend)
    expected = residual.double() - 1.3 * x.double() + (other_scale or 0) * other.double()
    # Half a unit in the last place; the interpreter cuts bfloat16 off, which makes it a whole one.
    rounding = torch.finfo(dtype).eps * (1 if backend == "triton" else 0.501)
    assert error(total, expected) < (rounding if dtype.itemsize == 2 else TOLERANCE[dtype])
    stored = total.double()
    assert error(y, stored / ((stored**2).mean(-1, keepdim=True) + EPS).sqrt()) < TOLERANCE[dtype]


@BACKENDS
def test_a_projection_of_unnormed_rows_is_multiplied_by_their_factors(backend: ops.Backend, dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    rows, weight, residual = draw(2, 5, 24).to(wide), draw(41, seed=2).to(dtype), draw(2, 5, 41, seed=3).to(wide)
    x, squares = (rows @ draw(24, 41, seed=1).to(wide)).to(dtype), rows.square().unflatten(-1, (3, 8)).sum(-1)
    y, total = ops.rms_norm_add(
        x, residual, weight, eps=EPS, scale=2.0, squares=squares, squares_norm=(24, 0.1), dtype=wide, backend=backend
    )
    factor = 1 / ((rows.double() ** 2).mean(-1, keepdim=True) + 0.1).sqrt()
    assert error(total, residual.double() + 2 * x.double() * factor) < TOLERANCE[wide]
    stored = total.double()
    expected = stored / ((stored**2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    assert y.dtype == wide and error(y, expected) < TOLERANCE[wide]
    _, plain = ops.rms_norm_add(x, residual, weight, eps=EPS, scale=2.0, backend=backend)
    assert error(plain, total) > 0.1


def test_rows_of_nothing_are_normalised_to_nothing() -> None:
    x, weight = torch.zeros(1, 3, 20, device=DEVICE), torch.ones(20, device=DEVICE)
    for y in (
        ops.gated_rms_norm(x, x, weight, eps=EPS, backend="triton"),
        *ops.rms_norm_add(x, x, weight, eps=EPS, backend="triton"),
        ops.rms_norm(x, weight, eps=EPS, backend="triton"),
    ):
        assert torch.equal(y, x)


def test_gates_of_any_size_do_not_overflow() -> None:
    x, weight = torch.ones(1, 2, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    gate = torch.tensor([-1e4, -100.0, -50.0, 0.0, 1.0, 50.0, 100.0, 1e4], device=DEVICE).expand(1, 2, 8)
    for first in (False, True):
        y = ops.gated_rms_norm(x, gate, weight, eps=EPS, norm_before_gate=first, backend="triton")
        assert error(y, gated(x, gate.clamp(min=-700), weight, 1, first, False)) < TOLERANCE[torch.float32]
