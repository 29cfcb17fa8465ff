"""The Mamba-2 operations in Triton: scan of a tree, commit of a path, and both in one pass over the state.

A path is committed in the launch that stashes new rows only from another stash (`previous`); without one the commit is
a launch of its own.  `docs/maths.md` has the maths, `docs/gpu.md` the counted costs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stree.kernels.dispatch import Operands
from stree.kernels.launch import path_operands, strides
from stree.kernels.mamba2.ssd_kernel import ssd_kernel
from stree.kernels.tiles import (
    MAX_DSTATE,
    MAX_HEADDIM,
    MAX_MIXER_NODES,
    MAX_NODES,
    SsdTile,
    check_inner,
    check_kernel_dtypes,
    check_limit,
    interpreted,
    padded,
)
from stree.kernels.topology import AcceptedPath

__all__ = ["mamba2_step", "ssd_commit", "ssd_step", "ssd_tree_scan"]


def ssd_tree_scan(a: Operands) -> Tensor:
    """Score a tree; see `stree.kernels.ops`."""
    check_kernel_dtypes("ssd_tree_scan", x=a.x, B=a.B, C=a.C)
    batch, n, heads, headdim = a.x.shape
    y = torch.empty(batch, n - a.first, heads, headdim, dtype=a.x.dtype, device=a.x.device)
    _launch("ssd_tree_scan", a.state, a.A, scan=a, new=(a.x, a.dt, a.B, a.C), y=y)
    return y


def ssd_commit(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, accepted: AcceptedPath) -> None:
    """Commit the accepted path to the state, in place; see `stree.kernels.ops`."""
    check_kernel_dtypes("ssd_commit", x=x, B=B)
    _launch("ssd_commit", state, A, accepted=accepted, old=(x, dt, B))


def ssd_step(a: Operands) -> Tensor:
    """Commit the last path, stash the new rows, score the new tree; see `stree.kernels.ops`."""
    check_kernel_dtypes("ssd_step", xbc=a.xbc, stash_xbc=a.stash_xbc)
    return _step("ssd_step", a)


def mamba2_step(a: Operands) -> tuple[Tensor, Tensor | None]:
    """Convolve, do what `ssd_step` does, and gate; see `stree.kernels.ops`."""
    check_kernel_dtypes("mamba2_step", xbc=a.xbc)
    check_kernel_dtypes("mamba2_step", stash_xbc=a.stash_xbc, stash_conv=a.stash_conv, window=a.window)
    check_limit("mamba2_step", "trees of nodes", a.topology.num_nodes, MAX_MIXER_NODES)
    check_inner("window", a.window, 2)
    check_inner("weight", a.weight, 2)
    check_inner("stash_conv", a.stash_conv)
    if a.gating is None:
        return _step("mamba2_step", a, mixer=a), None
    gate, norm_weight = a.gating
    check_kernel_dtypes("mamba2_step", xbc=a.xbc, gate=gate)
    check_inner("the norm's weight", norm_weight)
    if gate.stride() != a.xbc.stride():
        raise ValueError(f"gate must have the strides of xbc, {a.xbc.stride()}, got {gate.stride()}")
    blocks = -(-a.headdim // SsdTile.of(1, 1, 1, a.headdim, 1, a.xbc.dtype).headdim)
    squares = a.state.new_empty(*a.xbc.shape[:2], a.A.shape[0] * blocks)
    return _step("mamba2_step", a, mixer=a, squares=squares), squares


def _step(op: str, a: Operands, mixer: Operands | None = None, squares: Tensor | None = None) -> Tensor:
    """Launch a step, behind a launch of its own for a path that is in the stash that the step writes."""
    (batch, rows, _), heads, accepted, old = a.xbc.shape, a.A.shape[0], a.accepted, None
    if accepted is not None:
        old_xbc, old_dt = a.previous or (a.stash_xbc, a.stash_dt)
        check_kernel_dtypes(op, stash_xbc=a.stash_xbc, previous=old_xbc)
        x, B, _ = _split_xbc(old_xbc, heads, a.headdim, a.ngroups)
        old = (x, old_dt, B)
        if a.previous is None:
            _launch(op, a.state, a.A, accepted=accepted, old=old)
            accepted = old = None
    x, B, C = _split_xbc(a.xbc, heads, a.headdim, a.ngroups)
    y = torch.empty(batch, rows, heads, a.headdim, dtype=a.stash_xbc.dtype, device=a.xbc.device)
    _launch(
        op, a.state, a.A, accepted=accepted, old=old, scan=a, new=(x, a.dt, B, C), stash=(a.stash_xbc, a.stash_dt), y=y,
        mixer=mixer, squares=squares,
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
    op: str, state: Tensor, A: Tensor, *, accepted: AcceptedPath | None = None, old: tuple[Tensor, ...] | None = None,
    scan: Operands | None = None, new: tuple[Tensor, ...] | None = None,
    stash: tuple[Tensor, Tensor] | None = None, y: Tensor | None = None, mixer: Operands | None = None,
    squares: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch the kernel for a commit (accepted, old x, dt, B), a scan (its operands, new x, dt, B, C, y), or both.

    With the operands of a mixer x, B and C are not convolved yet; with room for its squares, y is gated.
    """
    batch, heads, headdim, dstate = state.shape
    check_limit(op, "a headdim", headdim, MAX_HEADDIM)
    check_limit(op, "a dstate", dstate, MAX_DSTATE)
    check_inner("state", state, 3)
    check_inner("A", A)
    path, lengths, entries = path_operands(accepted)
    check_limit(op, "a path of nodes", entries, MAX_NODES)
    old_x, old_dt, old_B = _checked(old, 3)
    x, dt, B, C = _checked(new, 4)
    stash_xbc, stash_dt = stash or (None, None)
    n, first, bits, D, bias, low, high = 1, 0, None, None, None, 0.0, 0.0
    if scan is not None:
        n, first, bits, D = scan.topology.num_nodes, scan.first, scan.topology.bits, scan.D
        check_limit(op, "trees of nodes", n, MAX_NODES)
    if stash is not None and scan is not None:
        check_inner("stash_xbc", stash[0])
        check_inner("stash_dt", stash[1], 2)
        bias, (low, high) = scan.dt_bias, map(float, scan.dt_limit)
    for name, tensor in (("D", D), ("dt_bias", bias)):
        if tensor is not None:
            check_inner(name, tensor)
    rows, shared = (old_x, heads // old_B.shape[2]) if x is None else (x, heads // B.shape[2])
    new_from = first if stash is not None else 0
    tile = SsdTile.of(n, n - first, entries, headdim, dstate, rows.dtype)
    blocks = -(-headdim // tile.headdim)
    new_strides = *strides(x, 3), *strides(dt), *strides(B), *strides(C)
    if mixer is not None and y is not None:  # B and C are room for what each program convolves
        B, C = y.new_empty(batch, heads * blocks, 2 * (n - first), dstate), None
        new_strides = *strides(mixer.xbc), 0, *strides(dt), 0, dstate, 0, dstate
    aligned = math.gcd(16, *new_strides[:2])
    ssd_kernel[(blocks, heads, batch)](
        state, A, bias, D, bits, y, path, lengths, old_x, old_dt, old_B, x, dt, B, C, stash_xbc, stash_dt,
        *_mixer_operands(mixer), squares,
        n, first, new_from, entries, heads, low, high, state.stride(0), A.stride(0) if A.ndim == 2 else 0,
        *strides(old_x, 3), *strides(old_dt), *strides(old_B),
        *(stride // aligned for stride in new_strides[:2]), *new_strides[2:],
        *strides(stash_xbc), *strides(stash_dt, 1),
        *((0, 0, 0) if mixer is None else (mixer.window.stride(0), *strides(mixer.stash_conv))),
        HEADDIM=headdim, DSTATE=dstate, SHARED=shared, NODES=tile.nodes, ROWS=tile.rows,
        PATH=tile.path, BLOCK_P=tile.headdim, BLOCK_S=tile.dstate, WORDS=-(-n // 32), COMMIT=old is not None,
        SCAN=scan is not None, KEEP=stash is not None, KNOWN=new_from > 0,
        WIDE=interpreted(),  # the interpreter multiplies bfloat16 as if it were integers
        EXACT="tf32x3",
        # Values of 16 bits are exact in TF32, and 11 bits of a weight lose less than outputs in bfloat16 do.
        MIXED="tf32" if rows.dtype == torch.bfloat16 else "tf32x3",
        ALIGNED=aligned, WIDTH=0 if mixer is None else mixer.weight.shape[1],
        SPAN=min(padded(dstate), 128 // rows.dtype.itemsize),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _mixer_operands(mixer: Operands | None) -> tuple[Tensor | None, ...]:
    """Return window, filter, bias, indices and stash of a convolution, gate and weight of a norm; Nones for none."""
    if mixer is None:
        return (None,) * 7
    index = mixer.topology.conv_rows(mixer.weight.shape[1])
    return mixer.window, mixer.weight, mixer.conv_bias, index, mixer.stash_conv, *(mixer.gating or (None, None))


def _checked(rows: tuple[Tensor, ...] | None, count: int) -> tuple[Any, ...]:
    """Require that rows of heads, groups and step sizes are contiguous; as many Nones for none."""
    if rows is None:
        return (None,) * count
    for name, tensor, dims in zip(("x", "dt", "B", "C"), rows, (1, 1, 2, 2), strict=False):
        check_inner(name, tensor, dims)
    return rows
