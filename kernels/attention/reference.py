"""Tree attention in plain torch: cached context and ancestors under one softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from stree.kernels.dispatch import Operands
from stree.kernels.reference import accumulator, nodes_first
from stree.kernels.topology import AcceptedPath, Topology
from stree.kernels.tree_indices import take_rows

__all__ = ["attention_step", "hidden_context", "kv_commit", "tree_attention"]


def tree_attention(a: Operands) -> Tensor:
    """Attend from every node to the cached context and to its own ancestors."""
    return _attend(a, a.k, a.v)


def _attend(a: Operands, k: Tensor, v: Tensor) -> Tensor:
    """Attend to the context and to keys and values of all nodes."""
    batch, rows, heads, _ = a.q.shape
    kv_heads, context = a.k_cache.shape[1:3]
    dtype, shared = accumulator(a.q), heads // kv_heads
    query = a.q.to(dtype).mul(a.scale).view(batch, rows, kv_heads, shared, -1).permute(0, 2, 3, 1, 4)
    query = query.reshape(batch, kv_heads, shared * rows, -1)
    scores = [query @ a.k_cache.to(dtype).transpose(2, 3), query @ k.to(dtype).permute(0, 2, 3, 1)]
    if a.softcap is not None:
        scores = [part.div_(a.softcap).tanh_().mul_(a.softcap) for part in scores]
    # Context and tree stay two tensors: inductor does not vectorise code that reads from joined ones.
    outside = hidden_context(a.topology, a.lengths, context, a.window, a.first)
    for part, hidden in zip(scores, (outside, _hidden_nodes(a.topology, a.window, a.first)), strict=True):
        part.view(batch, heads, rows, -1).masked_fill_(hidden[:, None], -torch.inf)
    past, tree = scores
    top = tree.amax(3, keepdim=True)
    if context:
        top = torch.maximum(top, past.amax(3, keepdim=True))
    past, tree = past.sub_(top).exp_(), tree.sub_(top).exp_()
    total = past.sum(3, keepdim=True) + tree.sum(3, keepdim=True)
    out = (past @ a.v_cache.to(dtype) + tree @ v.to(dtype).transpose(1, 2)).div_(total)
    return nodes_first(out.view(batch, heads, rows, -1), a.q.dtype)


def hidden_context(topology: Topology, lengths: Tensor, context: int, window: int | None, first: int) -> Tensor:
    """Mark the cache rows that each node may not attend to.

    Returns:
        bool[b, n - first, context], or bool[b, 1, context] without a window.
    """
    row = torch.arange(context, device=lengths.device)
    outside = (row >= lengths[:, None])[:, None]
    if window is not None:
        outside = outside | (lengths[:, None, None] + topology.depths[:, first:, None] - row >= window)
    return outside


def _hidden_nodes(topology: Topology, window: int | None, first: int) -> Tensor:
    """Mark the nodes that each node may not attend to: bool[b, n - first, n]."""
    hidden = topology.hidden[:, first:]
    if window is not None:
        hidden = hidden | (topology.depths[:, first:, None] - topology.depths[:, None] >= window)
    return hidden


def kv_commit(a: Operands) -> None:
    """Append the accepted rows of K and V to the caches, in place; `lengths` is left to its owner.

    Where the caches have r times as many rows as there are lengths, all layers of a kind are committed together.
    """
    _append(a.k_cache, a.v_cache, a.lengths, a.k, a.v, AcceptedPath.cast(a.path, a.path_lengths))


def _append(k_cache: Tensor, v_cache: Tensor, lengths: Tensor, k: Tensor, v: Tensor, accepted: AcceptedPath) -> None:
    """Write the accepted rows at `lengths`.

    Rows that have no place write back what the cache holds at (lengths + t) mod L, which is a different row for
    every t, so no two writes collide.
    """
    layers = k_cache.shape[0] // max(lengths.shape[0], 1)
    if layers > 1:
        accepted = AcceptedPath.of(accepted.rows.repeat(layers, 1), accepted.lengths.repeat(layers))
        lengths = lengths.repeat(layers)
    limit = k_cache.shape[2]
    m = min(accepted.rows.shape[1], limit)
    place = lengths.long()[:, None] + torch.arange(m, device=lengths.device)
    stays = (accepted.beyond[:, :m] | (place >= limit))[..., None, None]
    place = place.remainder_(limit)
    source = accepted.rows[:, :m]
    for cache, nodes in ((k_cache, k), (v_cache, v)):
        rows = take_rows(nodes, source, accepted.batch).to(cache.dtype)
        cache[accepted.batch, :, place] = torch.where(stays, cache[accepted.batch, :, place], rows)


def attention_step(a: Operands) -> Tensor:
    """Append the last path's K and V, stash those of the new rows, attend; `lengths` counts the appended rows."""
    n = a.topology.parents.shape[1]
    if a.accepted is not None:
        _append(a.k_cache, a.v_cache, a.lengths - a.accepted.lengths, a.stash_k, a.stash_v, a.accepted)
    a.stash_k[:, a.first : n].copy_(a.k)
    a.stash_v[:, a.first : n].copy_(a.v)
    return _attend(a, a.stash_k[:, :n], a.stash_v[:, :n])
