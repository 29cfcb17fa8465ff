"""What a step records in one launch equals what torch records.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_step_bookkeeping.py
"""

# Operands travel as lists of any length, which a type checker cannot count against a signature.
# mypy: disable-error-code="call-arg"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stree.kernels.dispatch import as_on_device

pytest.importorskip("triton")

from stree.kernels.step import bookkeeping
from stree.kernels.step import texts as texts_of_step
from stree.kernels.step.bookkeeping import DeferredPath
from stree.kernels.step.texts import Seen, Texts, emit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

WRITTEN = [field for field in fields(Texts) if field.name != "nodes"]


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
        tokens=draw(10, 99, batch, 9 + n % 3),
        lengths=torch.minimum(draw(0, 9, batch), limit - 1),
        pending=draw(0, 7, batch),
        limit=limit,
        is_finished=draw(0, 2, batch).bool(),
        stop=draw(-1, 7, batch, stops),
    )
    tokens = draw(0, 7, batch, n + 3)[:, :n]
    known = Texts(*(on_device(getattr(texts, field.name)) for field in WRITTEN))
    kinds = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf])
    highest, may_be_infinite = kinds[draw(0, 4, batch, n)], bool(draw(0, 2))
    following = torch.full((batch,), 5)
    moved = [on_device(one) for one in (tokens, path, lengths, following)]
    before = texts.tokens.clone(), texts.lengths.clone()
    found = texts_of_step._emit_in_one(
        moved[0], moved[1], moved[2], moved[3], known, on_device(highest), may_be_infinite=may_be_infinite
    )
    by_numba = replace(texts, **{field.name: getattr(texts, field.name).clone() for field in WRITTEN})
    compiled = emit(tokens, path, lengths, following, by_numba, highest, may_be_infinite=may_be_infinite)
    with as_on_device(triton=False):
        wanted = emit(tokens, path, lengths, following, texts, highest, may_be_infinite=may_be_infinite)
    assert torch.equal(found.cpu(), wanted) and torch.equal(compiled, wanted)
    for field, other in product(WRITTEN, (known, by_numba)):
        assert torch.equal(getattr(other, field.name).cpu(), getattr(texts, field.name)), field.name
    for row, (old, length, count) in enumerate(zip(*(one.tolist() for one in before), wanted[:, m], strict=True)):
        expected = [*old[: length + 1], *wanted[row, :count].tolist(), *old[length + 1 + count :]]
        assert texts.tokens[row].tolist() == expected and int(texts.lengths[row]) == length + count


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 40), st.integers(1, 20), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_path_on_columns_is_the_same(seed: int, batch: int, n: int, m: int, is_ordered: bool) -> None:
    draw = numbers(seed)
    torch.manual_seed(seed)
    path, lengths = paths(draw, batch, n, m)
    order = torch.stack([torch.cat([torch.zeros(1).long(), 1 + torch.randperm(n - 1)]) for _ in range(batch)])
    order = torch.where(draw(0, 9, batch, n) == 0, -1, order)
    num_run = int(draw(1, n + 2))
    given = path, lengths, order if is_ordered else None
    wanted = bookkeeping.path_on_columns(*given, num_run)
    with as_on_device(host_can_read=True):
        found = bookkeeping.path_on_columns(*map(on_device, given), num_run)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype == torch.int32 and torch.equal(one.cpu(), other)


