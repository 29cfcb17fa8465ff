"""The Mamba-2 operations in Triton: scan of a tree, fold of a path, and both in one pass over the state.

One program owns a block of headdim of one head of one sequence: it reads that part of the state once, folds the path,
stores it where there was something to fold, and scores the tree.  B, C and the step sizes are shared by programs, so
when new rows replace the rows of the path that is being folded, a second, small launch stashes them; a caller who
alternates between two stashes (`folded`) saves it.  `kernels/README.md` has the maths and the counted costs.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stree.kernels.ssd_kernels import ssd_keep_kernel, ssd_kernel
from stree.kernels.tiles import (
    MAX_DSTATE,
    MAX_HEADDIM,
    MAX_NODES,
    SsdTile,
    check_inner,
    check_kernel_dtypes,
    check_limit,
    interpreted,
)
from stree.kernels.topology import AcceptedPath, Topology

__all__ = ["ssd_commit", "ssd_step", "ssd_tree_scan"]

Path = Tensor | AcceptedPath
_UNBOUNDED = (0.0, float("inf"))


def ssd_tree_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    parents: Tensor | Topology,
    state: Tensor,
    *,
    D: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Score a tree; see `stree.kernels.ops`."""
    batch, n, heads, headdim = x.shape
    check_kernel_dtypes("ssd_tree_scan", x=x, B=B, C=C)
    y = torch.empty(batch, n - first, heads, headdim, dtype=x.dtype, device=x.device)
    topology = Topology.cast(parents)
    _launch("ssd_tree_scan", state, A, new=(x, dt, B, C), topology=topology, y=y, D=D, first=first)
    return y


def ssd_commit(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, path: Path, path_lengths: Tensor | None
) -> None:
    """Fold the accepted path into the state, in place; see `stree.kernels.ops`."""
    check_kernel_dtypes("ssd_commit", x=x, B=B)
    _launch("ssd_commit", state, A, old=(x, dt, B), accepted=AcceptedPath.cast(path, path_lengths))


