"""A second oracle from another project: mamba-ssm's one-token kernel, run along every path of a tree.

`selective_state_update` is Triton, so it runs interpreted on the CPU.  mamba-ssm is not a dependency of the tests;
`.ci/run` installs it without CUDA (pure Python, seconds) in a folder of its own and runs this file with that folder.

Run: PYTHONPATH=.venv/foreign .venv/bin/python -m pytest tests/adapters/test_foreign_oracle.py
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import oracles
from torch import Tensor

from stree.kernels import ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-5  # float32 on both sides; largest difference as a share of the largest value
CHAIN = [-1, 0, 1, 2, 3]
TREE = [-1, 0, 0, 1, 1, 2, 5]
TREES = pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
BACKENDS = pytest.mark.parametrize("backend", ["reference", "triton"])
Update = Callable[..., Tensor]


@pytest.fixture
def update(monkeypatch: pytest.MonkeyPatch) -> Update:
    """Return mamba-ssm's kernel; on a CPU its package imports CUDA modules that the kernel does not need."""
    if importlib.util.find_spec("mamba_ssm") is None:
        pytest.skip("mamba_ssm is not installed; .ci/run says how")
    if DEVICE == "cpu":
        for name in ("selective_scan_cuda", "causal_conv1d_cuda"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    module: Any = importlib.import_module("mamba_ssm.ops.triton.selective_state_update")
    kernel: Update = module.selective_state_update
    return kernel


def along_paths(
    token: Callable[[Tensor, int], Tensor], state: Tensor, parents: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """Run every path token by token; return the outputs and the state after each node."""
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    for node, parent in enumerate(parents):
        states.append((state if parent < 0 else states[parent]).clone())
        outputs.append(token(states[node], node))
    return torch.stack(outputs, 1), states


def error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).abs().max() / expected.abs().max()).nan_to_num(torch.inf))


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@TREES
@BACKENDS
@pytest.mark.parametrize(("channels", "dstate"), [(48, 16), (37, 6)], ids=str)
def test_selective_step_and_commit_agree_with_mamba_ssm_along_every_path(
    update: Update, channels: int, dstate: int, backend: ops.Backend, parents: list[int]
) -> None:
    n = len(parents)
    state, x, dt = draw(2, channels, dstate), draw(2, n, channels), draw(2, n, channels) - 1
    A, B, C = -draw(channels, dstate).exp(), draw(2, n, dstate), draw(2, n, dstate) * 0.7
    D, bias = draw(channels), draw(channels) * 0.5

    def token(after: Tensor, i: int) -> Tensor:
        return update(after, x[:, i], dt[:, i], A, B[:, i], C[:, i], D, dt_bias=bias, dt_softplus=True)

    expected, states = along_paths(token, state, parents)
    tree = torch.tensor([parents, parents], dtype=torch.int32, device=DEVICE)
    path, lengths = oracles.paths_to(tree, (n - 1, n - 1))
    stash = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(B)
    ours = state.clone()
    y = ops.selective_step(ours, *stash, None, None, x, dt, A, B, C, bias, tree, D=D, backend=backend)
    ops.selective_commit(ours, stash[0], stash[1], A, stash[2], path.to(DEVICE), lengths.to(DEVICE), backend=backend)
    assert error(y, expected) < TOLERANCE and error(ours, states[n - 1]) < TOLERANCE


@TREES
@BACKENDS
@pytest.mark.parametrize(("heads", "headdim", "dstate", "groups"), [(4, 16, 32, 1), (6, 12, 20, 2)], ids=str)
def test_ssd_step_and_commit_agree_with_mamba_ssm_along_every_path(
    update: Update, heads: int, headdim: int, dstate: int, groups: int, backend: ops.Backend, parents: list[int]
) -> None:
    n = len(parents)
    state, x = draw(2, heads, headdim, dstate), draw(2, n, heads, headdim)
    dt, A = draw(2, n, heads) - 1, -draw(heads).exp()
    B, C = draw(2, n, groups, dstate), draw(2, n, groups, dstate) * 0.7
    D, bias = draw(heads), draw(heads) * 0.5

    def spread(by_head: Tensor) -> Tensor:
        return by_head[..., None].expand(*by_head.shape, headdim)

    def token(after: Tensor, i: int) -> Tensor:
        return update(
            after, x[:, i], spread(dt[:, i]), spread(A)[..., None].expand(-1, -1, dstate), B[:, i], C[:, i], spread(D),
            dt_bias=spread(bias), dt_softplus=True,
        )  # fmt: skip

    expected, states = along_paths(token, state, parents)
    tree = torch.tensor([parents, parents], dtype=torch.int32, device=DEVICE)
    path, lengths = oracles.paths_to(tree, (n - 1, n - 1))
    rows = torch.cat((x.flatten(2), B.flatten(2), C.flatten(2)), 2)
    stash, ours = (torch.zeros_like(rows), torch.zeros_like(dt)), state.clone()
    y = ops.ssd_step(
        ours, *stash, None, None, rows, dt, A, bias, tree, headdim=headdim, ngroups=groups, D=D, backend=backend
    )
    ops.ssd_commit(ours, x, stash[1], A, B, path.to(DEVICE), lengths.to(DEVICE), backend=backend)
    assert error(y, expected) < TOLERANCE and error(ours, states[n - 1]) < TOLERANCE


def test_control_the_oracle_distinguishes_a_node_from_its_sibling(update: Update) -> None:
    state, x, dt, B = draw(1, 8, 4), draw(1, 7, 8), draw(1, 7, 8), draw(1, 7, 4)
    A, zero = -draw(8, 4).exp(), torch.zeros(8, device=DEVICE)

    def token(after: Tensor, i: int) -> Tensor:
        return update(after, x[:, i], dt[:, i], A, B[:, i], B[:, i], zero, dt_bias=zero, dt_softplus=True)

    def scan(parents: list[int]) -> Tensor:
        tree = torch.tensor([parents], dtype=torch.int32, device=DEVICE)
        return ops.selective_tree_scan(x, torch.nn.functional.softplus(dt), A, B, B, tree, state)

    expected, _ = along_paths(token, state, TREE)
    assert error(scan(TREE), expected) < TOLERANCE
    assert error(scan([-1, 0, 0, 1, 2, 2, 5]), expected) > 1e-2  # node 3 under the sibling of its parent
