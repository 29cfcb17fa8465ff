"""Tree attention on a CPU: torch's attention reads the context, and numba adds the ancestors of every node.

The two parts are merged by their log-sum-exp, as the parts of a context are in `kernel.py`.  For it the function behind
torch's scaled_dot_product_attention is called, which is private but alone returns that of the context.  Steps of
the bundled pair take 0.94 of the time for one node and 0.97 for 8 to 32 (AMD EPYC, one thread); alone the commit brings
0.97 for one node and 0.99 for 16, attention 0.96 and 0.98.  This file is imported with the first tree.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stree.kernels.attention import reference
from stree.kernels.cpu_jit import compiled
from stree.kernels.dispatch import Operands
from stree.kernels.topology import AcceptedPath

__all__ = ["attention_step", "kv_commit"]

Array = np.ndarray[Any, Any]


def attention_step(a: Operands) -> Tensor:
    """Append the last path's K and V, stash those of the new rows, attend; `lengths` counts the appended rows."""
    dtype, kept = a.k_cache.dtype, (a.k_cache, a.v_cache, a.stash_k, a.stash_v)
    fits = all(tensor.dtype == dtype and tensor.stride(3) == 1 for tensor in kept)  # it takes any stride to be 1
    if a.softcap is not None or a.q.shape[3] != a.v.shape[3] or not fits:  # what torch's attention does not have
        return reference.attention_step(a)
    caches, stashed = (a.k_cache.numpy(), a.v_cache.numpy()), (a.stash_k.numpy(), a.stash_v.numpy())
    if a.accepted is not None:
        before = (a.lengths - a.accepted.lengths).numpy()
        _append(*caches, before, *stashed, a.accepted.rows.numpy(), a.accepted.lengths.numpy())
    batch, rows, heads, dim = a.q.shape
    kv_heads, context = a.k_cache.shape[1:3]
    query = a.q.to(dtype).transpose(1, 2).reshape(batch, kv_heads, -1, dim).contiguous()  # heads that share keys: rows
    if context:
        hidden = None
        if a.window is not None or int(a.lengths.min()) < context:
            outside = reference.hidden_context(a.topology, a.lengths, context, a.window, a.first)
            hidden = torch.zeros(outside.shape, dtype=dtype).masked_fill_(outside, -torch.inf)[:, None]
            hidden = hidden.repeat(1, 1, heads // kv_heads, 1) if a.window is not None else hidden
        past, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, a.k_cache, a.v_cache, attn_mask=hidden, scale=a.scale
        )
        if hidden is not None:
            log_sum += hidden.amax(3)  # of a row that sees nothing of the context, torch returns 0
    else:
        past, log_sum = torch.empty_like(query), query.new_full(query.shape[:3], -torch.inf)
    y: Tensor = query.new_empty(a.q.shape)
    new = (query.numpy(), *(x.to(dtype).contiguous().numpy() for x in (a.k, a.v)))
    parts = past.transpose(1, 2).contiguous().numpy(), log_sum.contiguous().numpy()
    window = a.topology.num_nodes if a.window is None else a.window
    _attend(*new, *stashed, a.topology.parents.numpy(), a.scale, window, *parts, y.numpy())
    return y.to(a.q.dtype)


def kv_commit(a: Operands) -> None:
    """Append the accepted rows of K and V to the caches, in place; `lengths` is left to its owner."""
    if a.v_cache.dtype != a.k_cache.dtype:
        return reference.kv_commit(a)
    accepted = AcceptedPath.cast(a.path, a.path_lengths)
    caches, path = (a.k_cache.numpy(), a.v_cache.numpy()), (accepted.rows.numpy(), accepted.lengths.numpy())
    nodes = (x.to(a.k_cache.dtype).numpy() for x in (a.k, a.v))
    _append(*caches, a.lengths.numpy(), *nodes, *path)


@compiled(nogil=True)
def _append(
    k_cache: Array, v_cache: Array, lengths: Array, k: Array, v: Array, path: Array, path_lengths: Array
) -> None:
    """Write the rows of int64[b, m] paths of int64[b] lengths into the caches at `lengths`, layer after layer."""
    sequences, limit = len(lengths), k_cache.shape[2]
    for layer in range(len(k_cache)):
        b = layer % sequences
        for t in range(min(path_lengths[b], limit - lengths[b])):
            for h in range(k_cache.shape[1]):
                for c in range(k_cache.shape[3]):
                    k_cache[layer, h, lengths[b] + t, c] = k[layer, path[b, t], h, c]
                for c in range(v_cache.shape[3]):
                    v_cache[layer, h, lengths[b] + t, c] = v[layer, path[b, t], h, c]


@compiled(fastmath={"reassoc", "contract", "nsz"}, nogil=True)
def _attend(
    query: Array, k: Array, v: Array, stash_k: Array, stash_v: Array, parents: Array, scale: float, window: int,
    past: Array, log_sum: Array, y: Array,
) -> None:  # fmt: skip
    """Stash new rows, and add to what each of them read of the context what it reads of its ancestors.

    Args:
        query: float[b, hk, shared (n - first), d], head after head.
        k: float[b, n - first, hk, d].
        v: likewise.
        stash_k: float[b, N, hk, d], of N >= n nodes; the new ones are written.
        stash_v: likewise.
        parents: int32[b, n].
        scale: of the scores.
        window: a node reads fewer than so many edges up.
        past: float[b, shared (n - first), hk, d], means of the context's values.
        log_sum: float[b, hk, shared (n - first)], logarithms of the sums of exponentials of its scores.
        y: float[b, n - first, hq, d], written.
    """
    batch, n = parents.shape
    rows, kv_heads, dim = k.shape[1:]
    first, shared, zero = n - rows, query.shape[2] // rows, y.dtype.type(0)
    score = np.empty(n, y.dtype)
    for b in range(batch):
        for i in range(rows):
            for h in range(kv_heads):
                for c in range(dim):
                    stash_k[b, first + i, h, c], stash_v[b, first + i, h, c] = k[b, i, h, c], v[b, i, h, c]
        for i in range(rows):
            for h in range(kv_heads):
                for s in range(shared):
                    row = s * rows + i
                    own, out, top = query[b, h, row], y[b, i, h * shared + s], log_sum[b, h, row]
                    j, edges = first + i, 0
                    while j >= 0 and edges < window:
                        key, dot = stash_k[b, j, h], zero
                        for c in range(dim):
                            dot += own[c] * key[c]
                        score[j] = dot * y.dtype.type(scale)
                        top = score[j] if score[j] > top else top
                        j, edges = parents[b, j], edges + 1
                    total = np.exp(log_sum[b, h, row] - top)
                    for c in range(dim):
                        out[c] = total * past[b, row, h, c] if total != 0 else zero
                    j, edges = first + i, 0
                    while j >= 0 and edges < window:
                        weight, value = np.exp(score[j] - top), stash_v[b, j, h]
                        for c in range(dim):
                            out[c] += weight * value[c]
                        total, j, edges = total + weight, parents[b, j], edges + 1
                    for c in range(dim):
                        out[c] /= total
