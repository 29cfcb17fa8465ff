"""Mamba-1 and RG-LRU in plain torch: a diagonal state, with or without one for every state channel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.kernels.reference import diagonal_tree, diagonal_update, remaining_decays
from stree.kernels.topology import AcceptedPath, Topology

__all__ = [
    "diagonal_commit",
    "diagonal_step",
    "diagonal_tree_scan",
    "selective_commit",
    "selective_step",
    "selective_tree_scan",
]


def selective_tree_scan(
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
    """Run the Mamba-1 recurrence: a diagonal state [c, s] with log decay dt A and writes dt x B."""
    return selective_rows(x, dt, A, B, C[:, first:], topology, state, D, first)


def selective_rows(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    topology: Topology,
    state: Tensor,
    D: Tensor | None,
    first: int,
) -> Tensor:
    """Do the work of `selective_tree_scan` with C of the computed rows only."""
    dtype = state.dtype
    dt = dt.to(dtype)
    write = (dt * x)[..., None] * B.to(dtype)[:, :, None]
    h = diagonal_tree(dt[..., None] * A, write, state, topology)
    y = torch.matmul(h[:, first:], C.to(dtype)[..., None]).squeeze(3)
    if D is not None:
        y = torch.addcmul(y, x[:, first:].to(dtype), D.to(dtype))
    return y.to(x.dtype)


def selective_commit(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, accepted: AcceptedPath) -> None:
    """Commit the accepted path of a Mamba-1 layer to its state, in place."""
    dt = accepted.take(dt).to(state.dtype)
    total, later = remaining_decays(dt, state.dtype)
    if later is not None:
        later = later[..., None] * (A if A.ndim == 2 else A[:, None])
    write = (dt * accepted.take(x))[..., None] * accepted.take(B).to(state.dtype)[:, :, None]
    diagonal_update(state, total[..., None] * A, later, write, accepted)


def selective_step(
    state: Tensor,
    stash_x: Tensor,
    stash_dt: Tensor,
    stash_B: Tensor,
    accepted: AcceptedPath | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    dt_bias: Tensor | None,
    topology: Topology,
    *,
    D: Tensor | None = None,
    first: int = 0,
    previous: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Commit the last path, stash x, dt and B of the new rows, scan the new tree."""
    n = topology.num_nodes
    if accepted is not None:
        old_x, old_dt, old_B = (stash_x, stash_dt, stash_B) if previous is None else previous
        selective_commit(state, old_x, old_dt, A, old_B, accepted)
    stash_x[:, first:n].copy_(x)
    stash_B[:, first:n].copy_(B)
    step_size = dt.to(stash_dt.dtype)
    stash_dt[:, first:n].copy_(F.softplus(step_size if dt_bias is None else step_size + dt_bias))
    return selective_rows(stash_x[:, :n], stash_dt[:, :n], A, stash_B[:, :n], C, topology, state, D, first)


def diagonal_tree_scan(log_a: Tensor, x: Tensor, topology: Topology, state: Tensor, *, first: int = 0) -> Tensor:
    """Run the RG-LRU recurrence: a diagonal state [c] with log decay log_a and writes x."""
    dtype = state.dtype
    h = diagonal_tree(log_a.to(dtype), x.to(dtype), state, topology)
    return h[:, first:].to(x.dtype).contiguous()


def diagonal_commit(state: Tensor, log_a: Tensor, x: Tensor, accepted: AcceptedPath) -> None:
    """Commit the accepted path of an RG-LRU layer to its state, in place."""
    total, later = remaining_decays(accepted.take(log_a), state.dtype)
    diagonal_update(state, total, later, accepted.take(x).to(state.dtype), accepted)


def diagonal_step(
    state: Tensor,
    stash_log_a: Tensor,
    stash_x: Tensor,
    accepted: AcceptedPath | None,
    log_a: Tensor,
    x: Tensor,
    topology: Topology,
    *,
    first: int = 0,
) -> Tensor:
    """Commit the last path, stash the new rows, scan the new tree."""
    n = topology.num_nodes
    if accepted is not None:
        diagonal_commit(state, stash_log_a, stash_x, accepted)
    stash_log_a[:, first:n].copy_(log_a)
    stash_x[:, first:n].copy_(x)
    return diagonal_tree_scan(stash_log_a[:, :n], stash_x[:, :n], topology, state, first=first)
