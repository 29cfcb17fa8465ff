"""Rotary positions, gated activations and inputs of delta rules against their distributions in float64 and
transformers' code.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_pointwise.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.operation_problem import DEVICE, error
from torch import Tensor

from stree.kernels import ops
from stree.kernels.ops import ACTIVATIONS
from stree.kernels.precision import float32_tolerance
from stree.kernels.tiles import interpreted

# Largest error as a share of the largest value of the oracle, which sees the same rounded inputs.
# The interpreter's float32 sums are NumPy's; a GPU multiplies experts' products as tf32x3.
FLOAT32 = 2e-6 if interpreted() else float32_tolerance(512)
TOLERANCE = {torch.float64: 1e-12, torch.float32: FLOAT32, torch.bfloat16: 1e-2, torch.float16: 2e-3}
CASES = [(b, d) for b in ("reference", "triton") for d in TOLERANCE if (b, d) != ("triton", torch.float64)]
BACKENDS = pytest.mark.parametrize(("backend", "dtype"), CASES, ids=[f"{b}-{str(d)[6:]}" for b, d in CASES])
ACT: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "relu_squared": lambda x: x.clamp(min=0) ** 2,
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Write the distribution out in float64, column by column."""
    x, cos, sin = x.double(), cos.double(), sin.double()
    y, half = x.clone(), cos.shape[2] // 2
    for c in range(half):
        y[..., c] = x[..., c] * cos[:, None, :, c] - x[..., c + half] * sin[:, None, :, c]
        y[..., c + half] = x[..., c + half] * cos[:, None, :, c + half] + x[..., c] * sin[:, None, :, c + half]
    return y


@BACKENDS
@pytest.mark.parametrize(
    ("dim", "width", "shared"), [(16, 16, False), (12, 12, True), (20, 6, False)], ids=["all", "odd-dim", "some"]
)
def test_rotary_positions_of_strided_rows_equal_their_distribution(
    backend: ops.Backend, dtype: torch.dtype, dim: int, width: int, shared: bool
) -> None:
    batch, n = 2, 5
    q = draw(batch, n, 7, 2 * dim).to(dtype)[..., :dim].transpose(1, 2)
    k = draw(batch, n, 3, dim, seed=1).to(dtype).transpose(1, 2)
    cos, sin = (draw(1 if shared else batch, n, width, seed=seed).to(dtype) for seed in (2, 3))
    before = q.clone()
    found = ops.rotary(q, k, cos, sin, backend=backend)
    for mine, x in zip(found, (q, k), strict=True):
        assert mine.dtype == dtype and mine.stride(3) == 1
        assert error(mine, rotated(x, cos, sin)) < TOLERANCE[dtype]
        assert torch.equal(mine[..., width:], x[..., width:])
    assert torch.equal(q, before)


def test_a_rotation_in_pairs_is_seen() -> None:
    q, k, angles = draw(1, 2, 3, 8), draw(1, 1, 3, 8, seed=1), draw(1, 3, 8, seed=2)
    mine, _ = ops.rotary(q, k, angles.cos(), angles.sin())
    pairs = torch.stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2)
    assert error(mine, q * angles.cos()[:, None] + pairs * angles.sin()[:, None]) > 1e-1


@BACKENDS
@pytest.mark.parametrize(("activation", "has_up"), [*((name, True) for name in ACTIVATIONS), ("silu", False)], ids=str)
def test_a_gated_activation_of_halves_of_a_row_equals_its_distribution(
    backend: ops.Backend, dtype: torch.dtype, activation: str, has_up: bool
) -> None:
    gate, up = draw(2, 5, 2 * 1029).to(dtype).chunk(2, -1)  # more channels than a program owns
    y = ops.gated_activation(gate, up if has_up else None, activation=activation, scale=1.5, backend=backend)
    assert y.dtype == dtype and y.is_contiguous()
    assert error(y, ACT[activation](1.5 * gate.double()) * (up.double() if has_up else 1)) < TOLERANCE[dtype]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_neither_overflow_nor_hide_what_is_not_a_number(activation: str) -> None:
    gate = torch.tensor([[-1e4, -100.0, -1.0, 0.0, 1.0, 100.0, 1e4]], device=DEVICE)
    y = ops.gated_activation(gate, None, activation=activation, backend="triton")
    assert error(y, ACT[activation](gate.double().clamp(min=-700))) < TOLERANCE[torch.float32]
    nan = torch.full((1, 3), torch.nan, device=DEVICE)
    assert bool(ops.gated_activation(nan, None, activation=activation, backend="triton").isnan().all())