def ssd_step(
    state: Tensor,
    stash_xbc: Tensor,
    stash_dt: Tensor,
    path: Path | None,
    path_lengths: Tensor | None,
    xbc: Tensor,
    dt: Tensor,
    A: Tensor,
    dt_bias: Tensor | None,
    parents: Tensor | Topology,
    *,
    headdim: int,
    ngroups: int,
    D: Tensor | None = None,
    dt_limit: tuple[float, float] = _UNBOUNDED,
    first: int = 0,
    folded: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Fold the last path, stash the new rows, score the new tree; see `stree.kernels.ops`."""
    check_kernel_dtypes("ssd_step", xbc=xbc, stash_xbc=stash_xbc)
    topology = Topology.cast(parents)
    (batch, rows, width), heads = xbc.shape, A.shape[0]
    y = torch.empty(batch, rows, heads, headdim, dtype=stash_xbc.dtype, device=xbc.device)
    x, B, C = _split_xbc(xbc, heads, headdim, ngroups)
    old = accepted = None
    if path is not None:
        accepted = AcceptedPath.cast(path, path_lengths)
        old_xbc, old_dt = folded if folded is not None else (stash_xbc, stash_dt)
        check_kernel_dtypes("ssd_step", xbc=xbc, folded=old_xbc)
        old_x, old_B, _ = _split_xbc(old_xbc, heads, headdim, ngroups)
        old = (old_x, old_dt, old_B)
    in_place = path is not None and folded is None
    _launch(
        "ssd_step", state, A, old=old, accepted=accepted, new=(x, dt, B, C), topology=topology, y=y, D=D,
        bias=dt_bias, limit=dt_limit, stash=(stash_xbc, stash_dt), keep_shared=not in_place, first=first,
    )  # fmt: skip
    if in_place:
        inner = heads * headdim
        ssd_keep_kernel[(rows, batch)](
            xbc, dt, dt_bias, stash_xbc, stash_dt, first, heads, inner, width - inner, *map(float, dt_limit),
            *xbc.stride()[:2], *dt.stride()[:2], *stash_xbc.stride()[:2], stash_dt.stride(0), BLOCK=512,
        )  # fmt: skip
    return y


def _split_xbc(xbc: Tensor, heads: int, headdim: int, ngroups: int) -> tuple[Tensor, Tensor, Tensor]:
    """View the channels after the convolution as x[b, n, h, p], B[b, n, g, s] and C[b, n, g, s]."""
    check_inner("xbc", xbc)
    inner = heads * headdim
    span = (xbc.shape[2] - inner) // 2
    x, B, C = xbc.split((inner, span, span), 2)
    return x.unflatten(2, (heads, headdim)), B.unflatten(2, (ngroups, -1)), C.unflatten(2, (ngroups, -1))


def _launch(
    op: str,
    state: Tensor,
    A: Tensor,
    *,
    old: tuple[Tensor, Tensor, Tensor] | None = None,
    accepted: AcceptedPath | None = None,
    new: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    topology: Topology | None = None,
    y: Tensor | None = None,
    D: Tensor | None = None,
    bias: Tensor | None = None,
    limit: tuple[float, float] = _UNBOUNDED,
    stash: tuple[Tensor, Tensor] | None = None,
    keep_shared: bool = False,
    first: int = 0,
) -> None:
    """Launch the kernel for a fold (old and accepted), a scan (new, topology and y), or both."""
    batch, heads, headdim, dstate = state.shape
    check_limit(op, "a headdim", headdim, MAX_HEADDIM)
    check_limit(op, "a dstate", dstate, MAX_DSTATE)
    check_inner("state", state, 3)
    for name, tensor in (("A", A), ("D", D), ("dt_bias", bias)):
        if tensor is not None:
            check_inner(name, tensor)
    groups, n, path_size = 1, 1, 1
    old_x = old_dt = old_B = x = dt = B = C = None
    bits = stash_xbc = stash_dt = None
    if old is not None:
        assert accepted is not None, "a fold needs the accepted path"
        old_x, old_dt, old_B = old
        _check_rows(old_x, old_dt, old_B)
        groups, path_size = old_B.shape[2], accepted.rows.shape[1]
    if new is not None:
        assert topology is not None, "a scan needs a topology"
        x, dt, B, C = new
        _check_rows(x, dt, B, C)
        groups, n, bits = B.shape[2], topology.parents.shape[1], topology.ancestor_bits()
    if stash is not None:
        stash_xbc, stash_dt = stash
        check_inner("stash_xbc", stash_xbc)
        check_inner("stash_dt", stash_dt, 2)
    check_limit(op, "trees of nodes", n, MAX_NODES)
    check_limit(op, "a path of nodes", path_size, MAX_NODES)
    rows = x if x is not None else old_x
    assert rows is not None, "a launch folds or scans"
    tile = SsdTile.of(n, n - first, path_size, headdim, dstate, rows.dtype)
    new_from = first if stash is not None else 0
    low, high = map(float, limit)
    ssd_kernel[(-(-headdim // tile.headdim), heads, batch)](
        state, A, bias, D, bits, y,
        None if accepted is None else accepted.rows, None if accepted is None else accepted.lengths,
        old_x, old_dt, old_B, x, dt, B, C, stash_xbc, stash_dt,
        n, first, new_from, path_size, heads, low, high,
        state.stride(0), A.stride(0) if A.ndim == 2 else 0,
        *_strides(old_x, 3), *_strides(old_dt, 2), *_strides(old_B, 2),
        *_strides(x, 3), *_strides(dt, 2), *_strides(B, 2), *_strides(C, 2),
        *_strides(stash_xbc, 2), *_strides(stash_dt, 1),
        **ssd_constants(
            tile, headdim, dstate, heads // groups, n, fold=old is not None, scan=new is not None,
            keep=stash is not None, keep_shared=keep_shared, known=new_from > 0,
            dtype=rows.dtype,
        ),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def ssd_constants(
    tile: SsdTile,
    headdim: int,
    dstate: int,
    shared: int,
    n: int,
    *,
    fold: bool,
    scan: bool,
    keep: bool,
    keep_shared: bool,
    known: bool,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """List the compile-time constants of a build; ahead-of-time builds take theirs from here too."""
    return {
        "HEADDIM": headdim, "DSTATE": dstate, "SHARED": shared,
        "NODES": tile.nodes, "ROWS": tile.rows, "PATH": tile.path, "BLOCK_P": tile.headdim, "BLOCK_S": tile.dstate,
        "WORDS": -(-n // 32), "FOLD": fold, "SCAN": scan, "KEEP": keep, "KEEP_SHARED": keep and keep_shared,
        "KNOWN": known, "SOFTPLUS": keep,
        "WIDE": interpreted(),  # the interpreter multiplies bfloat16 as if it were integers
        "EXACT": "tf32x3",
        # 16-bit values are exact in TF32 and weights lose less than the outputs' own rounding.
        "MIXED": "tf32x3" if dtype == torch.float32 else "tf32",
    }  # fmt: skip


def _check_rows(x: Tensor, dt: Tensor, *keys: Tensor) -> None:
    """Require that a row of a head, of a group and of step sizes is contiguous."""
    check_inner("x", x)
    check_inner("dt", dt)
    for name, tensor in zip("BC", keys, strict=False):
        check_inner(name, tensor, 2)


def _strides(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    """Take the first strides of a tensor; zeros for none."""
    return (0,) * count if tensor is None else tensor.stride()[:count]