def test_a_path_on_columns_by_hand() -> None:
    path, lengths = torch.tensor([[0, 2, 3], [0, 1, -1], [0, -1, -1]]).int(), torch.tensor([3, 2, 0]).int()
    # The last token of the text, the root behind it, node 2; the path's last node is not committed yet.
    columns, count = bookkeeping.path_on_columns(path, lengths, None, 4)
    assert columns[0].tolist() == [0, 1, 3] and columns[1, :2].tolist() == [0, 1] and count.tolist() == [3, 2, 0]
    # Node 2 was not run; a retrieved node 3 was accepted below it.
    assert bookkeeping.path_on_columns(path, lengths, None, 3)[1].tolist() == [2, 2, 0]
    # In the first row nodes 2 and 3 were retrieved; in the second one node 1 is the third that was drafted.
    numbers = torch.tensor([[0, 1, -1, -1], [0, 3, 2, 1], [0, 1, 2, 3]])
    assert bookkeeping.path_on_columns(path, lengths, numbers, 4)[1].tolist() == [2, 2, 0]
    below = torch.tensor([[0, 1, 3]] * 3).int()
    assert bookkeeping.path_on_columns(below, lengths + 1, numbers, 5)[0].tolist() == [[0, 1, 2], [0, 1, 4], [0, 1, 2]]


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 40), st.integers(1, 20))
@settings(max_examples=40, deadline=None)
def test_a_path_on_nodes_is_the_same(seed: int, batch: int, n: int, m: int) -> None:
    draw = numbers(seed)
    path, lengths = paths(draw, batch, n, m)
    path = torch.where(path < 0, draw(-1, n + 3, batch, m).int(), path)  # anything may follow a length
    wanted = [
        [float(node in row[:length]) for node in range(n)]
        for row, length in zip(path.tolist(), lengths.tolist(), strict=True)
    ]
    wide = on_device(torch.cat([path, path], 1))[:, :m]
    for launches in (False, True):
        with as_on_device(triton=launches, host_can_read=True):
            is_on, is_live = bookkeeping.path_on_nodes(wide, on_device(lengths), n)
        assert is_on.tolist() == wanted and is_on.dtype == torch.float32
        assert is_live.tolist() == [length > 0 for length in lengths.tolist()] and is_live.dtype == torch.bool


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 40), st.integers(1, 16))
@settings(max_examples=40, deadline=None)
def test_a_deferred_path_is_the_same(seed: int, batch: int, n: int, m: int) -> None:
    draw = numbers(seed)
    torch.manual_seed(seed)
    path, lengths = paths(draw, batch, n, m)
    path = torch.where(path < 0, draw(-1, n, batch, m).int(), path)  # anything may follow a length
    committed = draw(0, 50, batch).int()
    made = []
    for launches in (False, True):
        deferred, known = DeferredPath(draw(1, 9, batch, 16), draw(1, 9, batch).int()), on_device(committed)
        deferred = DeferredPath(on_device(deferred.path), on_device(deferred.lengths))
        wide = on_device(torch.cat([path, path], 1))[:, :m]
        with as_on_device(triton=launches, host_can_read=True):
            bookkeeping.defer_path(wide, on_device(lengths), deferred, known)
        made.append((deferred.path.cpu(), deferred.lengths.cpu(), known.cpu()))
    for one, other in zip(*made, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert torch.equal(made[1][2], committed + lengths)


STASHES: dict[
    str, tuple[tuple[int, ...], list[tuple[int, ...]]]
] = {  # leading dimensions behind layers and batch, and the shape of a node's row in each tensor
    "none": ((), []),
    "one": ((), [(5,)]),
    "wide": ((), [(300,), (3,)]),
    "three": ((), [(2, 8), (2, 16), (1,)]),
    "heads": ((2,), [(7,), (257,), (16,)]),
    "four": ((), [(4,), (5,), (6,), (520,)]),
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", STASHES)
def test_the_rows_of_a_path_are_those_of_torch(name: str, batch: int) -> None:
    inner, shapes = STASHES[name]
    layers, n = 4, 21
    leading = (layers, batch, *inner)
    nodes = numbers(batch)(0, n, batch, 16).to(DEVICE)
    dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.float32)
    sources = [torch.randn(*leading, n, *shape).to(DEVICE, dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
    begins = torch.arange(0, n * torch.Size(leading).numel(), n, device=DEVICE).view(*leading, 1)
    found, expected = ([one.new_zeros(*leading, 16, *one.shape[len(leading) + 1 :]) for one in sources] for _ in "ab")
    bookkeeping.copy_rows(nodes, begins, sources, expected)
    with as_on_device(host_can_read=True):
        bookkeeping.copy_rows(nodes, begins, sources, found)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and bool(other.any())


def test_texts_that_take_no_part_keep_everything() -> None:
    texts = Texts(
        torch.tensor([[7, 3, 1, 1]]), torch.tensor([1]), torch.tensor([3]), torch.tensor([4]), torch.tensor([False]),
        torch.tensor([[5]]),
    )  # fmt: skip
    before = Texts(*(getattr(texts, field.name).clone() for field in WRITTEN))
    report = emit(
        torch.tensor([[3, 5]]), torch.tensor([[0, 1]]).int(), torch.tensor([0]).int(), torch.tensor([5]), texts
    )
    assert report[0, -3:].tolist() == [0, 0, 0]
    assert all(torch.equal(getattr(texts, field.name), getattr(before, field.name)) for field in WRITTEN)


def test_what_a_step_has_seen_stays_until_the_next_one() -> None:
    texts = Texts.empty(1, 6, 1, torch.device("cpu"))
    texts.tokens[0, :3], texts.lengths[0], texts.pending[0], texts.limit[0] = torch.tensor([4, 5, 6]), 2, 6, 5
    texts.is_finished[0] = False
    seen = Seen.of(texts)
    emit(torch.tensor([[6, 8]]), torch.tensor([[0, 1]]).int(), torch.tensor([2]).int(), torch.tensor([9]), texts)
    assert (texts.tokens[0].tolist(), texts.lengths.tolist()) == ([4, 5, 6, 8, 9, 0], [4])
    assert texts.is_finished.tolist() == [True] and texts.pending.tolist() == [9]
    assert (seen.lengths.tolist(), seen.pending.tolist(), seen.tokens[0, :3].tolist()) == ([2], [6], [4, 5, 6])
    memory = seen.lengths.data_ptr(), seen.pending.data_ptr()
    seen.update(texts)
    assert (seen.lengths.tolist(), seen.pending.tolist()) == ([4], [9])
    assert memory == (seen.lengths.data_ptr(), seen.pending.data_ptr())
