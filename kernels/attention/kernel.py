"""Tree attention in Triton: the context split over programs (flash-decoding), the tree under ancestor bit masks.

A program owns a tile of rows, each a node and a query head of one group, so that grouped heads share what is read of
the cache.  The context is cut into parts by the capacity of the cache alone; lengths are read on the device.  The last
part has the tree besides, and writes its new rows into the stash.  Where there is more than one part, a second, small
launch merges them: outputs in the dtype of the queries by weights in float32.  `docs/gpu.md` has the costs.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from stree.kernels.attention.append import append, check_dims
from stree.kernels.attention.device_functions import absorb, attend_cache, load_rows, scores, sees, take_rows
from stree.kernels.dispatch import Operands, shared_memory
from stree.kernels.jit import jit
from stree.kernels.launch import strides
from stree.kernels.tiles import (
    MAX_NODES,
    AttentionTile,
    check_inner,
    check_kernel_dtypes,
    check_limit,
    interpreted,
    padded,
)

__all__ = ["attention_step", "tree_attention"]


@jit(fuses=True, do_not_specialize=["n", "first", "new_from", "context", "chunk", "window"])
def attention_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, lengths_ptr, k_ptr, v_ptr, bits_ptr, depths_ptr, stash_k_ptr, stash_v_ptr,
    out_ptr, lse_ptr,
    n, first, new_from, context, chunk, window, scale, softcap,
    stride_q_b, stride_q_n, stride_q_h,
    stride_k_cache_b, stride_k_cache_h, stride_k_cache_l, stride_v_cache_b, stride_v_cache_h, stride_v_cache_l,
    stride_k_b, stride_k_n, stride_k_h, stride_v_b, stride_v_n, stride_v_h,
    stride_stash_k_b, stride_stash_k_n, stride_stash_k_h, stride_stash_v_b, stride_stash_v_n, stride_stash_v_h,
    HEADS: tl.constexpr, SHARED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr, WORDS: tl.constexpr, SHARES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DIRECT: tl.constexpr, KEEP: tl.constexpr, KNOWN: tl.constexpr,
    WIDE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attend from some rows (node, query head) to a part of the context; grid (rows, parts, batch x key heads).

    The last part has the tree besides.  A part beyond a sequence's length writes a log-sum-exp of -inf and no outputs.
    Columns of keys beyond BLOCK_D are in a tile of BLOCK_E.  SHARES: values are the first columns of the keys.
    """
    batch = (tl.program_id(2) // HEADS).to(tl.int64)
    head = (tl.program_id(2) % HEADS).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    asked = row < (n - first) * SHARED
    local = row // SHARED
    node = first + local
    query_head = head * SHARED + row % SHARED
    # A stride may be large in an odd layout: products with indices of rows are 64 bits wide, here and below.
    query_ptr = q_ptr + batch * stride_q_b + local.to(tl.int64) * stride_q_n + query_head * stride_q_h
    query = load_rows(query_ptr, d, asked, DIM, False, WIDE)
    query_rest = None
    if BLOCK_E:
        e = BLOCK_D + tl.arange(0, BLOCK_E)
        query_rest = load_rows(query_ptr, e, asked, DIM, False, WIDE)
    length = tl.load(lengths_ptr + batch).to(tl.int32)
    bits_ptr += batch * n * WORDS
    depths_ptr += batch * n
    depth = tl.load(depths_ptr + node, asked, 0) if WINDOW else node
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)

    k_cache_ptr += batch * stride_k_cache_b + head * stride_k_cache_h
    v_cache_ptr += batch * stride_v_cache_b + head * stride_v_cache_h
    begin = part * chunk
    end = tl.minimum(tl.minimum(begin + chunk, context), length)
    oldest = length + depth - window
    if WINDOW:
        begin = tl.maximum(begin, length - window + 1)  # what the root sees, which sees most
    else:  # whole passes need no masks, which would cost as much as the exponentials
        whole = begin + tl.maximum(end - begin, 0) // BLOCK_N * BLOCK_N
        top, norm, out = attend_cache(
            query, query_rest, k_cache_ptr, v_cache_ptr, stride_k_cache_l, stride_v_cache_l, begin, whole,
            asked, oldest, top, norm, out, scale, softcap,
            DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_E, BLOCK_V, SHARES, False, WINDOW, SOFTCAP, WIDE, EXACT,
        )  # fmt: skip
        begin = whole
    top, norm, out = attend_cache(
        query, query_rest, k_cache_ptr, v_cache_ptr, stride_k_cache_l, stride_v_cache_l, begin, end,
        asked, oldest, top, norm, out, scale, softcap,
        DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_E, BLOCK_V, SHARES, True, WINDOW, SOFTCAP, WIDE, EXACT,
    )  # fmt: skip

    if part == parts - 1:
        k_ptr += batch * stride_k_b + head * stride_k_h
        v_ptr += batch * stride_v_b + head * stride_v_h
        stash_k_ptr += batch * stride_stash_k_b + head * stride_stash_k_h
        stash_v_ptr += batch * stride_stash_v_b + head * stride_stash_v_h
        for start in range(0, n, BLOCK_T):
            other = start + tl.arange(0, BLOCK_T)
            is_new, known = (other >= new_from) & (other < n), other < new_from
            new, old = (other - new_from).to(tl.int64), other.to(tl.int64)
            key = take_rows(
                k_ptr + new * stride_k_n, stash_k_ptr + old * stride_stash_k_n, d, is_new, known, DIM, KEEP, KNOWN, WIDE
            )
            key_rest = None
            if BLOCK_E:
                key_rest = take_rows(
                    k_ptr + new * stride_k_n, stash_k_ptr + old * stride_stash_k_n, BLOCK_D + tl.arange(0, BLOCK_E),
                    is_new, known, DIM, KEEP, KNOWN, WIDE,
                )  # fmt: skip
            visible = asked[:, None] & sees(bits_ptr, node, other, n, WORDS)
            if WINDOW:
                above = tl.load(depths_ptr + other, other < n, 0)
                visible = visible & (depth[:, None] - above[None, :] < window)
            score = scores(query, query_rest, key, key_rest, scale, softcap, SOFTCAP, EXACT)
            score = tl.where(visible, score, float("-inf"))
            value = key
            if not SHARES:
                value = take_rows(
                    v_ptr + new * stride_v_n, stash_v_ptr + old * stride_stash_v_n, dv, is_new, known, VALUE_DIM,
                    KEEP, KNOWN, WIDE,
                )  # fmt: skip
            # The product below multiplies values that a row does not see by 0, so they must be finite.
            value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
            top, norm, out = absorb(score, value, top, norm, out, EXACT)

    empty = norm == 0.0  # no key was seen; a broken one makes NaN, which must come out
    norm = tl.where(empty, 1.0, norm)
    out = out / norm[:, None]
    if DIRECT:
        rows_ptr = ((batch * (n - first) + local) * HEADS * SHARED + query_head) * VALUE_DIM
        tl.store(out_ptr + rows_ptr[:, None] + dv[None, :], out, asked[:, None] & (dv < VALUE_DIM)[None, :])
    else:
        rows = ((batch * HEADS + head) * parts + part) * (n - first) * SHARED + row
        tl.store(lse_ptr + rows, top + tl.log2(norm), asked)
        mask = (asked & ~empty)[:, None] & (dv < VALUE_DIM)[None, :]
        tl.store(out_ptr + rows[:, None] * VALUE_DIM + dv[None, :], out, mask)


