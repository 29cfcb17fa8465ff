"""A lazy residual behaves as its tensor and is evaluated by the norm that reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stree.kernels import ops
from stree.models.fused.lazy_residual import LazyResidual, normalise_sum, with_row_norm


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*(shape or (2, 3, 8)), generator=torch.Generator().manual_seed(seed)).to(dtype)


def lazy(tensor: Tensor) -> LazyResidual:
    return LazyResidual([(tensor, 1.0)])


def normed(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight.double()


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the terms of every sum that a norm adds up."""
    terms: list[int] = []
    rms_norm_add = ops.rms_norm_add

    def counted(*args: Any, other: Tensor | None = None, **kwargs: Any) -> Any:
        terms.append(2 if other is None else 3)
        return rms_norm_add(*args, other=other, **kwargs)

    monkeypatch.setattr(ops, "rms_norm_add", counted)
    return terms


def test_a_layers_sum_is_added_up_by_its_norm(sums: list[int]) -> None:
    stream, out, weight = draw(0), draw(1), draw(2, 8)
    total: Any
    for total in (stream + lazy(out), lazy(out) + stream, torch.add(stream, lazy(out))):  # type: ignore[call-overload]
        assert isinstance(total, LazyResidual)
        y = normalise_sum(total, weight, eps=0.1, offset=0.0)
        assert torch.allclose(y.double(), normed(stream + out, weight), atol=1e-5)
        assert torch.equal(total.value, stream + out)
    assert sums == [2, 2, 2]


def test_factors_and_a_second_output_are_part_of_the_sum(sums: list[int]) -> None:
    stream, routed, shared, weight = draw(0), draw(1), draw(2), draw(3, 8)
    total = stream + (routed + lazy(shared)) * 0.7
    assert isinstance(total, LazyResidual)
    expected = stream.double() + 0.7 * (routed.double() + shared.double())
    assert torch.allclose(
        normalise_sum(total, weight, eps=0.1, offset=0.0).double(), normed(expected, weight), atol=1e-5
    )
    assert torch.allclose(total.value.double(), expected, atol=1e-6) and sums == [3]


def test_rows_without_the_factor_of_a_norm_before_them_get_it_in_the_sum_or_when_they_are_read(sums: list[int]) -> None:
    stream, rows, out, other, weight = draw(0), draw(1, 2, 3, 6), draw(2), draw(3), draw(4, 8)
    factor = 1 / (rows.double().square().mean(-1, keepdim=True) + 0.2).sqrt()
    made = [with_row_norm(out, rows.square().unflatten(-1, (3, 2)).sum(-1), 6, 0.2) for _ in range(3)]
    assert torch.allclose(made[0].value.double(), out.double() * factor, atol=1e-6)
    expected = stream.double() + 0.7 * (out.double() * factor + other.double())
    for total in (stream + (made[1] + other) * 0.7, stream + (other + made[2]) * 0.7):
        y = normalise_sum(total, weight, eps=0.1, offset=0.0)
        assert torch.allclose(y.double(), normed(expected, weight), atol=1e-5)
        assert torch.allclose(total.value.double(), expected, atol=1e-6)
    assert sums == [3, 3]


def test_more_terms_than_a_norm_takes_are_added_up_before() -> None:
    total: Any = draw(0)
    for seed in range(1, 7):
        total = total + lazy(draw(seed))
    assert isinstance(total, LazyResidual)
    expected, weight = torch.stack([draw(seed) for seed in range(7)]).sum(0), draw(9, 8)
    y = normalise_sum(total, weight, eps=0.1, offset=0.0)
    assert torch.allclose(y.double(), normed(expected, weight), atol=1e-5)
    assert torch.allclose(total.value, expected, atol=1e-5)


