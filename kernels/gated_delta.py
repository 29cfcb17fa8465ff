"""The gated delta operations in Triton (gated DeltaNet, KDA): scan of a tree, fold of a path, and both in one pass.

One program owns some columns (dv) of one head of one sequence: it reads that part of the state once, folds the path,
stores it where there was something to fold, solves for u and scores the tree.  k and g are shared by programs, so when
new rows replace the rows of the path that is being folded, a second, small launch stashes them; a caller who alternates
between two stashes (`folded`) saves it.  `kernels/README.md` has the maths and the counted costs.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stree.kernels.gated_delta_kernels import gated_delta_keep_kernel, gated_delta_kernel
from stree.kernels.tiles import (
    MAX_DELTA_DIM,
    MAX_NODES,
    GatedDeltaTile,
    check_inner,
    check_kernel_dtypes,
    check_limit,
    interpreted,
)
from stree.kernels.topology import AcceptedPath, Topology

__all__ = ["gated_delta_commit", "gated_delta_step", "gated_delta_tree_scan"]

Path = Tensor | AcceptedPath
Rows = tuple[Tensor, Tensor, Tensor]  # k, u and g


def gated_delta_tree_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    parents: Tensor | Topology,
    state: Tensor,
    *,
    scale: float | None = None,
    first: int = 0,
    u: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Score a tree; see `stree.kernels.ops`."""
    _check_dtypes("gated_delta_tree_scan", q=q, k=k, v=v, g=g, beta=beta, u=u)
    batch, n, heads, dv = v.shape
    o = torch.empty(batch, n - first, heads, dv, dtype=v.dtype, device=v.device)
    solved = torch.empty(batch, n, heads, dv, dtype=torch.float32, device=v.device)
    _launch(
        "gated_delta_tree_scan", state, new=(q, k, v, g, beta), topology=Topology.cast(parents), o=o, u=solved,
        given=u, known=0 if u is None else first, scale=scale, first=first,
    )  # fmt: skip
    return o, solved


def gated_delta_commit(state: Tensor, k: Tensor, u: Tensor, g: Tensor, path: Path, path_lengths: Tensor | None) -> None:
    """Fold the accepted path into the state, in place; see `stree.kernels.ops`."""
    _check_dtypes("gated_delta_commit", k=k, u=u, g=g)
    _launch("gated_delta_commit", state, old=(k, u, g), accepted=AcceptedPath.cast(path, path_lengths))


def gated_delta_step(
    state: Tensor,
    stash_k: Tensor,
    stash_u: Tensor,
    stash_g: Tensor,
    path: Path | None,
    path_lengths: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    parents: Tensor | Topology,
    *,
    scale: float | None = None,
    first: int = 0,
    folded: Rows | None = None,
) -> Tensor:
    """Fold the last path, stash the new rows, score the new tree; see `stree.kernels.ops`."""
    _check_dtypes("gated_delta_step", q=q, k=k, v=v, g=g, beta=beta, stash_k=stash_k, stash_u=stash_u, stash_g=stash_g)
    batch, rows, heads, dv = v.shape
    o = torch.empty(batch, rows, heads, dv, dtype=v.dtype, device=v.device)
    old = accepted = None
    if path is not None:
        accepted = AcceptedPath.cast(path, path_lengths)
        old = (stash_k, stash_u, stash_g) if folded is None else folded
        _check_dtypes("gated_delta_step", **{f"folded[{i}]": rows for i, rows in enumerate(old)})
    in_place = path is not None and folded is None
    _launch(
        "gated_delta_step", state, old=old, accepted=accepted, new=(q, k, v, g, beta), topology=Topology.cast(parents),
        o=o, u=stash_u, given=stash_u, known=first, stash=(stash_k, stash_g), keep=not in_place, scale=scale,
        first=first,
    )  # fmt: skip
    if in_place:
        gated_delta_keep_kernel[(rows, batch)](
            k, g, stash_k, stash_g, first, k[0, 0].numel(), g[0, 0].numel(),
            *k.stride()[:2], *g.stride()[:2], *stash_k.stride()[:2], *stash_g.stride()[:2], BLOCK=512,
        )  # fmt: skip
    return o