@BACKENDS
@pytest.mark.parametrize(
    ("key_heads", "dk", "heads", "decays"), [(3, 12, 6, False), (5, 200, 5, True)], ids=["few", "many"]
)
def test_inputs_of_a_delta_rule_equal_their_distribution(
    backend: ops.Backend, dtype: torch.dtype, key_heads: int, dk: int, heads: int, decays: bool
) -> None:
    qk = draw(2, 4, 2 * key_heads * dk + 7).to(dtype)[..., : 2 * key_heads * dk]
    b, a = draw(2, 4, 2 * heads, seed=1).to(dtype).chunk(2, -1)
    A_log, bias = draw(heads, seed=2).to(dtype), draw(heads, seed=3).to(dtype)
    rates = (10 * a, A_log, bias) if decays else ()  # step sizes on both sides of softplus
    q, k, g, beta = ops.delta_inputs(qk, b, *rates, key_heads=key_heads, scale=2.0, backend=backend)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {q.dtype, k.dtype, beta.dtype} == {wide}
    tolerance = TOLERANCE[wide]  # inputs are rounded, outputs are not
    for place, mine in enumerate((q, k)):
        x = qk.double().view(2, 4, 2, key_heads, dk)[:, :, place]
        assert error(mine, x / ((x * x).sum(-1, keepdim=True) + 1e-6).sqrt()) < tolerance
    assert error(beta, 2 / (1 + torch.exp(-b.double()))) < tolerance
    assert (g is not None) == decays
    if g is not None:
        assert error(g, -A_log.double().exp() * F.softplus((10 * a).double() + bias.double())) < tolerance


def mixed(x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str, gated: bool) -> Tensor:
    """Write the distribution out in float64, row by row and expert by expert."""
    y = torch.zeros_like(x, dtype=torch.float64)
    for row in range(len(x)):
        for weight, expert in zip(weights[row].tolist(), index[row].tolist(), strict=True):
            made = up[expert].double() @ x[row].double()
            gate, factor = made.chunk(2) if gated else (made, 1)
            y[row] += weight * (down[expert].double() @ (ACT[activation](gate) * factor))
    return y


ONE, SOME, MANY = (True, 1, 5, 2, 20, 12), (True, 9, 4, 3, 150, 40), (False, 34, 3, 2, 33, 20)  # many rows an expert


@pytest.mark.parametrize(
    ("backend", "dtype", "sizes"),
    [
        *((backend, dtype, ONE) for backend, dtype in CASES), ("reference", torch.float64, SOME),
        ("reference", torch.float64, MANY), ("triton", torch.float32, SOME), ("triton", torch.bfloat16, MANY),
    ],
    ids=str,
)  # fmt: skip
def test_a_mixture_of_experts_equals_its_distribution(
    backend: ops.Backend, dtype: torch.dtype, sizes: tuple[bool, int, int, int, int, int]
) -> None:
    gated, rows, experts, share, channels, inner = sizes
    x = draw(rows, channels + 7).to(dtype)[:, :channels]
    index = torch.stack(
        [torch.randperm(experts, generator=torch.Generator().manual_seed(row))[:share] for row in range(rows)]
    )
    index, weights = index.to(DEVICE), draw(rows, share, seed=1).to(dtype)
    up, down = (
        draw(experts, inner * (1 + gated), channels, seed=2).to(dtype),
        draw(experts, channels, inner, seed=3).to(dtype),
    )
    activation = "silu" if gated else "relu_squared"
    y = ops.experts(x, index, weights, up, down, activation=activation, gated=gated, backend=backend)
    assert y.dtype == dtype and y.is_contiguous()
    # Two products and a rounding between them.
    assert error(y, mixed(x, index, weights, up, down, activation, gated)) < 2 * TOLERANCE[dtype]


def test_an_expert_that_no_row_asks_for_is_not_read() -> None:
    x, index, weights = draw(3, 16), torch.tensor([[0], [2], [0]], device=DEVICE), draw(3, 1, seed=1)
    up, down = draw(3, 8, 16, seed=2), draw(3, 16, 4, seed=3)
    expected = mixed(x, index, weights, up, down, "silu", True)
    up[1], down[1] = torch.nan, torch.nan
    assert error(ops.experts(x, index, weights, up, down, backend="triton"), expected) < TOLERANCE[torch.float32]


def test_step_sizes_keep_their_digits_far_from_one() -> None:
    a = torch.tensor([[[-60.0, -20.0, -5.0, 15.0, 100.0]]], device=DEVICE)
    zeros = torch.zeros(5, device=DEVICE)
    _, _, g, _ = ops.delta_inputs(draw(1, 1, 4), a, a, zeros, zeros, key_heads=1, backend="triton")
    assert g is not None
    expected = -torch.log1p(torch.exp(a.double()))
    assert float(((g.double() - expected) / expected).abs().max()) < 1e-5


def test_rows_of_nothing_have_no_direction() -> None:
    qk, b = torch.zeros(1, 2, 16, device=DEVICE), torch.zeros(1, 2, 3, device=DEVICE)
    q, k, _, beta = ops.delta_inputs(qk, b, key_heads=2, backend="triton")
    assert not bool(q.any() | k.any()) and bool((beta == 0.5).all())
