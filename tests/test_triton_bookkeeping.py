"""What a step writes down in one launch is what torch's operators write down.

Run: TRITON_INTERPRET=1 python -m pytest tests/test_triton_bookkeeping.py
"""

# Operands travel as lists of any length, which a type checker cannot count against a signature.
# mypy: disable-error-code="call-arg"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_keys import launch_keys
from torch import Tensor

pytest.importorskip("triton")

from stree.kernels import bookkeeping
from stree.kernels.bookkeeping import Drafted, Texts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("poisoned_empty")


def numbers(seed: int) -> Callable[..., Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return lambda least, most, *shape: torch.randint(least, most, shape, generator=rng)


def paths(draw: Callable[..., Tensor], batch: int, n: int, m: int) -> tuple[Tensor, Tensor]:
    """Make ascending nodes from the root down, padded by -1, of any length from 0."""
    lengths = draw(0, min(m, n) + 1, batch)
    path = torch.full((batch, m), -1)
    for row, length in enumerate(lengths.tolist()):
        if length:
            nodes = torch.cat([torch.zeros(1).long(), 1 + torch.randperm(n - 1)[: length - 1].sort().values])
            path[row, :length] = nodes
    return path.int(), lengths.int()


def on_device(values: Any) -> Any:
    return values.to(DEVICE).clone() if isinstance(values, Tensor) else values


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 40), st.integers(1, 20), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_what_is_emitted_is_the_same(seed: int, batch: int, n: int, m: int, stops: int) -> None:
    draw = numbers(seed)
    torch.manual_seed(seed)
    path, lengths = paths(draw, batch, n, m)
    limit = draw(1, 9, batch)
    texts = Texts(
        pending=draw(0, 7, batch),
        num_new=torch.minimum(draw(0, 9, batch), limit),
        limit=limit,
        is_finished=draw(0, 2, batch).bool(),
        stop=draw(0, 7, stops),
    )
    tokens = draw(0, 7, batch, n + 3)[:, :n]
    known = Texts(*(on_device(getattr(texts, field.name)) for field in fields(Texts)))
    found = bookkeeping._emit_in_one(
        *map(on_device, (tokens, path, lengths)), on_device(draw(0, 7, batch) * 0 + 5), known
    )
    wanted = bookkeeping.emit(tokens, path, lengths, torch.full((batch,), 5), texts)
    assert torch.equal(found.cpu(), wanted)
    for field in fields(Texts):
        assert torch.equal(getattr(known, field.name).cpu(), getattr(texts, field.name)), field.name


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 40), st.integers(1, 20), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_path_on_columns_is_the_same(seed: int, batch: int, n: int, m: int, is_ordered: bool) -> None:
    draw = numbers(seed)
    torch.manual_seed(seed)
    path, lengths = paths(draw, batch, n, m)
    order = torch.stack([torch.cat([torch.zeros(1).long(), 1 + torch.randperm(n - 1)]) for _ in range(batch)])
    tokens, has_leaf, leaf = draw(0, 99, batch, n + 9)[:, : n + 1], draw(0, 2, batch).bool(), draw(0, 99, batch)
    num_run = int(draw(1, n + 2))
    given = path, lengths, order if is_ordered else None, tokens, has_leaf, leaf
    moved: list[Any] = [on_device(one) for one in given]
    found = bookkeeping._path_in_one(*moved[:2], Drafted(*moved[2:], num_run))
    wanted = bookkeeping.path_on_columns(*given[:2], Drafted(*given[2:], num_run))
    for one, other in zip((*found, *moved[4:]), (*wanted, has_leaf, leaf), strict=True):
        assert one.dtype == other.dtype and torch.equal(one.cpu(), other)


def test_a_path_on_columns_by_hand() -> None:
    path, lengths = torch.tensor([[0, 2, 3], [0, 1, -1], [0, -1, -1]]).int(), torch.tensor([3, 2, 0]).int()
    tokens = torch.arange(15).view(3, 5) + 10
    has_leaf, leaf = torch.tensor([True, False, True]), torch.tensor([1, 2, 3])
    full, count = bookkeeping.path_on_columns(path, lengths, Drafted(None, tokens, has_leaf, leaf, 3))
    # Columns of the first: the old leaf, the root behind it, nodes 2 and 3 in columns 3 and 4, the last one never run.
    assert full[0].tolist() == [0, 1, 3, 4] and full[1, :2].tolist() == [0, 2]
    assert count.tolist() == [3, 2, 0]
    assert has_leaf.tolist() == [True, False, True] and leaf.tolist() == [14, 2, 3]


def test_a_step_s_own_numbers_make_no_new_build(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for m, n in ((4, 16), (7, 31), (5, 33)):
        draw = numbers(m)
        path, lengths = paths(draw, 2, n, m)
        zero = torch.zeros(2).long()
        texts = Texts(zero, zero.clone(), zero + 9, zero.bool(), torch.arange(m % 3))
        given = [on_device(one) for one in (draw(0, 7, 2, n), path, lengths, zero)]
        with launch_keys(monkeypatch) as keys:
            bookkeeping._emit_in_one(*given, Texts(*(on_device(getattr(texts, field.name)) for field in fields(Texts))))
            bookkeeping._path_in_one(
                given[1], given[2], Drafted(None, given[0], on_device(zero.bool()), on_device(zero), n)
            )
        found.append(keys)
    assert [name for name, _ in found[0]] == ["emit_kernel", "columns_kernel"]
    assert found[0] == found[1] == found[2]


def test_texts_that_stand_still_keep_everything() -> None:
    texts = Texts(torch.tensor([3]), torch.tensor([4]), torch.tensor([9]), torch.tensor([False]), torch.tensor([5]))
    before = replace(texts, **{name: getattr(texts, name).clone() for name in ("pending", "num_new", "is_finished")})
    report = bookkeeping.emit(
        torch.tensor([[3, 5]]), torch.tensor([[0, 1]]).int(), torch.tensor([0]).int(), torch.tensor([5]), texts
    )
    assert report[0, -2:].tolist() == [0, 0]
    assert all(torch.equal(getattr(texts, field.name), getattr(before, field.name)) for field in fields(Texts))
