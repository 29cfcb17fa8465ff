"""Appending the rows of an accepted path to the caches of keys and values, in Triton: one launch for all layers."""

# mypy: disable-error-code="no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from stree.kernels.dispatch import Operands
from stree.kernels.jit import jit
from stree.kernels.launch import strides
from stree.kernels.tiles import MAX_ATTENTION_HEADDIMS, check_inner, check_kernel_dtypes, check_limit, padded
from stree.kernels.topology import AcceptedPath

__all__ = ["append", "check_dims", "kv_commit", "kv_commit_kernel"]


@jit(fuses=True, do_not_specialize=["sequences", "limit", "path_size"])
def kv_commit_kernel(
    k_cache_ptr, v_cache_ptr, lengths_ptr, k_ptr, v_ptr, path_ptr, path_lengths_ptr, sequences, limit, path_size,
    stride_k_cache_b, stride_k_cache_h, stride_k_cache_l, stride_v_cache_b, stride_v_cache_h, stride_v_cache_l,
    stride_k_b, stride_k_n, stride_k_h, stride_v_b, stride_v_n, stride_v_h,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ENTRIES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    AFTER: tl.constexpr,
):  # fmt: skip
    """Append the rows of a path to one head's cache; grid (key heads, layers x sequences).

    AFTER: lengths count them already.
    """
    head = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    sequence = batch % sequences
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    count = tl.load(path_lengths_ptr + sequence).to(tl.int32)
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    if AFTER:
        length -= count
    k_cache_ptr += batch * stride_k_cache_b + head * stride_k_cache_h
    v_cache_ptr += batch * stride_v_cache_b + head * stride_v_cache_h
    k_ptr += batch * stride_k_b + head * stride_k_h
    v_ptr += batch * stride_v_b + head * stride_v_h
    for start in range(0, count, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        place = (length + entry).to(tl.int64)
        moves = (entry < count) & (entry < path_size) & (place >= 0) & (place < limit)
        row = tl.load(path_ptr + sequence * path_size + entry, moves, 0).to(tl.int64)
        mask = moves[:, None] & (d < DIM)[None, :]
        key = tl.load(k_ptr + (row * stride_k_n)[:, None] + d[None, :], mask, 0.0)
        tl.store(k_cache_ptr + (place * stride_k_cache_l)[:, None] + d[None, :], key, mask)
        mask = moves[:, None] & (dv < VALUE_DIM)[None, :]
        value = tl.load(v_ptr + (row * stride_v_n)[:, None] + dv[None, :], mask, 0.0)
        tl.store(v_cache_ptr + (place * stride_v_cache_l)[:, None] + dv[None, :], value, mask)


def kv_commit(a: Operands) -> None:
    """Append the accepted rows of K and V to the caches, in place; see `stree.kernels.ops`."""
    check_kernel_dtypes("kv_commit", k_cache=a.k_cache, v_cache=a.v_cache, k=a.k, v=a.v)
    bare = (a.path.rows, a.path.lengths) if isinstance(a.path, AcceptedPath) else (a.path, a.path_lengths)
    append("kv_commit", (a.k_cache, a.v_cache, a.lengths), (a.k, a.v), bare, lengths_count_path=False)


def append(
    op: str, cache: tuple[Tensor, Tensor, Tensor], new: tuple[Tensor, Tensor], path: tuple[Tensor, Tensor], *,
    lengths_count_path: bool,
) -> None:  # fmt: skip
    """Launch the kernel that appends a path's rows to the caches, of as many layers as there are."""
    (k_cache, v_cache, lengths), (k, v), (nodes, path_lengths) = cache, new, path
    dim, value_dim = check_dims(op, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    kv_commit_kernel[(k_cache.shape[1], k_cache.shape[0])](
        k_cache, v_cache, lengths.contiguous(), k, v, nodes.contiguous(), path_lengths.contiguous(),
        lengths.shape[0], k_cache.shape[2], nodes.shape[1],
        *strides(k_cache, 3), *strides(v_cache, 3), *strides(k, 3), *strides(v, 3),
        DIM=dim, VALUE_DIM=value_dim, ENTRIES=8, BLOCK_D=padded(dim), BLOCK_V=padded(value_dim),
        AFTER=lengths_count_path, num_warps=4,
    )  # fmt: skip


def check_dims(op: str, *, k_cache: Tensor, v_cache: Tensor, **rows: Tensor) -> tuple[int, int]:
    """Require head sizes that the kernels have tiles for and rows that are contiguous; return the sizes of k and v."""
    dims = k_cache.shape[3], v_cache.shape[3]
    for name, size, most in zip("kv", dims, MAX_ATTENTION_HEADDIMS, strict=True):
        check_limit(op, f"a head size of {name}", size, most)
    for name, tensor in {"k_cache": k_cache, "v_cache": v_cache, **rows}.items():
        check_inner(name, tensor)
    return dims
