"""What a step does to texts, paths and columns is the same compiled for the CPU as in torch.

Run: python -m pytest tests/operations/test_cpu_steps.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from stree.kernels.dispatch import as_on_device
from stree.kernels.step.bookkeeping import path_on_columns, path_on_nodes
from stree.kernels.step.texts import Seen, Texts, emit
from stree.kernels.tree_growth import api, reference
from stree.kernels.tree_growth.operands import Columns

IN_TORCH: Any = {"triton": False, "host_can_read": False}


def numbers(seed: int) -> Callable[..., Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return lambda least, most, *shape: torch.randint(least, most, shape, generator=rng)


def tensors(value: Any) -> list[Tensor]:
    parts = value if isinstance(value, tuple) else [getattr(value, field.name) for field in fields(value)]
    return [part for part in parts if isinstance(part, Tensor)]


def assert_same(found: Any, wanted: Any) -> None:
    for one, other in zip(tensors(found), tensors(wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(30))
def test_texts_and_paths(seed: int) -> None:
    draw = numbers(seed)
    batch, n, m, stops = (int(draw(1, most, 1)) for most in (5, 30, 12, 4))
    lengths = draw(0, min(m, n) + 1, batch).int()
    path = torch.where(torch.arange(m) < lengths[:, None], draw(0, n, batch, m), -1).int()

    def run() -> tuple[Tensor, ...]:
        draw = numbers(seed)
        limit = draw(1, 40, batch)
        texts = Texts(
            draw(10, 99, batch, 60), torch.minimum(draw(0, 40, batch), limit - 1), draw(0, 7, batch), limit,
            draw(0, 2, batch).bool(), draw(-1, 7, batch, stops - 1),
        )  # fmt: skip
        report = emit(draw(0, 7, batch, n), path, lengths, draw(0, 7, batch), texts)
        number = draw(-1, n + 3, batch, n)
        mapped = [path_on_columns(path, lengths, one, n // 2 + 2) for one in (None, number)]
        return report, *tensors(texts), *mapped[0], *mapped[1], *path_on_nodes(path, lengths, n)

    found = run()
    with as_on_device(**IN_TORCH):
        wanted = run()
        assert_same(found, wanted)
        lengths = 1 - (lengths > 0).int()  # other paths give another report
        assert not torch.equal(run()[0], found[0])


def grown(seed: int, batch: int, room: int) -> tuple[Columns, Columns]:
    """Return columns that both begin, with random trees behind the first two."""
    draw = numbers(seed)
    seen = Seen(draw(0, 99, batch, 50), draw(1, 49, batch), draw(0, 99, batch))
    columns, other = api.begin(seen, room), reference.begin(seen, room)
    assert_same(columns, other)
    for part in (columns, other):
        draw = numbers(seed)
        part.tokens[:, 2:], part.values[:, 1:] = draw(0, 99, batch, room - 2), draw(0, 9, batch, room - 2).float()
        for column in range(2, room):
            part.parents[:, column] = draw(1, column, batch).int()
            above = part.parents[:, column, None].long()
            part.depths[:, column] = part.depths.gather(1, above)[:, 0] + 1
            part.mask[:, column] |= part.mask.take_along_dim(above[..., None], 1)[:, 0]
    return columns, other


@pytest.mark.parametrize("seed", range(10))
def test_columns(seed: int) -> None:
    batch, room = 1 + seed % 3, 12 + 3 * seed
    columns, other = grown(seed, batch, room)
    for size in (2, room):
        assert_same(api.cut(columns, None, size), reference.cut(other, None, size))
    order = other.depths[:, 1:].sort(dim=1, stable=True).indices  # parents before children
    for kept in (order, order[:, : room // 2]):
        assert_same(api.cut(columns, kept, room), reference.cut(other, kept, room))
    assert not torch.equal(api.cut(columns, order, room).tokens, api.cut(columns, None, room).tokens)
