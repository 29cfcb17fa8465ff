"""A Mamba-2 mixer in one launch or call against float64 loops over the nodes of two trees, the path between included.

Run: TRITON_INTERPRET=1 python -m pytest tests/operations/test_mamba2_step.py
"""

# Operands travel as tuples, which a type checker cannot count against a signature.
# mypy: disable-error-code="arg-type, misc"

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import oracles
from helpers.fast_cases import slow_unless
from helpers.operation_problem import DEVICE, TOLERANCE, error, mixed_parents, paths_to
from torch import Tensor

from stree.kernels import ops

LIMIT = (0.05, 1.5)
ENDS = None, 12  # of the paths that are committed between the trees: none in the chain


@dataclass(frozen=True)
class Layer:
    """A mixer's weights, its state, and the projected rows of two trees a sequence."""

    heads: int
    headdim: int
    groups: int
    dstate: int
    given: dict[str, Tensor]
    parents: tuple[Tensor, Tensor]
    backend: str = "triton"

    @classmethod
    def draw(
        cls, dtype: torch.dtype, heads: int = 2, headdim: int = 5, groups: int = 2, dstate: int = 7,
        backend: str = "triton",
    ) -> Layer:  # fmt: skip
        rng = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng).to(DEVICE)

        inner, parents = heads * headdim, (mixed_parents(13)[::2], mixed_parents(11, 2)[::2])
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        channels, batch = inner + 2 * groups * dstate, len(parents[0])
        given = {
            "window": normal(batch, channels, 3).to(dtype), "state": normal(batch, heads, headdim, dstate).to(wide),
            "weight": normal(channels, 4).to(dtype), "conv_bias": normal(channels).to(dtype),
            "A": -normal(heads).abs() * 2, "bias": normal(heads) - 1, "D": normal(heads),
            "norm": normal(inner).to(dtype),
        }  # fmt: skip
        for tree, nodes in enumerate((13, 11)):
            given[f"rows{tree}"] = normal(batch, nodes, inner + channels + heads).to(dtype)
        return cls(heads, headdim, groups, dstate, given, (parents[0].to(DEVICE), parents[1].to(DEVICE)), backend)

    @property
    def sizes(self) -> list[int]:
        inner = self.heads * self.headdim
        return [inner, inner + 2 * self.groups * self.dstate, self.heads]

    def stashes(self) -> list[Tensor]:
        """Room for 13 nodes, of NaN: before and after the convolution, and step sizes."""
        window, (_, channels, heads) = self.given["window"], self.sizes
        rows = [window.new_full((len(window), 13, channels), torch.nan) for _ in range(2)]
        return [*rows, self.given["state"].new_full((len(window), 13, heads), torch.nan)]

    def step(self, tree: int, stashes: list[Tensor], path: Any, first: int, n: int, **options: Any) -> Any:
        gate, xbc, dt = self.given[f"rows{tree}"][:, first:n].split(self.sizes, -1)
        i, is_gated = self.given, options.pop("is_gated", True)
        return ops.mamba2_step(
            i["window"], stashes[0], i["weight"], i["conv_bias"], i["state"], *stashes[1:], *path, xbc, dt, i["A"],
            i["bias"], options.pop("parents", self.parents[tree])[:, :n].contiguous(), headdim=self.headdim,
            ngroups=self.groups, D=i["D"], dt_limit=LIMIT, first=first, gating=(gate, i["norm"]) if is_gated else None,
            backend=self.backend, **options,
        )  # fmt: skip

    def expected(self, row: int, is_gated: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs of the second tree, sums of squares of its rows, and the state behind the path."""
        i = {
            name: t[row].cpu() if name.startswith(("window", "state", "rows")) else t.cpu()
            for name, t in self.given.items()
        }
        window, state = i["window"], i["state"]
        for tree, end in enumerate((ENDS[row], None)):
            gate, xbc, dt = i[f"rows{tree}"].split(self.sizes, -1)
            parents, kind = self.parents[tree][row].tolist(), xbc.dtype
            mixed, windows = oracles.conv(xbc, i["weight"], i["conv_bias"], parents, window, silu=True)
            x, B, C = mixed.to(kind).split([self.sizes[0], *[self.groups * self.dstate] * 2], -1)
            steps = F.softplus(dt.double() + i["bias"].double()).clamp(*LIMIT)
            y, states = oracles.ssd(
                x.unflatten(-1, (self.heads, -1)), steps, i["A"], B.unflatten(-1, (self.groups, -1)),
                C.unflatten(-1, (self.groups, -1)), parents, state, i["D"],
            )  # fmt: skip
            before = state
            if end is not None:
                window, state = windows[end], states[end]
        flat = y.flatten(1)
        gated = flat * F.silu(gate.double())
        return gated * i["norm"].double() if is_gated else flat, gated.square().sum(-1), before


TILES = {"headdim": 70, "groups": 1, "dstate": 36}  # several of them


@pytest.mark.parametrize(
    ("backend", "dtype", "is_gated", "sizes"),
    slow_unless(
        lambda backend, dtype, _, sizes: backend == "auto" or (dtype == torch.float32 and not sizes),
        [
            ("triton", torch.float32, True, {}), ("triton", torch.bfloat16, False, {}),
            ("triton", torch.float32, True, TILES), ("auto", torch.float64, False, {}),
            ("auto", torch.float32, False, TILES), ("auto", torch.float32, True, {}),
        ],
        in_ci=lambda _, __, ___, sizes: not sizes,
    ),
    ids=str,
)  # fmt: skip
def test_a_mixer_in_one_call_equals_loops_over_nodes(
    backend: str, dtype: torch.dtype, is_gated: bool, sizes: dict[str, int]
) -> None:
    layer, tolerance = Layer.draw(dtype, backend=backend, **sizes), TOLERANCE.get(dtype, 1e-12)
    i, stashes, path = layer.given, layer.stashes(), paths_to(layer.parents[0], ENDS)
    y, squares, state = map(torch.stack, zip(*(layer.expected(row, is_gated) for row in range(2)), strict=True))
    layer.step(0, stashes, (None, None), 0, 13, is_gated=is_gated)
    ops.conv_commit(i["window"], stashes[0], *path, backend=backend)
    window, previous = i["window"].clone(), (stashes[1].clone(), stashes[2].clone())
    pieces = [
        layer.step(1, stashes, path, 0, 4, previous=previous, is_gated=is_gated),
        layer.step(1, stashes, (None, None), 4, 11, is_gated=is_gated),
    ]
    found = torch.cat([piece[0] for piece in pieces], 1)
    assert found.dtype == dtype and error(found.flatten(2), y) < tolerance
    assert error(i["state"], state) < tolerance and torch.equal(i["window"], window)
    if is_gated:
        assert error(torch.cat([piece[1] for piece in pieces], 1).sum(-1).sqrt(), squares.sqrt()) < tolerance
    assert torch.equal(stashes[0][:, :11], i["rows1"].split(layer.sizes, -1)[1])
    # The same comparison refuses a tree that is read as a chain, and a window without the path.
    chain = torch.arange(-1, 10, dtype=torch.int32, device=DEVICE).expand(2, -1)
    wrong = layer.step(1, layer.stashes(), (None, None), 0, 5, parents=chain, is_gated=is_gated)[0]
    assert error(wrong.flatten(2), y[:, :5]) > 0.1
    i["window"].copy_(Layer.draw(dtype, **sizes).given["window"])
    wrong = layer.step(1, layer.stashes(), (None, None), 0, 1, is_gated=is_gated)[0]
    assert error(wrong.flatten(2)[1], y[1, :1]) > 0.1


def test_what_a_mixer_in_one_launch_cannot_take_is_refused_before_it_writes() -> None:
    layer = Layer.draw(torch.float32)
    stashes = layer.stashes()
    chain = torch.arange(-1, 12, dtype=torch.int32, device=DEVICE).expand(2, -1)
    before = [rows.clone() for rows in stashes]
    i = layer.given
    i["rows0"] = F.pad(i["rows0"], (0, 0, 0, 5))
    with pytest.raises(ValueError, match=r"mamba2_step needs that n <= N, got n = 18"):
        layer.step(0, stashes, (None, None), 0, 18, parents=F.pad(chain, (0, 5), value=12))
    wide = [F.pad(rows, (0, 0, 0, 5)) for rows in stashes]
    with pytest.raises(
        NotImplementedError, match="mamba2_step with backend='triton' takes trees of nodes up to 16, got 18"
    ):
        layer.step(0, wide, (None, None), 0, 18, parents=F.pad(chain, (0, 5), value=12))
    gate, xbc, dt = i["rows1"].split(layer.sizes, -1)
    with pytest.raises(ValueError, match=r"gate must have the strides of xbc, \(.*\), got \(.*\)"):
        ops.mamba2_step(
            i["window"], stashes[0], i["weight"], None, i["state"], *stashes[1:], None, None, xbc, dt, i["A"], None,
            layer.parents[1], headdim=layer.headdim, ngroups=layer.groups, gating=(gate.contiguous(), i["norm"]),
            backend="triton",
        )  # fmt: skip
    assert all(torch.equal(rows.nan_to_num(9), old.nan_to_num(9)) for rows, old in zip(stashes, before, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="numba's code runs on the CPU")
@pytest.mark.parametrize("change", ["left out", "bfloat16", "strided", "one row"])
def test_a_cpu_takes_what_the_reference_takes(change: str) -> None:
    layer = Layer.draw(torch.float32, backend="auto")
    i, stashes = layer.given, [rows.nan_to_num(0) for rows in layer.stashes()]
    if change == "left out":
        i |= dict.fromkeys(("conv_bias", "bias", "D"))
    elif change == "bfloat16":
        i |= {name: i[name].bfloat16() for name in ("weight", "A", "D", "rows0")}
    elif change == "strided":
        i["state"] = i["state"].transpose(2, 3).contiguous().transpose(2, 3)
        i["rows0"] = i["rows0"].transpose(1, 2).contiguous().transpose(1, 2)
    pieces = ((0, 1), (1, 2)) if change == "one row" else ((0, 13),)
    found = {}
    for backend in ("auto", "reference"):
        own, written = replace(layer, backend=backend), [rows.clone() for rows in stashes]
        found[backend] = [own.step(0, written, (None, None), *piece, is_gated=False)[0] for piece in pieces] + written
    assert all(error(mine, other) < 5e-6 for mine, other in zip(found["auto"], found["reference"], strict=True))
