"""stree.kernels.conv.kernel against a float64 loop over paths (tests/helpers/oracles.py), interpreted on the CPU.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_conv.py
"""

from __future__ import annotations

import pytest
import torch
from helpers import oracles
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stree.kernels import ops
from stree.kernels.precision import float32_tolerance

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("poisoned_empty")

# Largest error as a share of the largest value of the oracle, which sees the same rounded inputs.
TOLERANCE = {
    torch.float32: float32_tolerance(8),  # 6e-8 rounding, sums of a few products
    torch.bfloat16: 2e-2,  # the output has 8 bits, and the interpreter rounds them towards zero
    torch.float16: 2e-3,  # the output has 11 bits
}
ROOM = 40
Operands = tuple[Tensor, Tensor, Tensor, Tensor]


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value; NaN counts as infinite."""
    difference = (actual.double().cpu() - expected).abs().max() / expected.abs().max()
    return float(difference.nan_to_num(torch.inf))


def draw(n: int, width: int = 4, channels: int = 5, dtype: torch.dtype = torch.float32, seed: int = 0) -> Operands:
    """Draw x as a part of a projection, a window, a weight and a bias."""
    rng = torch.Generator().manual_seed(seed)
    shapes = (2, n, channels + 4), (2, channels, width - 1), (channels, width), (channels,)
    projection, window, weight, bias = (torch.randn(shape, generator=rng).to(DEVICE, dtype) for shape in shapes)
    return projection[..., 3:-1], window, weight, bias


def draw_parents(n: int, seed: int = 0, padding: int = 0) -> Tensor:
    return oracles.random_parents(2, n, torch.Generator().manual_seed(seed), padding).to(DEVICE)


def oracle(
    x: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, parents: Tensor, silu: bool = True
) -> tuple[Tensor, list[list[Tensor]]]:
    """Run the loop over both sequences: outputs, and the window after every node."""
    rows = []
    for row in range(2):
        own = (x[row].cpu(), weight.cpu(), None if bias is None else bias.cpu())
        rows.append(oracles.conv(*own, parents[row].tolist(), window[row].cpu(), silu))
    return torch.stack([y for y, _ in rows]), [windows for _, windows in rows]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("width", "plain"), [(1, False), (3, True), (4, False)], ids=str)
def test_conv_follows_the_path_into_the_window(width: int, plain: bool, dtype: torch.dtype) -> None:
    x, window, weight, bias = draw(13, width, dtype=dtype)
    parents, taps = draw_parents(13, padding=1), None if plain else bias
    y = ops.tree_conv1d(x, weight, taps, parents, window, activation=None if plain else "silu", backend="triton")
    assert y.dtype == dtype and y.is_contiguous()
    assert error(y, oracle(x, window, weight, taps, parents, not plain)[0]) < TOLERANCE[dtype]


@given(st.integers(0, 10**6), st.integers(1, 36))
@settings(max_examples=5, deadline=None)
def test_conv_of_drawn_trees_follows_the_path(seed: int, n: int) -> None:
    x, window, weight, bias = draw(n, channels=67, seed=seed)
    parents, first = draw_parents(n, seed), seed % n
    y = ops.tree_conv1d(x, weight, bias, parents, window, first=first, backend="triton")
    assert error(y, oracle(x, window, weight, bias, parents)[0][:, first:]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("width", [1, 2, 4, 7], ids=lambda w: f"width{w}")
@pytest.mark.parametrize("ends", [(0, 11), (None, 5)], ids=str)
def test_commit_moves_the_accepted_rows_in_and_leaves_the_rest(width: int, ends: tuple[int | None, ...]) -> None:
    x, window, weight, bias = draw(13, width)
    parents, before = draw_parents(13), window.clone()
    windows = oracle(x, window, weight, bias, parents)[1]
    path, lengths = oracles.paths_to(parents.cpu(), ends)
    off = torch.ones(2, 13, dtype=torch.bool)
    for row, end in enumerate(ends):
        off[row, [] if end is None else oracles.path_to(parents[row].tolist(), end)] = False
    x = x.masked_fill(off.to(DEVICE)[..., None], torch.nan)
    ops.conv_commit(window, x, path.to(DEVICE), lengths.to(DEVICE), backend="triton")
    rows = [before[i].double().cpu() if end is None else windows[i][end] for i, end in enumerate(ends)]
    assert torch.equal(window.double().cpu(), torch.stack(rows))


@pytest.mark.parametrize("first", [0, 5], ids=lambda k: f"first{k}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
def test_step_commits_the_old_tree_then_convolves_the_new_one(first: int, dtype: torch.dtype) -> None:
    n = 21
    old, window, weight, bias = draw(n, dtype=dtype, seed=1)
    x, parents, old_parents = draw(n, dtype=dtype, seed=2)[0], draw_parents(n, 1, 2), draw_parents(n, 2)
    stash = torch.full((2, ROOM, 5), torch.nan, dtype=dtype, device=DEVICE)
    stash[:, :n] = old
    if first:
        stash[:, :first] = x[:, :first]
        old = torch.cat((x[:, :first], old[:, first:]), 1)
    ends = (20, None)
    before = window.clone()
    after = oracle(old, window, weight, bias, old_parents)[1][0][20]
    path, lengths = oracles.paths_to(old_parents.cpu(), ends)
    y = ops.conv_step(
        window, stash, path.to(DEVICE), lengths.to(DEVICE), x[:, first:], weight, bias, parents, first=first,
        backend="triton",
    )  # fmt: skip
    assert torch.equal(window[0].double().cpu(), after) and torch.equal(window[1], before[1])
    assert error(y, oracle(x, window, weight, bias, parents)[0][:, first:]) < TOLERANCE[dtype]
    assert torch.equal(stash[:, :n], x) and bool(stash[:, n:].isnan().all())


def test_step_without_a_path_or_a_window_stashes_and_convolves() -> None:
    for width in (1, 4):
        x, window, weight, _ = draw(9, width)
        parents, before = draw_parents(9), window.clone()
        stash = torch.full((2, ROOM, 5), torch.nan, device=DEVICE)
        path = None if width > 1 else torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
        lengths = None if path is None else path[:, 0] + 1
        y = ops.conv_step(window, stash, path, lengths, x, weight, None, parents, backend="triton")
        assert error(y, oracle(x, window, weight, None, parents)[0]) < TOLERANCE[torch.float32]
        assert torch.equal(window, before) and torch.equal(stash[:, :9], x)


def test_what_the_kernel_cannot_take_is_refused() -> None:
    x, window, weight, bias = draw(3)
    parents = draw_parents(3)
    with pytest.raises(TypeError, match="tree_conv1d with backend='triton' takes float32, bfloat16 or float16"):
        ops.tree_conv1d(x.double(), weight, bias, parents, window, backend="triton")
    with pytest.raises(ValueError, match="x must be contiguous in its last dimension, got strides"):
        ops.tree_conv1d(x.mT.contiguous().mT, weight, bias, parents, window, backend="triton")


def test_without_a_gpu_or_the_interpreter_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x, window, weight, bias = draw(3)
    if DEVICE == "cpu":
        with pytest.raises(RuntimeError, match="tree_conv1d with backend='triton' needs CUDA tensors, got a tensor on"):
            ops.tree_conv1d(x, weight, bias, draw_parents(3), window, backend="triton")
