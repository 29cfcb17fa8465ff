"""Mamba-1 and RG-LRU in plain torch: a diagonal state, with or without one for every state channel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.kernels.dispatch import Operands
from stree.kernels.reference import diagonal_tree, diagonal_update, remaining_decays
from stree.kernels.topology import AcceptedPath, Topology

__all__ = [
    "diagonal_commit", "diagonal_step", "diagonal_tree_scan",
    "selective_commit", "selective_step", "selective_tree_scan", "stash_rows",
]  # fmt: skip


def selective_tree_scan(a: Operands) -> Tensor:
    """Run the Mamba-1 recurrence: a diagonal state [c, s] with log decay dt A and writes dt x B."""
    return _scan(a.x, a.dt, a.B, a.C[:, a.first :], a)


def _scan(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, a: Operands) -> Tensor:
    """Scan rows of all nodes, but C of the computed ones only, with the other operands of a scan or step."""
    dtype = a.state.dtype
    dt = dt.to(dtype)
    write = (dt * x)[..., None] * B.to(dtype)[:, :, None]
    h = diagonal_tree(dt[..., None] * a.A, write, a.state, a.topology)
    y = torch.matmul(h[:, a.first :], C.to(dtype)[..., None]).squeeze(3)
    if a.D is not None:
        y = torch.addcmul(y, x[:, a.first :].to(dtype), a.D.to(dtype))
    return y.to(x.dtype)


def selective_commit(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, accepted: AcceptedPath) -> None:
    """Commit the accepted path of a Mamba-1 layer to its state, in place."""
    dt = accepted.take(dt).to(state.dtype)
    total, later = remaining_decays(dt, state.dtype)
    if later is not None:
        later = later[..., None] * (A if A.ndim == 2 else A[:, None])
    write = (dt * accepted.take(x))[..., None] * accepted.take(B).to(state.dtype)[:, :, None]
    diagonal_update(state, total[..., None] * A, later, write, accepted)


def selective_step(a: Operands) -> Tensor:
    """Commit the last path, stash x, dt and B of the new rows, scan the new tree."""
    return _scan(*stash_rows(a), a.C, a)


def stash_rows(a: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Commit the last path of a Mamba-1 layer and stash the new rows; return x, dt and B of all nodes."""
    n, first, stash = a.topology.parents.shape[1], a.first, (a.stash_x, a.stash_dt, a.stash_B)
    if a.accepted is not None:
        old_x, old_dt, old_B = a.previous or stash
        selective_commit(a.state, old_x, old_dt, a.A, old_B, a.accepted)
    step_size = a.dt.to(a.stash_dt.dtype)
    step_size = F.softplus(step_size if a.dt_bias is None else step_size + a.dt_bias)
    for kept, rows in zip(stash, (a.x, step_size, a.B), strict=True):
        kept[:, first:n].copy_(rows)
    return a.stash_x[:, :n], a.stash_dt[:, :n], a.stash_B[:, :n]


def diagonal_tree_scan(log_a: Tensor, x: Tensor, topology: Topology, state: Tensor, *, first: int) -> Tensor:
    """Run the RG-LRU recurrence: a diagonal state [c] with log decay log_a and writes x."""
    h = diagonal_tree(log_a.to(state.dtype), x.to(state.dtype), state, topology)
    return h[:, first:].to(x.dtype).contiguous()


def diagonal_commit(state: Tensor, log_a: Tensor, x: Tensor, accepted: AcceptedPath) -> None:
    """Commit the accepted path of an RG-LRU layer to its state, in place."""
    total, later = remaining_decays(accepted.take(log_a), state.dtype)
    diagonal_update(state, total, later, accepted.take(x).to(state.dtype), accepted)


def diagonal_step(a: Operands) -> Tensor:
    """Commit the last path, stash the new rows, scan the new tree."""
    n = a.topology.parents.shape[1]
    if a.accepted is not None:
        diagonal_commit(a.state, a.stash_log_a, a.stash_x, a.accepted)
    a.stash_log_a[:, a.first : n].copy_(a.log_a)
    a.stash_x[:, a.first : n].copy_(a.x)
    return diagonal_tree_scan(a.stash_log_a[:, :n], a.stash_x[:, :n], a.topology, a.state, first=a.first)
