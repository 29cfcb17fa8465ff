"""What changes from step to step tells no builds of a recurrence's kernel apart: no step compiles anew.

Run: TRITON_INTERPRET=1 python -m pytest tests/scripts/test_triton_builds.py
"""

# Operands travel as tuples of any length, which a type checker cannot count against a signature.
# mypy: disable-error-code="call-arg, arg-type, misc"

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from stree.kernels import ops
from stree.kernels.conv.kernel import conv_kernel
from stree.kernels.delta_rule.kernel import gated_delta_keep_kernel, gated_delta_kernel
from stree.kernels.diagonal.kernel import diagonal_kernel
from stree.kernels.mamba2.kernel import ssd_keep_kernel, ssd_kernel

BATCH, ROOM = 2, 32
T: Any = {"backend": "triton"}
# Three heads: rows of step sizes, decays and beta are no multiple of 16 wide, yet those of 32 nodes together are.
HEADS, DIM, WIDTH = 3, 16, 48
# (nodes, first new node, entries of the path): 1, a multiple of 16 and neither, with equal padded sizes.
STEPS = [(n, 0, m) for n in (17, 24, 32) for m in (1, 5, 16)] + [(n, k, 5) for n in (17, 24, 32) for k in (1, 3, 16)]


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(BATCH, *shape)


def run_ssd(n: int, rows: int, path: tuple[torch.Tensor, torch.Tensor], parents: torch.Tensor) -> None:
    channels = WIDTH + 2 * DIM
    ops.ssd_step(
        zeros(HEADS, DIM, DIM), zeros(ROOM, channels), zeros(ROOM, HEADS), *path, zeros(rows, channels),
        zeros(rows, HEADS), torch.zeros(HEADS), None, parents, headdim=DIM, ngroups=1, first=n - rows, **T,
    )  # fmt: skip


def run_conv(n: int, rows: int, path: tuple[torch.Tensor, torch.Tensor], parents: torch.Tensor) -> None:
    weight = torch.zeros(WIDTH, 4)
    ops.conv_step(
        zeros(WIDTH, 3),
        zeros(ROOM, WIDTH),
        *path,
        zeros(rows, WIDTH),
        weight,
        None,
        parents,
        first=n - rows,
        backend="triton",
    )


def run_delta(
    n: int, rows: int, path: tuple[torch.Tensor, torch.Tensor], parents: torch.Tensor, channels: tuple[int, ...] = ()
) -> None:
    vectors, decays = (zeros(rows, HEADS, DIM) for _ in range(3)), zeros(rows, HEADS, *channels)
    stash = (zeros(ROOM, HEADS, DIM), zeros(ROOM, HEADS, DIM), zeros(ROOM, HEADS, *channels))
    state = zeros(HEADS, DIM, DIM)
    ops.gated_delta_step(state, *stash, *path, *vectors, decays, zeros(rows, HEADS), parents, first=n - rows, **T)


def run_kda(n: int, rows: int, path: tuple[torch.Tensor, torch.Tensor], parents: torch.Tensor) -> None:
    run_delta(n, rows, path, parents, (DIM,))


def run_selective(n: int, rows: int, path: tuple[torch.Tensor, torch.Tensor], parents: torch.Tensor) -> None:
    ops.selective_step(
        zeros(WIDTH, DIM), zeros(ROOM, WIDTH), zeros(ROOM, WIDTH), zeros(ROOM, DIM), *path, zeros(rows, WIDTH),
        zeros(rows, WIDTH), torch.zeros(WIDTH, DIM), zeros(rows, DIM), zeros(rows, DIM), None, parents,
        first=n - rows, **T,
    )  # fmt: skip


def run_diagonal(n: int, rows: int, path: tuple[torch.Tensor, torch.Tensor], parents: torch.Tensor) -> None:
    state, stash = zeros(WIDTH), (zeros(ROOM, WIDTH), zeros(ROOM, WIDTH))
    ops.diagonal_step(state, *stash, *path, zeros(rows, WIDTH), zeros(rows, WIDTH), parents, first=n - rows, **T)


def binder(kernel: Any, freed: Any) -> Callable[..., Any]:
    """Give the function by which Triton finds the build of a launch, for a kernel with these arguments set free."""
    function = JITFunction(kernel.fn, do_not_specialize=freed)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind: Callable[..., Any] = create_function_from_signature(function.signature, function.params, backend)
    return bind


def builds(launches: list[tuple[Any, Any]], bind: Callable[..., Any]) -> dict[str, set[str]]:
    """Group the keys of launches by their compile-time constants and options."""
    found: dict[str, set[str]] = defaultdict(set)
    for args, kwargs in launches:
        found[str(kwargs)].add(str(bind(*args, **kwargs)[1]))
    return found


@pytest.mark.parametrize(
    ("run", "kernels"),
    [
        (run_ssd, (ssd_kernel, ssd_keep_kernel)),
        (run_conv, (conv_kernel,)),
        (run_delta, (gated_delta_kernel, gated_delta_keep_kernel)),
        (run_kda, (gated_delta_kernel, gated_delta_keep_kernel)),
        (run_selective, (diagonal_kernel,)),
        (run_diagonal, (diagonal_kernel,)),
    ],
)
def test_steps_of_equal_padded_sizes_share_a_build(
    run: Callable[..., None], kernels: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: dict[Any, list[tuple[Any, Any]]] = {kernel: [] for kernel in kernels}
    for kernel in kernels:
        place = launches[kernel]
        monkeypatch.setattr(
            kernel, "run", lambda *args, grid, warmup, place=place, **kwargs: place.append((args, kwargs))
        )
    for n, first, entries in STEPS:
        path = torch.zeros(BATCH, entries, dtype=torch.int32), torch.ones(BATCH, dtype=torch.int32)
        parents = torch.arange(-1, n - 1, dtype=torch.int32).expand(BATCH, -1)
        run(n, n - first, path, parents)
    for kernel in kernels:
        assert len(launches[kernel]) == len(STEPS)
        freed = kernel.kwargs["do_not_specialize"] if hasattr(kernel, "kwargs") else kernel.do_not_specialize
        shared = builds(launches[kernel], binder(kernel, freed))
        assert [len(keys) for keys in shared.values()] == [1] * len(shared)
        # The control: the same launches of a kernel with nothing set free.
        apart = builds(launches[kernel], binder(kernel, ()))
        assert len(apart) == len(shared) and max(len(keys) for keys in apart.values()) > 1