@jit(fuses=True, do_not_specialize=["parts"])
def merge_kernel(
    part_ptr, lse_ptr, out_ptr, parts,
    HEADS: tl.constexpr, SHARED: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Weight the parts of one row by their log-sum-exps, to the base 2; grid (query heads, new nodes, batch)."""
    query_head, local, rows = tl.program_id(0), tl.program_id(1), tl.num_programs(1) * SHARED
    batch = tl.program_id(2).to(tl.int64)
    row = local * SHARED + query_head % SHARED
    first_row = (batch * HEADS + query_head // SHARED) * parts * rows + row  # of part 0; the next is `rows` further
    every = tl.arange(0, PARTS)
    dv = tl.arange(0, BLOCK_V)
    every_lse = tl.load(lse_ptr + first_row + every * rows, every < parts, float("-inf"))
    top = tl.max(every_lse, 0)
    norm = tl.sum(tl.exp2(every_lse - top), 0)
    out = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, parts, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        lse = tl.load(lse_ptr + first_row + part * rows, part < parts, float("-inf"))
        mask = (lse != float("-inf"))[:, None] & (dv < VALUE_DIM)[None, :]
        partial = tl.load(part_ptr + (first_row + part * rows)[:, None] * VALUE_DIM + dv[None, :], mask, 0.0)
        out += tl.sum(partial.to(tl.float32) * tl.exp2(lse - top)[:, None], 0)
    row_ptr = ((batch * tl.num_programs(1) + local) * HEADS * SHARED + query_head) * VALUE_DIM
    tl.store(out_ptr + row_ptr + dv, out / norm, dv < VALUE_DIM)


def tree_attention(a: Operands) -> Tensor:
    """Attend from every node to the cached context and to its own ancestors; see `stree.kernels.ops`."""
    check_kernel_dtypes("tree_attention", q=a.q, k_cache=a.k_cache, v_cache=a.v_cache, k=a.k, v=a.v)
    return _attend("tree_attention", a, (a.k, a.v), keep=False)


def attention_step(a: Operands) -> Tensor:
    """Append the last path, stash the new rows, attend from the new tree; see `stree.kernels.ops`."""
    cache, stash = {"k_cache": a.k_cache, "v_cache": a.v_cache}, {"stash_k": a.stash_k, "stash_v": a.stash_v}
    check_kernel_dtypes("attention_step", q=a.q, **cache, k=a.k, v=a.v, **stash)
    if a.accepted is not None:
        path = a.accepted.rows, a.accepted.lengths
        append("attention_step", (*cache.values(), a.lengths), (a.stash_k, a.stash_v), path, lengths_count_path=True)
    return _attend("attention_step", a, (a.stash_k, a.stash_v), keep=True)


def _attend(op: str, a: Operands, stash: tuple[Tensor, Tensor], *, keep: bool) -> Tensor:
    """Launch the attention over the parts of the context and the tree, then the merge of the parts.

    Args:
        op: name of the operation.
        a: its operands.
        stash: keys and values of the nodes below `first`, written if `keep`.
        keep: whether new rows are stashed; if not, k and v hold all nodes.
    """
    stash_k, stash_v = stash
    dim, value_dim = check_dims(
        op, k_cache=a.k_cache, v_cache=a.v_cache, k=a.k, v=a.v, stash_k=stash_k, stash_v=stash_v
    )
    check_inner("q", a.q)
    (batch, rows, heads, _), (kv_heads, context) = a.q.shape, a.k_cache.shape[1:3]
    n, shared, device = a.topology.num_nodes, heads // kv_heads, a.q.device
    check_limit(op, "trees of nodes", n, MAX_NODES)
    new_from = a.first if keep else 0
    main, rest = split_head(dim)
    needs_tight = new_from > 0 or a.softcap is not None or shared_memory(device) < MOST_SHARED
    for is_tight in (needs_tight, True):
        tile = AttentionTile.of(rows * shared, max(dim, value_dim), a.q.dtype, is_tight=is_tight)
        blocks = -(-rows * shared // tile.rows)
        parts, chunk = split_context(context, blocks * batch * kv_heads, tile.keys)
        if is_tight or parts > 1:  # one part is one more thing in registers
            break
    out = torch.empty(batch, rows, heads, value_dim, dtype=a.q.dtype, device=device)
    partial, lse = out, None
    if parts > 1:
        sizes = (batch, kv_heads, parts, rows * shared)
        partial = torch.empty(*sizes, value_dim, dtype=a.q.dtype, device=device)
        lse = torch.empty(sizes, dtype=torch.float32, device=device)
    factors = (a.scale * LOG2E, 0.0) if a.softcap is None else (a.scale / a.softcap, a.softcap * LOG2E)
    attention_kernel[(blocks, parts, batch * kv_heads)](
        a.q, a.k_cache, a.v_cache, a.lengths.contiguous(), a.k, a.v, a.topology.bits,
        a.topology.depths.contiguous(), stash_k, stash_v, partial, lse,
        n, a.first, new_from, context, chunk, a.window or 0, *factors,
        *strides(a.q, 3), *strides(a.k_cache, 3), *strides(a.v_cache, 3), *strides(a.k, 3), *strides(a.v, 3),
        *strides(stash_k, 3), *strides(stash_v, 3),
        HEADS=kv_heads, SHARED=shared, DIM=dim, VALUE_DIM=value_dim, BLOCK_M=tile.rows, BLOCK_N=tile.keys,
        BLOCK_T=16,  # nodes in a pass; with more, 64 nodes spill
        BLOCK_D=padded(main), BLOCK_E=padded(rest) if rest else 0, BLOCK_V=padded(value_dim), WORDS=-(-n // 32),
        SHARES=_is_prefix(a.v_cache, a.k_cache) and _is_prefix(stash_v, stash_k),
        WINDOW=a.window is not None, SOFTCAP=a.softcap is not None, DIRECT=parts == 1, KEEP=keep, KNOWN=new_from > 0,
        WIDE=interpreted(),  # the interpreter multiplies bfloat16 as if it were integers
        EXACT=tile.precision, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if parts > 1:
        block = padded(value_dim)
        merge_kernel[(heads, rows, batch)](
            partial, lse, out, parts, HEADS=kv_heads, SHARED=shared, VALUE_DIM=value_dim, BLOCK_V=block,
            PARTS=MAX_PARTS,  # the same for any number of parts, which grows with a context
            BLOCK_P=max(8, min(64, 8192 // block)), num_warps=4,
        )  # fmt: skip
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


MOST_SHARED = 139264  # bytes of shared memory of the largest tile on GPUs before the H100
PROGRAMS = 132  # multiprocessors of an H100 or H200; a fixed number, so that results do not depend on the chip
MAX_PARTS, LEAST_CHUNK = 128, 64
LOG2E = 1.4426950408889634  # GPUs raise 2 to a power; scores are scaled once for it


def _is_prefix(values: Tensor, keys: Tensor) -> bool:
    """Whether values are the first columns of the keys, as those of latents are; then they are read once."""
    same = values.data_ptr() == keys.data_ptr() and values.stride() == keys.stride()
    return same and values.shape[3] == split_head(keys.shape[3])[0]


def split_head(dim: int) -> tuple[int, int]:
    """Cut a head of keys into two tiles' columns: a head of 576 as 512 and 64, one of up to 256 not at all."""
    main = dim if dim <= 256 else 1 << (dim.bit_length() - 1)
    return main, dim - main
