"""Mamba-2 in plain torch: a matrix state with k = B, u = dt x, q = C and log decay dt A."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.kernels.conv.reference import conv_step
from stree.kernels.dispatch import Operands
from stree.kernels.reference import matrix_commit, matrix_tree
from stree.kernels.topology import AcceptedPath

__all__ = ["commit_stashed", "mamba2_step", "ssd_commit", "ssd_step", "ssd_tree_scan", "stash_rows"]


def ssd_tree_scan(a: Operands) -> Tensor:
    """Run the Mamba-2 recurrence: a matrix state with k = B, u = dt x, q = C and log decay dt A."""
    return _scan(a.x, a.dt, a.B, a.C, a)


def _scan(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, a: Operands) -> Tensor:
    """Scan rows of all nodes with the other operands of a scan or step."""
    first, dtype = a.first, a.state.dtype
    dt, key, query = dt.to(dtype), B.to(dtype), C[:, first:].to(dtype)
    y, _ = matrix_tree(query, key, x * dt[..., None], dt * a.A, a.state.transpose(2, 3), a.topology, first=first)
    y = y.transpose(1, 2)
    if a.D is not None:
        y = torch.addcmul(y, x[:, first:].to(dtype), a.D.to(dtype)[:, None])
    return y.to(x.dtype).contiguous()


def ssd_commit(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, accepted: AcceptedPath) -> None:
    """Commit the accepted path of a Mamba-2 layer to its state, in place."""
    ssd_update(state, accepted.take(x), accepted.take(dt), A, accepted.take(B), accepted)


def ssd_update(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, accepted: AcceptedPath) -> None:
    """Do the work of `ssd_commit` on rows taken along the path."""
    dt = dt.to(state.dtype)
    log_decay = dt * (A if A.ndim == 1 else A[:, None])
    matrix_commit(state, x * dt[..., None], B.to(state.dtype), log_decay, accepted)


def ssd_step(a: Operands) -> Tensor:
    """Commit the last path, stash x, B, C and dt of the new rows, scan the new tree."""
    return _scan(*stash_rows(a), a)


def mamba2_step(a: Operands) -> tuple[Tensor, Tensor | None]:
    """Convolve, do what `ssd_step` does, and gate."""
    conv = {"stash": a.stash_conv, "accepted": None, "x": a.xbc, "bias": a.conv_bias, "activation": "silu"}
    y = ssd_step(Operands(**vars(a) | {"xbc": conv_step(Operands(**vars(a) | conv))}))
    if a.gating is None:
        return y, None
    gate, weight = a.gating
    gated = y.flatten(2).to(a.state.dtype) * F.silu(gate.to(a.state.dtype))
    return (gated * weight).to(y.dtype).view_as(y), gated.square().sum(-1, keepdim=True)


def stash_rows(a: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Commit the last path and stash the new rows; return x, dt, B and C of all nodes."""
    n = a.topology.parents.shape[1]
    if a.accepted is not None:
        commit_stashed(a)
    a.stash_xbc[:, a.first : n].copy_(a.xbc)
    step_size = a.dt.to(a.stash_dt.dtype)
    step_size = F.softplus(step_size if a.dt_bias is None else step_size + a.dt_bias)
    if a.dt_limit != (0.0, float("inf")):
        step_size = step_size.clamp(*a.dt_limit)
    a.stash_dt[:, a.first : n].copy_(step_size)
    x, B, C = _split_xbc(a.stash_xbc[:, :n], a.headdim, a.ngroups, a.A.shape[0])
    return x, a.stash_dt[:, :n], B, C


def commit_stashed(a: Operands) -> None:
    """Commit the last path of a step."""
    old_xbc, old_dt = a.previous or (a.stash_xbc, a.stash_dt)
    x, B, _ = _split_xbc(a.accepted.take(old_xbc), a.headdim, a.ngroups, a.A.shape[0])
    ssd_update(a.state, x, a.accepted.take(old_dt), a.A, B, a.accepted)


def _split_xbc(xbc: Tensor, headdim: int, ngroups: int, nheads: int) -> tuple[Tensor, Tensor, Tensor]:
    """View the channels after the convolution as x[b, n, h, p], B[b, n, g, s] and C[b, n, g, s]."""
    inner = nheads * headdim
    span = (xbc.shape[2] - inner) // 2
    shape = (*xbc.shape[:2], ngroups, -1)
    x, B, C = xbc[..., :inner], xbc[..., inner : inner + span], xbc[..., inner + span :]
    return x.view(*xbc.shape[:2], nheads, headdim), B.view(shape), C.view(shape)