def _check_dtypes(op: str, **tensors: Tensor | None) -> None:
    """Require dtypes that the kernels take; every tensor may have its own."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_kernel_dtypes(op, **{name: tensor})


def _launch(
    op: str,
    state: Tensor,
    *,
    old: Rows | None = None,
    accepted: AcceptedPath | None = None,
    new: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
    topology: Topology | None = None,
    o: Tensor | None = None,
    u: Tensor | None = None,
    given: Tensor | None = None,
    known: int = 0,
    stash: tuple[Tensor, Tensor] | None = None,
    keep: bool = False,
    scale: float | None = None,
    first: int = 0,
) -> None:
    """Launch the kernel for a fold (old and accepted), a scan (new, topology, o and u), or both."""
    batch, heads, dk, dv = state.shape
    check_limit(op, "a dk", dk, MAX_DELTA_DIM)
    check_limit(op, "a dv", dv, MAX_DELTA_DIM)
    check_inner("state", state, 3)
    n, path_size, bits, new_from = 1, 1, None, 0
    old_k = old_u = old_g = q = k = v = g = beta = stash_k = stash_g = None
    if old is not None:
        assert accepted is not None, "a fold needs the accepted path"
        old_k, old_u, old_g = old
        path_size = accepted.rows.shape[1]
        _check_rows({"k": old_k, "u": old_u, "g": old_g})
    if new is not None:
        assert topology is not None and u is not None, "a scan needs a topology and a place for u"
        q, k, v, g, beta = new
        n, bits = topology.parents.shape[1], topology.ancestor_bits()
        stash_k, stash_g = (k, g) if stash is None else stash
        new_from = 0 if stash is None else first
        _check_rows({"q": q, "k": k, "v": v, "g": g, "beta": beta})
        _check_rows({"stash_k": stash_k, "stash_g": stash_g, "u": u} | ({} if given is None else {"u": given}))
    check_limit(op, "trees of nodes", n, MAX_NODES)
    check_limit(op, "a path of nodes", path_size, MAX_NODES)
    keys, decays = (old_k, old_g) if k is None else (k, g)
    assert keys is not None and decays is not None, "a launch folds or scans"
    channels = decays.ndim == 4
    tile = GatedDeltaTile.of(n, path_size, dk, dv, channels)
    gated_delta_kernel[(-(-dv // tile.value), heads, batch)](
        state, bits, o, u, given, None if accepted is None else accepted.rows,
        None if accepted is None else accepted.lengths, old_k, old_u, old_g, q, k, v, g, beta, stash_k, stash_g,
        n, first, new_from, known, path_size, heads, dk**-0.5 if scale is None else float(scale),
        state.stride(0), *_strides(old_k), *_strides(old_u), *_strides(old_g), *_strides(q), *_strides(k),
        *_strides(v), *_strides(g), *_strides(beta), *_strides(stash_k), *_strides(stash_g), *_strides(u),
        *_strides(given),
        **gated_delta_constants(
            tile, dk, dv, heads // keys.shape[2], n, channels=channels, fold=old is not None, scan=new is not None,
            keep=keep, stashed=new_from > 0, known=known > 0,
            aligned=channels and g is not None and g.stride(0) % 16 == 0 == g.stride(1) % 16,
        ),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def gated_delta_constants(
    tile: GatedDeltaTile,
    dk: int,
    dv: int,
    shared: int,
    n: int,
    *,
    channels: bool,
    fold: bool,
    scan: bool,
    keep: bool,
    stashed: bool,
    known: bool,
    aligned: bool,
) -> dict[str, Any]:
    """List the compile-time constants of a build; ahead-of-time builds take theirs from here too."""
    return {
        "DK": dk, "DV": dv, "SHARED": shared, "NODES": tile.nodes, "PATH": tile.path, "BLOCK_K": tile.key,
        "BLOCK_V": tile.value, "WORDS": -(-n // 32), "CHANNELS": channels, "FOLD": fold, "SCAN": scan, "KEEP": keep,
        "STASHED": stashed, "KNOWN": known, "ALIGNED": aligned,
        "WIDE": interpreted(),  # the interpreter multiplies bfloat16 as if it were integers
        "EXACT": "tf32x3",
        "WINDOW": 64,  # e^64 and e^-64 leave float32 room for the factors and for the low parts of tf32x3
    }  # fmt: skip


def _check_rows(rows: dict[str, Tensor]) -> None:
    """Require that a node's row of every tensor is contiguous."""
    for name, tensor in rows.items():
        check_inner(name, tensor, tensor.ndim - 2)


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    """Take the strides over sequences and nodes; zeros for none."""
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))
