"""Mamba-2 in plain torch: a matrix state with k = B, u = dt x, q = C and log decay dt A."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.kernels.reference import matrix_commit, matrix_tree
from stree.kernels.topology import AcceptedPath, Topology

__all__ = ["ssd_commit", "ssd_step", "ssd_tree_scan"]


def ssd_tree_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    topology: Topology,
    state: Tensor,
    *,
    D: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Run the Mamba-2 recurrence: a matrix state with k = B, u = dt x, q = C and log decay dt A."""
    dtype = state.dtype
    dt, key, query = dt.to(dtype), B.to(dtype), C[:, first:].to(dtype)
    y, _ = matrix_tree(query, key, x * dt[..., None], dt * A, state.transpose(2, 3), topology, first=first)
    y = y.transpose(1, 2)
    if D is not None:
        y = torch.addcmul(y, x[:, first:].to(dtype), D.to(dtype)[:, None])
    return y.to(x.dtype).contiguous()


def ssd_commit(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, accepted: AcceptedPath) -> None:
    """Commit the accepted path of a Mamba-2 layer to its state, in place."""
    ssd_update(state, accepted.take(x), accepted.take(dt), A, accepted.take(B), accepted)


def ssd_update(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, accepted: AcceptedPath) -> None:
    """Do the work of `ssd_commit` on rows taken along the path."""
    dt = dt.to(state.dtype)
    log_decay = dt * (A if A.ndim == 1 else A[:, None])
    matrix_commit(state, x * dt[..., None], B.to(state.dtype), log_decay, accepted)


def ssd_step(
    state: Tensor,
    stash_xbc: Tensor,
    stash_dt: Tensor,
    accepted: AcceptedPath | None,
    xbc: Tensor,
    dt: Tensor,
    A: Tensor,
    dt_bias: Tensor | None,
    topology: Topology,
    *,
    headdim: int,
    ngroups: int,
    D: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    first: int = 0,
    previous: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Commit the last path, stash x, B, C and dt of the new rows, scan the new tree."""
    n = topology.num_nodes
    if accepted is not None:
        old_xbc, old_dt = (stash_xbc, stash_dt) if previous is None else previous
        x, B, _ = _split_xbc(accepted.take(old_xbc), headdim, ngroups, A.shape[0])
        ssd_update(state, x, accepted.take(old_dt), A, B, accepted)
    stash_xbc[:, first:n].copy_(xbc)
    step_size = dt.to(stash_dt.dtype)
    step_size = F.softplus(step_size if dt_bias is None else step_size + dt_bias)
    if dt_limit != (0.0, float("inf")):
        step_size = step_size.clamp(*dt_limit)
    stash_dt[:, first:n].copy_(step_size)
    x, B, C = _split_xbc(stash_xbc[:, :n], headdim, ngroups, A.shape[0])
    return ssd_tree_scan(x, stash_dt[:, :n], A, B, C, topology, state, D=D, first=first)


def _split_xbc(xbc: Tensor, headdim: int, ngroups: int, nheads: int) -> tuple[Tensor, Tensor, Tensor]:
    """View the channels after the convolution as x[b, n, h, p], B[b, n, g, s] and C[b, n, g, s]."""
    inner = nheads * headdim
    span = (xbc.shape[2] - inner) // 2
    shape = (*xbc.shape[:2], ngroups, -1)
    x, B, C = xbc[..., :inner], xbc[..., inner : inner + span], xbc[..., inner + span :]
    return x.view(*xbc.shape[:2], nheads, headdim), B.view(shape), C.view(shape)
