"""The gated delta rule (gated DeltaNet, KDA) in plain torch: a matrix state whose writes are solved for."""

from __future__ import annotations

from torch import Tensor

from stree.kernels.reference import matrix_commit, matrix_tree, nodes_first
from stree.kernels.topology import AcceptedPath, Topology

__all__ = ["gated_delta_commit", "gated_delta_step", "gated_delta_tree_scan"]


def gated_delta_tree_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    topology: Topology,
    state: Tensor,
    *,
    scale: float | None = None,
    first: int = 0,
    u: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule; without `u` the rows below `first` are solved again."""
    start = first if u is not None else 0
    known = None if u is None else u[:, :first]
    o, u = gated_delta_rows(q[:, start:], k, v[:, start:], g, beta[:, start:], topology, state, scale, start, known)
    return o[:, first - start :].contiguous(), u


def gated_delta_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    topology: Topology,
    state: Tensor,
    scale: float | None,
    first: int,
    known: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Do the work of `gated_delta_tree_scan` with q, v and beta of the computed rows only."""
    dtype = state.dtype
    o, u = matrix_tree(
        q.to(dtype) * (k.shape[3] ** -0.5 if scale is None else scale),
        k.to(dtype),
        v.to(dtype),
        g,
        state,
        topology,
        beta=beta.to(dtype),
        known=known.to(dtype) if known is not None and first else None,
        first=first,
    )
    return nodes_first(o, v.dtype), u.transpose(1, 2)


def gated_delta_commit(state: Tensor, k: Tensor, u: Tensor, g: Tensor, accepted: AcceptedPath) -> None:
    """Commit the accepted path of a gated delta layer to its state, in place."""
    shared = u.shape[2] // k.shape[2]
    key = accepted.take(k).to(state.dtype)
    if shared > 1:
        key = key.repeat_interleave(shared, 2)
    matrix_commit(state, key, accepted.take(u).to(state.dtype), accepted.take(g), accepted)


def gated_delta_step(
    state: Tensor,
    stash_k: Tensor,
    stash_u: Tensor,
    stash_g: Tensor,
    accepted: AcceptedPath | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    topology: Topology,
    *,
    scale: float | None = None,
    first: int = 0,
    previous: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Commit the last path, stash k and g of the new rows, scan the new tree, stash u."""
    n = topology.num_nodes
    if accepted is not None:
        old_k, old_u, old_g = (stash_k, stash_u, stash_g) if previous is None else previous
        gated_delta_commit(state, old_k, old_u, old_g, accepted)
    stash_k[:, first:n].copy_(k)
    stash_g[:, first:n].copy_(g)
    o, u = gated_delta_rows(
        q, stash_k[:, :n], v, stash_g[:, :n], beta, topology, state, scale, first, stash_u[:, :first]
    )
    stash_u[:, first:n].copy_(u[:, first:])
    return o