def test_without_a_norm_the_sum_is_that_of_the_layer_bit_for_bit() -> None:
    stream, out = draw(0, dtype=torch.bfloat16), draw(1, dtype=torch.bfloat16)
    total: Any = stream + lazy(out) * 0.7
    assert torch.equal(total.value, stream + out * 0.7) and total.value is total.value
    assert torch.equal((2 * lazy(out) * 3).value, out * 6)


def test_a_narrow_cast_of_a_wide_stream_is_normalised_without_a_cast_of_its_own(sums: list[int]) -> None:
    stream, out, weight = draw(0), draw(1, dtype=torch.bfloat16), draw(2, 8, dtype=torch.bfloat16)
    total = stream + lazy(out)
    narrow = total.to(dtype=torch.bfloat16)
    assert narrow.dtype == torch.bfloat16 and total.dtype == torch.float32 and narrow.shape == stream.shape
    y = normalise_sum(narrow, weight, eps=0.1, offset=0.0)
    assert y.dtype == torch.bfloat16 and sums == [2]
    assert torch.allclose(y.double(), normed(stream + out, weight), atol=3e-2)
    assert torch.equal(total.to(torch.float32).value, stream + out)
    assert torch.equal(narrow.value, (stream + out).bfloat16())
    assert torch.equal(narrow * 2, (stream + out).bfloat16() * 2)
    assert torch.equal(narrow + out, (stream + out).bfloat16() + out)
    assert torch.equal(narrow.to(torch.float32), (stream + out).bfloat16().float()), "what a cast cuts off is gone"
    assert torch.equal(lazy(out) + narrow, out + (stream + out).bfloat16())


def test_a_row_for_all_is_no_term_of_a_norm(sums: list[int]) -> None:
    out, row = draw(1), draw(2)[0, 0]
    assert torch.equal(lazy(out) + row, out + row) and sums == []


def test_a_tensor_of_another_device_is_no_term_of_a_norm() -> None:
    total: Any = lazy(draw(0))
    with pytest.raises(RuntimeError, match="device"):
        total + draw(1).to("meta")


def test_a_sum_without_a_stream_is_normalised_all_the_same(sums: list[int]) -> None:
    out, weight = draw(1), draw(2, 8)
    for total, expected in ((lazy(out), out), (lazy(out) * 3, 3 * out), (lazy(out) * 2 + out * 3, 5 * out)):
        assert torch.allclose(
            normalise_sum(total, weight, eps=0.1, offset=0.0).double(), normed(expected, weight), atol=1e-5
        )
    assert sums == [2]


def test_every_other_use_sees_the_tensor() -> None:
    x, weight = draw(0), draw(1, 4, 8)
    total: Any = lazy(x)
    assert total.shape == x.shape and total.device == x.device and total.dtype == x.dtype and len(total) == 2
    assert torch.equal(F.linear(total, weight), F.linear(x, weight))
    assert torch.equal(torch.cat([total, x], -1), torch.cat([x, x], -1))
    assert torch.equal(torch.stack((x, total)), torch.stack((x, x)))
    assert torch.equal(total[:, 1], x[:, 1]) and torch.equal(total.reshape(-1, 8), x.reshape(-1, 8))
    assert torch.equal(total - x, x - x) and torch.equal(1 - total, 1 - x) and torch.equal(total / 2, x / 2)
    assert torch.equal(-total, -x) and torch.equal(total @ weight.T, x @ weight.T) and torch.equal(total**2, x**2)
    assert torch.equal(x * total, x * x) and torch.equal(total * x, x * x)
    assert torch.equal(torch.add(total, x, alpha=2), torch.add(x, x, alpha=2))
    assert torch.equal(F.dropout(total, 0.5, training=False), x) and torch.equal(total + x[0, 0], x + x[0, 0])
    assert torch.equal(total.to("cpu", torch.float64), x.double())
    in_place = x.clone()
    in_place += total
    assert torch.equal(in_place, x + x) and not isinstance(in_place, LazyResidual)
    with pytest.raises(AttributeError, match="no_such_thing"):
        total.no_such_thing  # noqa: B018
