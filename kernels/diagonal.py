"""The diagonal recurrences in Triton (Mamba-1, RG-LRU): scan of a tree, fold of a path, and both in one pass.

One program owns a block of channels of one sequence, with all their states.  It folds the path, stores the state where
there was something to fold, and visits the nodes depth first with the few states that wait in registers
(`stree.kernels.walk`).  Channels do not meet, so a program may overwrite the rows of x and of the step sizes that it
has folded.  B is read by all programs: when its new rows replace those of the path that is being folded, they are
copied after the launch; a caller who alternates between two stashes (`folded`) saves the copy.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stree.kernels.diagonal_kernels import diagonal_kernel
from stree.kernels.tiles import (
    MAX_DSTATE,
    MAX_NODES,
    DiagonalTile,
    check_inner,
    check_kernel_dtypes,
    check_limit,
)
from stree.kernels.topology import AcceptedPath, Topology

__all__ = [
    "diagonal_commit",
    "diagonal_step",
    "diagonal_tree_scan",
    "selective_commit",
    "selective_step",
    "selective_tree_scan",
]

Path = Tensor | AcceptedPath
Rows = tuple[Tensor, Tensor, Tensor | None]  # x, step sizes or log decays, and B where there is one


def selective_tree_scan(
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
    check_kernel_dtypes("selective_tree_scan", x=x, B=B, C=C)
    y = torch.empty(x.shape[0], x.shape[1] - first, x.shape[2], dtype=x.dtype, device=x.device)
    topology = Topology.cast(parents)
    _launch("selective_tree_scan", state, A, new=(x, dt, B), C=C, topology=topology, y=y, D=D, first=first)
    return y


def selective_commit(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, path: Path, path_lengths: Tensor | None
) -> None:
    """Fold the accepted path into the state, in place; see `stree.kernels.ops`."""
    check_kernel_dtypes("selective_commit", x=x, B=B)
    _launch("selective_commit", state, A, old=(x, dt, B), accepted=AcceptedPath.cast(path, path_lengths))


def selective_step(
    state: Tensor,
    stash_x: Tensor,
    stash_dt: Tensor,
    stash_B: Tensor,
    path: Path | None,
    path_lengths: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    dt_bias: Tensor | None,
    parents: Tensor | Topology,
    *,
    D: Tensor | None = None,
    first: int = 0,
    folded: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Fold the last path, stash the new rows, score the new tree; see `stree.kernels.ops`."""
    check_kernel_dtypes("selective_step", x=x, B=B, C=C, stash_x=stash_x, stash_B=stash_B)
    topology = Topology.cast(parents)
    y = torch.empty(x.shape, dtype=stash_x.dtype, device=x.device)
    old = accepted = None
    if path is not None:
        accepted = AcceptedPath.cast(path, path_lengths)
        old = (stash_x, stash_dt, stash_B) if folded is None else folded
        check_kernel_dtypes("selective_step", x=x, old_x=old[0], old_B=old[2])
    in_place = path is not None and folded is None
    _launch(
        "selective_step", state, A, old=old, accepted=accepted, new=(x, dt, B), C=C, topology=topology, y=y, D=D,
        bias=dt_bias, stash=(stash_x, stash_dt, stash_B), keep_shared=not in_place, first=first,
    )  # fmt: skip
    if in_place:
        stash_B[:, first : first + B.shape[1]].copy_(B)
    return y


def diagonal_tree_scan(
    log_a: Tensor, x: Tensor, parents: Tensor | Topology, state: Tensor, *, first: int = 0
) -> Tensor:
    """Score a tree; see `stree.kernels.ops`."""
    check_kernel_dtypes("diagonal_tree_scan", x=x)
    y = torch.empty(x.shape[0], x.shape[1] - first, x.shape[2], dtype=x.dtype, device=x.device)
    _launch("diagonal_tree_scan", state, new=(x, log_a, None), topology=Topology.cast(parents), y=y, first=first)
    return y


def diagonal_commit(state: Tensor, log_a: Tensor, x: Tensor, path: Path, path_lengths: Tensor | None) -> None:
    """Fold the accepted path into the state, in place; see `stree.kernels.ops`."""
    check_kernel_dtypes("diagonal_commit", x=x)
    _launch("diagonal_commit", state, old=(x, log_a, None), accepted=AcceptedPath.cast(path, path_lengths))


