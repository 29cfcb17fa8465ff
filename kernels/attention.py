"""Tree attention in Triton: the context split over programs (flash-decoding), the tree under ancestor bit masks.

A program owns a tile of rows, each a node and a query head of one group, so that grouped heads share what is read of
the cache.  The context is cut into parts by the capacity of the cache alone; lengths are read on the device.  The last
part has the tree besides, and writes its new rows into the stash.  Where there is more than one part, a second, small
launch merges them: outputs in the dtype of the queries by weights in float32.  `kernels/README.md` has the costs.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stree.kernels.attention_kernels import attention_kernel, kv_commit_kernel, merge_kernel
from stree.kernels.tiles import (
    MAX_ATTENTION_HEADDIMS,
    MAX_NODES,
    AttentionTile,
    check_inner,
    check_kernel_dtypes,
    check_limit,
    interpreted,
    padded,
)
from stree.kernels.topology import AcceptedPath, Topology

__all__ = ["attention_step", "kv_commit", "tree_attention"]

Path = Tensor | AcceptedPath


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    k: Tensor,
    v: Tensor,
    parents: Tensor | Topology,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    first: int = 0,
) -> Tensor:
    """Attend from every node to the cached context and to its own ancestors; see `stree.kernels.ops`."""
    check_kernel_dtypes("tree_attention", q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    return _attend(
        "tree_attention", q, (k_cache, v_cache, lengths), (k, v), Topology.cast(parents),
        scale=scale, window=window, softcap=softcap, first=first,
    )  # fmt: skip


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
    parents: Tensor | Topology,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    first: int = 0,
) -> Tensor:
    """Append the last path, stash the new rows, attend from the new tree; see `stree.kernels.ops`."""
    check_kernel_dtypes(
        "attention_step", q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, stash_k=stash_k, stash_v=stash_v
    )
    cache = (k_cache, v_cache, lengths)
    if path is not None:
        accepted = AcceptedPath.cast(path, path_lengths)
        bare = accepted.rows, accepted.lengths
        _append("attention_step", cache, (stash_k, stash_v), bare, lengths_count_path=True)
    return _attend(
        "attention_step", q, cache, (k, v), Topology.cast(parents), stash=(stash_k, stash_v),
        scale=scale, window=window, softcap=softcap, first=first,
    )  # fmt: skip


def kv_commit(
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    k: Tensor,
    v: Tensor,
    path: Path,
    path_lengths: Tensor | None,
) -> None:
    """Append the accepted rows of K and V to the caches, in place; see `stree.kernels.ops`."""
    check_kernel_dtypes("kv_commit", k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    bare = (path.rows, path.lengths) if isinstance(path, AcceptedPath) else (path, path_lengths)
    _append("kv_commit", (k_cache, v_cache, lengths), (k, v), bare, lengths_count_path=False)


def _append(
    op: str,
    cache: tuple[Tensor, Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    path: tuple[Tensor, Tensor | None],
    *,
    lengths_count_path: bool,
) -> None:
    """Launch the kernel that appends a path's rows to the caches, of as many layers as there are."""
    (k_cache, v_cache, lengths), (k, v), (nodes, path_lengths) = cache, new, path
    assert path_lengths is not None, "a path given as a tensor needs path_lengths"
    dims = _check_dims(op, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    kv_commit_kernel[(k_cache.shape[1], k_cache.shape[0])](
        k_cache, v_cache, lengths.contiguous(), k, v, nodes.contiguous(), path_lengths.contiguous(),
        lengths.shape[0], k_cache.shape[2], nodes.shape[1],
        *k_cache.stride()[:3], *v_cache.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        **kv_commit_constants(*dims, after=lengths_count_path), num_warps=4,
    )  # fmt: skip


def _attend(
    op: str,
    q: Tensor,
    cache: tuple[Tensor, Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    topology: Topology,
    *,
    stash: tuple[Tensor, Tensor] | None = None,
    scale: float,
    window: int | None,
    softcap: float | None,
    first: int,
) -> Tensor:
    """Launch the attention over the parts of the context and the tree, then the merge of the parts."""
    (k_cache, v_cache, lengths), (k, v) = cache, new
    stash_k, stash_v = stash if stash is not None else (k, v)
    dim, value_dim = _check_dims(op, k_cache=k_cache, v_cache=v_cache, k=k, v=v, stash_k=stash_k, stash_v=stash_v)
    check_inner("q", q)
    (batch, rows, heads, _), (kv_heads, context) = q.shape, k_cache.shape[1:3]
    n, shared = topology.parents.shape[1], heads // kv_heads
    check_limit(op, "trees of nodes", n, MAX_NODES)
    tile = AttentionTile.of(rows * shared, max(dim, value_dim), q.dtype)
    shares = _is_prefix(v_cache, k_cache) and _is_prefix(stash_v, stash_k)
    blocks = -(-rows * shared // tile.rows)
    parts, chunk = split_context(context, blocks * batch * kv_heads, tile.keys)
    out = torch.empty(batch, rows, heads, value_dim, dtype=q.dtype, device=q.device)
    partial, lse = out, None
    if parts > 1:
        sizes = (batch, kv_heads, parts, rows * shared)
        partial = torch.empty(*sizes, value_dim, dtype=q.dtype, device=q.device)
        lse = torch.empty(sizes, dtype=torch.float32, device=q.device)
    new_from = first if stash is not None else 0
    factors = (scale * LOG2E, 0.0) if softcap is None else (scale / softcap, softcap * LOG2E)
    attention_kernel[(blocks, parts, batch * kv_heads)](
        q, k_cache, v_cache, lengths.contiguous(), k, v, topology.ancestor_bits(), topology.depths.contiguous(),
        stash_k, stash_v, partial, lse,
        n, first, new_from, context, chunk, window or 0, *factors,
        *q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        *stash_k.stride()[:3], *stash_v.stride()[:3],
        **attention_constants(
            tile, dim, value_dim, kv_heads, shared, n, window=window is not None, softcap=softcap is not None,
            direct=parts == 1, keep=stash is not None, known=new_from > 0, shares=shares,
        ),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if parts > 1:
        merge_kernel[(heads, rows, batch)](
            partial, lse, out, parts, **merge_constants(kv_heads, shared, value_dim), num_warps=4
        )
    return out


def split_context(context: int, programs: int, keys: int) -> tuple[int, int]:
    """Cut a cache of this capacity into parts, as many as fill a GPU: their number and the rows of each.

    Capacity and other shapes decide, no length: a launch that is captured once serves every step.

    Args:
        context: capacity of the cache in rows.
        programs: programs of the launch if the context were one part.
        keys: rows of the cache in a pass of the kernel's loop.
    """
    wanted = max(1, min(PROGRAMS // programs, MAX_PARTS))
    chunk = max(-(-context // wanted), LEAST_CHUNK)
    chunk = -(-chunk // keys) * keys
    return max(1, -(-context // chunk)), chunk


PROGRAMS = 132  # multiprocessors of an H100 or H200; a fixed number, so that results do not depend on the chip
MAX_PARTS, LEAST_CHUNK = 128, 64
LOG2E = 1.4426950408889634  # GPUs raise 2 to a power; scores are scaled once for it


def _check_dims(op: str, *, k_cache: Tensor, v_cache: Tensor, **rows: Tensor) -> tuple[int, int]:
    """Require head sizes that the kernels have tiles for and rows that are contiguous; return the sizes of k and v."""
    dims = k_cache.shape[3], v_cache.shape[3]
    for name, size, most in zip("kv", dims, MAX_ATTENTION_HEADDIMS, strict=True):
        check_limit(op, f"a head size of {name}", size, most)
    for name, tensor in {"k_cache": k_cache, "v_cache": v_cache, **rows}.items():
        check_inner(name, tensor)
    return dims


def _is_prefix(values: Tensor, keys: Tensor) -> bool:
    """Tell whether values are the first columns of the keys, as those of latents are; then they are read once."""
    same = values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride()
    return same and values.shape[3] == split_head(keys.shape[3])[0]


def split_head(dim: int) -> tuple[int, int]:
    """Cut a head of keys into two tiles' columns: a head of 576 as 512 and 64, one of up to 256 not at all."""
    main = dim if dim <= 256 else 1 << (dim.bit_length() - 1)
    return main, dim - main


def attention_constants(
    tile: AttentionTile,
    dim: int,
    value_dim: int,
    kv_heads: int,
    shared: int,
    n: int,
    *,
    window: bool,
    softcap: bool,
    direct: bool,
    keep: bool,
    known: bool,
    shares: bool = False,
) -> dict[str, Any]:
    """List the compile-time constants of a build; ahead-of-time builds take theirs from here too."""
    main, rest = split_head(dim)
    return {
        "HEADS": kv_heads, "SHARED": shared, "DIM": dim, "VALUE_DIM": value_dim,
        "BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "BLOCK_T": 16,  # nodes in a pass; with more, 64 nodes spill
        "BLOCK_D": padded(main), "BLOCK_E": padded(rest) if rest else 0, "BLOCK_V": padded(value_dim),
        "WORDS": -(-n // 32), "SHARES": shares,
        "WINDOW": window, "SOFTCAP": softcap, "DIRECT": direct, "KEEP": keep, "KNOWN": known,
        "WIDE": interpreted(),  # the interpreter multiplies bfloat16 as if it were integers
        "EXACT": tile.precision,
    }  # fmt: skip


def merge_constants(kv_heads: int, shared: int, value_dim: int) -> dict[str, Any]:
    """List the compile-time constants of the merge; the same for any number of parts, which grows with a context."""
    return {
        "HEADS": kv_heads, "SHARED": shared, "VALUE_DIM": value_dim, "BLOCK_V": padded(value_dim),
        "PARTS": MAX_PARTS, "BLOCK_P": max(8, min(64, 8192 // padded(value_dim))),
    }  # fmt: skip


def kv_commit_constants(dim: int, value_dim: int, *, after: bool) -> dict[str, Any]:
    """List the compile-time constants of the append; `after`: the lengths count the path already."""
    return {
        "DIM": dim, "VALUE_DIM": value_dim, "ENTRIES": 8, "BLOCK_D": padded(dim), "BLOCK_V": padded(value_dim),
        "AFTER": after,
    }  # fmt: skip
