"""The fused steps in plain torch: commit from the stash, copy of the new rows into the stash, scan of the stash.

`stree.kernels.ops` documents arguments and checks them.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from stree.kernels.reference import (
    Parents,
    Path,
    conv_commit,
    diagonal_commit,
    diagonal_tree_scan,
    gated_delta_commit,
    gated_delta_rows,
    kv_commit,
    selective_commit,
    selective_rows,
    ssd_fold,
    ssd_tree_scan,
    tree_attention,
    tree_conv1d,
)
from stree.kernels.topology import AcceptedPath, Topology


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
    parents: Parents,
    *,
    headdim: int,
    ngroups: int,
    D: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    first: int = 0,
    folded: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Fold the last path, stash x, B, C and dt of the new rows, scan the new tree."""
    topology = Topology.cast(parents)
    n = topology.parents.shape[1]
    if path is not None:
        accepted = AcceptedPath.cast(path, path_lengths)
        old_xbc, old_dt = (stash_xbc, stash_dt) if folded is None else folded
        x, B, _ = _split_xbc(accepted.take(old_xbc), headdim, ngroups, A.shape[0])
        ssd_fold(state, x, accepted.take(old_dt), A, B, accepted)
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
    parents: Parents,
    *,
    scale: float | None = None,
    first: int = 0,
    folded: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Fold the last path, stash k and g of the new rows, scan the new tree, stash u."""
    topology = Topology.cast(parents)
    n = topology.parents.shape[1]
    if path is not None:
        old_k, old_u, old_g = (stash_k, stash_u, stash_g) if folded is None else folded
        gated_delta_commit(state, old_k, old_u, old_g, path, path_lengths)
    stash_k[:, first:n].copy_(k)
    stash_g[:, first:n].copy_(g)
    o, u = gated_delta_rows(
        q, stash_k[:, :n], v, stash_g[:, :n], beta, topology, state, scale, first, stash_u[:, :first]
    )
    stash_u[:, first:n].copy_(u[:, first:])
    return o


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
    parents: Parents,
    *,
    D: Tensor | None = None,
    first: int = 0,
    folded: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Fold the last path, stash x, dt and B of the new rows, scan the new tree."""
    topology = Topology.cast(parents)
    n = topology.parents.shape[1]
    if path is not None:
        old_x, old_dt, old_B = (stash_x, stash_dt, stash_B) if folded is None else folded
        selective_commit(state, old_x, old_dt, A, old_B, path, path_lengths)
    stash_x[:, first:n].copy_(x)
    stash_B[:, first:n].copy_(B)
    step_size = dt.to(stash_dt.dtype)
    stash_dt[:, first:n].copy_(F.softplus(step_size if dt_bias is None else step_size + dt_bias))
    return selective_rows(stash_x[:, :n], stash_dt[:, :n], A, stash_B[:, :n], C, topology, state, D, first)


def diagonal_step(
    state: Tensor,
    stash_log_a: Tensor,
    stash_x: Tensor,
    path: Path | None,
    path_lengths: Tensor | None,
    log_a: Tensor,
    x: Tensor,
    parents: Parents,
    *,
    first: int = 0,
) -> Tensor:
    """Fold the last path, stash the new rows, scan the new tree."""
    topology = Topology.cast(parents)
    n = topology.parents.shape[1]
    if path is not None:
        diagonal_commit(state, stash_log_a, stash_x, path, path_lengths)
    stash_log_a[:, first:n].copy_(log_a)
    stash_x[:, first:n].copy_(x)
    return diagonal_tree_scan(stash_log_a[:, :n], stash_x[:, :n], topology, state, first=first)


def conv_step(
    window: Tensor,
    stash: Tensor,
    path: Path | None,
    path_lengths: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parents: Parents,
    *,
    activation: str | None = "silu",
    first: int = 0,
) -> Tensor:
    """Fold the last path, stash the new rows before the convolution, convolve the new tree."""
    n = (parents.parents if isinstance(parents, Topology) else parents).shape[1]
    if path is not None:
        conv_commit(window, stash, path, path_lengths)
    stash[:, first:n].copy_(x)
    return tree_conv1d(stash[:, :n], weight, bias, parents, window, activation=activation, first=first)


def attention_step(
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    stash_k: Tensor,
    stash_v: Tensor,
    path: Path | None,
    path_lengths: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parents: Parents,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    first: int = 0,
) -> Tensor:
    """Append the last path's K and V, stash those of the new rows, attend; `lengths` counts the appended rows."""
    topology = Topology.cast(parents)
    n = topology.parents.shape[1]
    if path is not None:
        accepted = AcceptedPath.cast(path, path_lengths)
        kv_commit(k_cache, v_cache, lengths - accepted.lengths, stash_k, stash_v, accepted, None)
    stash_k[:, first:n].copy_(k)
    stash_v[:, first:n].copy_(v)
    return tree_attention(
        q,
        k_cache,
        v_cache,
        lengths,
        stash_k[:, :n],
        stash_v[:, :n],
        topology,
        scale=scale,
        window=window,
        softcap=softcap,
        first=first,
    )