def diagonal_step(
    state: Tensor,
    stash_log_a: Tensor,
    stash_x: Tensor,
    path: Path | None,
    path_lengths: Tensor | None,
    log_a: Tensor,
    x: Tensor,
    parents: Tensor | Topology,
    *,
    first: int = 0,
) -> Tensor:
    """Fold the last path, stash the new rows, score the new tree; see `stree.kernels.ops`."""
    check_kernel_dtypes("diagonal_step", x=x, stash_x=stash_x)
    y = torch.empty(x.shape, dtype=stash_x.dtype, device=x.device)
    stash = (stash_x, stash_log_a, None)
    _launch(
        "diagonal_step", state, old=None if path is None else stash,
        accepted=None if path is None else AcceptedPath.cast(path, path_lengths),
        new=(x, log_a, None), topology=Topology.cast(parents), y=y, stash=stash, first=first,
    )  # fmt: skip
    return y


def _launch(
    op: str,
    state: Tensor,
    A: Tensor | None = None,
    *,
    old: Rows | None = None,
    accepted: AcceptedPath | None = None,
    new: Rows | None = None,
    C: Tensor | None = None,
    topology: Topology | None = None,
    y: Tensor | None = None,
    D: Tensor | None = None,
    bias: Tensor | None = None,
    stash: Rows | None = None,
    keep_shared: bool = False,
    first: int = 0,
) -> None:
    """Launch the kernel for a fold (old and accepted), a scan (new, topology and y), or both."""
    batch, channels = state.shape[:2]
    dstate = 1 if A is None else state.shape[2]
    check_limit(op, "a dstate", dstate, MAX_DSTATE)
    check_inner("state", state, state.ndim - 1)
    for name, tensor, dims in (("A", A, 2), ("D", D, 1), ("dt_bias", bias, 1), ("C", C, 1)):
        if tensor is not None:
            check_inner(name, tensor, dims)
    n, path_size, walk = 1, 1, None
    if old is not None:
        assert accepted is not None, "a fold needs the accepted path"
        path_size = accepted.rows.shape[1]
    if new is not None:
        assert topology is not None, "a scan needs a topology"
        n, walk = topology.parents.shape[1], topology.depth_first_walk()
    check_limit(op, "trees of nodes", n, MAX_NODES)
    check_limit(op, "a path of nodes", path_size, MAX_NODES)
    tile = DiagonalTile.of(n, dstate, batch * channels)
    new_from = first if stash is not None else 0
    old_x, old_step, old_B = _checked(old)
    x, step, B = _checked(new)
    stash_x, stash_step, stash_B = _checked(stash)
    diagonal_kernel[(-(-channels // tile.channels), batch)](
        state, A, bias, D, walk, y,
        None if accepted is None else accepted.rows, None if accepted is None else accepted.lengths,
        old_step, old_x, old_B, step, x, B, C, stash_step, stash_x, stash_B,
        n, first, new_from, path_size, channels,
        state.stride(0), A.stride(0) if A is not None and A.ndim == 3 else 0,
        *_strides(old_step), *_strides(old_x), *_strides(old_B),
        *_strides(step), *_strides(x), *_strides(B), *_strides(C),
        *_strides(stash_step), *_strides(stash_x), *_strides(stash_B),
        **diagonal_constants(
            tile, dstate, selective=A is not None, fold=old is not None, scan=new is not None,
            keep=stash is not None, keep_shared=keep_shared, known=new_from > 0,
        ),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def diagonal_constants(
    tile: DiagonalTile,
    dstate: int,
    *,
    selective: bool,
    fold: bool,
    scan: bool,
    keep: bool,
    keep_shared: bool,
    known: bool,
) -> dict[str, Any]:
    """List the compile-time constants of a build; ahead-of-time builds take theirs from here too."""
    return {
        "DSTATE": dstate, "BLOCK_C": tile.channels, "BLOCK_S": tile.dstate, "BLOCK_N": tile.nodes,
        "AHEAD": tile.ahead, "SLOTS": tile.slots, "SELECTIVE": selective, "FOLD": fold, "SCAN": scan, "KEEP": keep,
        "KEEP_SHARED": keep and keep_shared and selective, "KNOWN": known,
    }  # fmt: skip


def _checked(rows: Rows | None) -> Rows | tuple[None, None, None]:
    """Require that every row is contiguous."""
    if rows is None:
        return None, None, None
    for name, tensor in zip(("x", "dt or log_a", "B"), rows, strict=True):
        if tensor is not None:
            check_inner(name, tensor)
    return rows


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    """Take the strides over batch and nodes; zeros for none."""
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))
