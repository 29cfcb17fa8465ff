"""Tree attention in plain torch: cached context and ancestors under one softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from stree.kernels.reference import accumulator, nodes_first
from stree.kernels.topology import AcceptedPath, Topology, take_rows

__all__ = ["attention_step", "kv_commit", "tree_attention"]


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    k: Tensor,
    v: Tensor,
    topology: Topology,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    first: int = 0,
) -> Tensor:
    """Attend from every node to the cached context and to its own ancestors."""
    batch, rows, heads, _ = q.shape
    kv_heads, context = k_cache.shape[1:3]
    n = k.shape[1]
    dtype = accumulator(q)
    shared = heads // kv_heads
    query = q.to(dtype).mul(scale).view(batch, rows, kv_heads, shared, -1).permute(0, 2, 3, 1, 4)
    query = query.reshape(batch, kv_heads, shared * rows, -1)
    past = query @ k_cache.to(dtype).transpose(2, 3)
    tree = query @ k.to(dtype).permute(0, 2, 3, 1)
    scores = torch.cat((past, tree), 3)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    hidden = _hidden_keys(topology, lengths, context, window, first)
    scores = scores.view(batch, heads, rows, context + n).masked_fill_(hidden[:, None], -torch.inf)
    probs = scores.softmax(3).view(batch, kv_heads, shared * rows, context + n)
    out = probs[..., :context] @ v_cache.to(dtype) + probs[..., context:] @ v.to(dtype).transpose(1, 2)
    return nodes_first(out.view(batch, heads, rows, -1), q.dtype)


def _hidden_keys(topology: Topology, lengths: Tensor, context: int, window: int | None, first: int) -> Tensor:
    """Mark what each node may not attend to among [cache rows, nodes]: bool[b, n - first, context + n]."""
    depths = topology.depths
    row = torch.arange(context, device=lengths.device)
    outside = (row >= lengths[:, None])[:, None]
    tree = topology.hidden[:, first:]
    if window is not None:
        depth = depths[:, first:, None]
        outside = outside | (lengths[:, None, None] + depth - row >= window)
        tree = tree | (depth - depths[:, None] >= window)
    return torch.cat((outside.expand(-1, tree.shape[1], -1), tree), 2)


def kv_commit(
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    k: Tensor,
    v: Tensor,
    path: Tensor | AcceptedPath,
    path_lengths: Tensor | None,
) -> None:
    """Append the accepted rows of K and V to the caches, in place; `lengths` is left to its owner.

    Where the caches have r times as many rows as there are lengths, all layers of a kind are committed together.  Rows
    that have no place write back what the cache holds at (lengths + t) mod L, which is a different row for
    every t, so no two writes collide.
    """
    accepted = AcceptedPath.cast(path, path_lengths)
    layers = k_cache.shape[0] // max(lengths.shape[0], 1)
    if layers > 1:
        accepted = AcceptedPath.of(accepted.rows.repeat(layers, 1), accepted.lengths.repeat(layers))
        lengths = lengths.repeat(layers)
    limit = k_cache.shape[2]
    m = min(accepted.rows.shape[1], limit)
    place = lengths.long()[:, None] + torch.arange(m, device=lengths.device)
    stays = (accepted.beyond[:, :m] | (place >= limit))[:, None, :, None]
    place = place.remainder_(limit)[:, None, :, None]
    source = accepted.rows[:, :m]
    for cache, nodes in ((k_cache, k), (v_cache, v)):
        rows = take_rows(nodes, source, accepted.batch).transpose(1, 2).to(cache.dtype)
        index = place.expand_as(rows)
        cache.scatter_(2, index, torch.where(stays, cache.gather(2, index), rows))


def attention_step(
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    stash_k: Tensor,
    stash_v: Tensor,
    accepted: AcceptedPath | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    topology: Topology,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    first: int = 0,
) -> Tensor:
    """Append the last path's K and V, stash those of the new rows, attend; `lengths` counts the appended rows."""
    n = topology.num_nodes
    if accepted is not None:
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
