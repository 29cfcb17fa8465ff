"""What changes from step to step tells no builds of a recurrence's kernel apart: no step compiles anew.

Run: TRITON_INTERPRET=1 python -m pytest tests/scripts/test_triton_builds.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from helpers.operation_families import CONV, DELTA, DIAGONAL, KDA, SELECTIVE, SSD
from helpers.operation_problem import Family, Problem, chain
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from stree.kernels.conv.kernel import conv_kernel
from stree.kernels.delta_rule.kernel import gated_delta_kernel
from stree.kernels.diagonal.kernel import diagonal_kernel
from stree.kernels.mamba2.ssd_kernel import ssd_kernel

ROOM = 32
# Three heads: rows of step sizes, decays and beta are no multiple of 16 wide, yet those of 32 nodes together are.
DELTA_SIZES: dict[str, Any] = {"key_heads": 3, "heads": 3, "dk": 16, "dv": 16}
CASES: list[tuple[Family, Any, dict[str, Any]]] = [
    (SSD, ssd_kernel, {"heads": 3, "groups": 1, "headdim": 16, "dstate": 16}),
    (CONV, conv_kernel, {"channels": 48}),
    (DELTA, gated_delta_kernel, DELTA_SIZES),
    (KDA, gated_delta_kernel, DELTA_SIZES),
    (SELECTIVE, diagonal_kernel, {"channels": 48, "dstate": 16}),
    (DIAGONAL, diagonal_kernel, {"channels": 48}),
]
# (nodes, first new node, entries of the path): 1, a multiple of 16 and neither, with equal padded sizes.
STEPS = [(n, 0, m) for n in (17, 24, 32) for m in (1, 5, 16)] + [(n, k, 5) for n in (17, 24, 32) for k in (1, 3, 16)]


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


@pytest.mark.parametrize(("family", "kernel", "sizes"), CASES, ids=[family.name for family, *_ in CASES])
def test_steps_of_equal_padded_sizes_share_a_build(
    family: Family, kernel: Any, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[tuple[Any, Any]] = []
    monkeypatch.setattr(kernel, "run", lambda *args, grid, warmup, **kwargs: launches.append((args, kwargs)))
    problem = Problem.draw(family, chain(ROOM, 2), dtype=torch.float32, **sizes)
    stash, previous = problem.stash(ROOM), tuple(problem.stash(ROOM).values())
    options: dict[str, Any] = {"previous": previous} if family.alternates else {}
    for n, first, entries in STEPS:
        path = problem.parents.new_zeros(2, entries)
        rows = problem.given | {name: problem.given[name][:, : n - first].clone() for name in family.rows}
        family.step(rows, stash, path, path[:, 0] + 1, chain(n, 2), first, backend="triton", **options)
    assert len(launches) == len(STEPS)
    freed = kernel.kwargs["do_not_specialize"] if hasattr(kernel, "kwargs") else kernel.do_not_specialize
    shared = builds(launches, binder(kernel, freed))
    assert [len(keys) for keys in shared.values()] == [1] * len(shared)
    # The control: the same launches of a kernel with nothing set free.
    apart = builds(launches, binder(kernel, ()))
    assert len(apart) == len(shared) and max(len(keys) for keys in apart.values()) > 1
