"""The gated delta rule (gated DeltaNet, KDA) in plain torch: a matrix state whose writes are solved for."""

from __future__ import annotations

from torch import Tensor

from stree.kernels.dispatch import Operands
from stree.kernels.reference import matrix_commit, matrix_tree, nodes_first
from stree.kernels.topology import AcceptedPath

__all__ = ["commit_stashed", "gated_delta_commit", "gated_delta_step", "gated_delta_tree_scan"]


def gated_delta_tree_scan(a: Operands) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule; without `u` the rows below `first` are solved again."""
    start = a.first if a.u is not None else 0
    rows = Operands(**{**vars(a), "q": a.q[:, start:], "v": a.v[:, start:], "beta": a.beta[:, start:], "first": start})
    o, u = _scan(rows, a.k, a.g, a.u)
    return o[:, a.first - start :].contiguous(), u


def _scan(a: Operands, k: Tensor, g: Tensor, known: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scan k and g of all nodes with q, v and beta of those from `first` on and u of those below it."""
    dtype, first = a.state.dtype, a.first
    o, u = matrix_tree(
        a.q.to(dtype) * (k.shape[3] ** -0.5 if a.scale is None else a.scale), k.to(dtype), a.v.to(dtype), g, a.state,
        a.topology, beta=a.beta.to(dtype), known=known[:, :first].to(dtype) if known is not None and first else None,
        first=first,
    )  # fmt: skip
    return nodes_first(o, a.v.dtype), u.transpose(1, 2)


def gated_delta_commit(state: Tensor, k: Tensor, u: Tensor, g: Tensor, accepted: AcceptedPath) -> None:
    """Commit the accepted path of a gated delta layer to its state, in place."""
    shared = u.shape[2] // k.shape[2]
    key = accepted.take(k).to(state.dtype)
    if shared > 1:
        key = key.repeat_interleave(shared, 2)
    matrix_commit(state, key, accepted.take(u).to(state.dtype), accepted.take(g), accepted)


def commit_stashed(a: Operands) -> None:
    """Commit the last path of a step."""
    k, u, g = a.previous or (a.stash_k, a.stash_u, a.stash_g)
    gated_delta_commit(a.state, k, u, g, a.accepted)


def gated_delta_step(a: Operands) -> Tensor:
    """Commit the last path, stash k and g of the new rows, scan the new tree, stash u."""
    n, first = a.topology.parents.shape[1], a.first
    if a.accepted is not None:
        commit_stashed(a)
    a.stash_k[:, first:n].copy_(a.k)
    a.stash_g[:, first:n].copy_(a.g)
    o, u = _scan(a, a.stash_k[:, :n], a.stash_g[:, :n], a.stash_u)
    a.stash_u[:, first:n].copy_(u[:, first:])
    return o
