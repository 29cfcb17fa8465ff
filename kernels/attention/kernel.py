"""Tree attention in Triton: the context split over programs (flash-decoding), the tree under ancestor bit masks.

A program owns a tile of rows, each a node and a query head of one group, so that grouped heads share what is read of
the cache.  The context is cut into parts by the capacity of the cache alone; lengths are read on the device.  The last
part has the tree besides, and writes its new rows into the stash.  Where there is more than one part, a second, small
launch merges them: outputs in the dtype of the queries by weights in float32.  `docs/gpu.md` has the costs.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree.kernels.attention.append import append, check_dims
from stree.kernels.tiles import (
    MAX_NODES,
    AttentionTile,
    check_inner,
    check_kernel_dtypes,
    check_limit,
    interpreted,
    padded,
)
from stree.kernels.topology import AcceptedPath, Topology

__all__ = ["attention_step", "tree_attention"]


@triton.jit
def _tanh(x):
    """Compute the hyperbolic tangent: below 0.3, where 1 - e^-2x rounds its digits away, by its series."""
    square = x * x
    series = x * (1.0 + square * (-0.33333334 + square * (0.13333334 + square * (-0.053968254 + square * 0.021869488))))
    power = tl.exp(-2.0 * tl.abs(x))
    quotient = (1.0 - power) / (1.0 + power)
    return tl.where(square < 0.09, series, tl.where(x < 0.0, -quotient, quotient))


@triton.jit
def _scores(query, query_rest, key, key_rest, scale, softcap, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """Score keys [keys, d] by queries [rows, d], whose last columns may be a tensor of their own; in units of log 2."""
    score = tl.dot(query, tl.trans(key), input_precision=EXACT)
    if key_rest is not None:
        score = tl.dot(query_rest, tl.trans(key_rest), score, input_precision=EXACT)
    score *= scale
    if SOFTCAP:
        score = softcap * _tanh(score)
    return score


@triton.jit
def _absorb(score, value, top, norm, out, EXACT: tl.constexpr):
    """Take more keys into a running softmax: its maximum and sum [rows], its weighted sum of values [rows, dv]."""
    new_top = tl.maximum(top, tl.max(score, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    kept = tl.exp2(top - base)
    weight = tl.exp2(score - base[:, None])
    out = tl.dot(weight.to(value.dtype), value, out * kept[:, None], input_precision=EXACT)
    return new_top, norm * kept + tl.sum(weight, 1), out


@triton.jit
def _load_rows(row_ptr, column, inside, WIDTH: tl.constexpr, FULL: tl.constexpr, WIDE: tl.constexpr):
    """Load [rows, columns] from pointers to the rows' beginnings; 0 outside.  FULL: no column is beyond WIDTH."""
    pointers = row_ptr[:, None] + column[None, :]
    if inside is None:
        rows = tl.load(pointers) if FULL else tl.load(pointers, (column < WIDTH)[None, :], 0.0)
    else:
        rows = tl.load(pointers, inside[:, None] & (column < WIDTH)[None, :], 0.0)
    return rows.to(tl.float32) if WIDE else rows


@triton.jit
def _attend_cache(
    query, query_rest, k_ptr, v_ptr, stride_k, stride_v, begin, end, asked, oldest, top, norm, out, scale, softcap,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr, SHARES: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Take rows begin to end of a cache into a running softmax; all passes are whole unless MASKED."""
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    for start in range(begin, end, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        inside = place < end if MASKED else None
        row_ptr = k_ptr + place.to(tl.int64) * stride_k
        key = _load_rows(row_ptr, d, inside, DIM, DIM >= BLOCK_D, WIDE)
        key_rest = None
        if BLOCK_E:
            key_rest = _load_rows(row_ptr, BLOCK_D + tl.arange(0, BLOCK_E), inside, DIM, DIM == BLOCK_D + BLOCK_E, WIDE)
        score = _scores(query, query_rest, key, key_rest, scale, softcap, SOFTCAP, EXACT)
        if MASKED:
            visible = asked[:, None] & (place < end)[None, :]
            if WINDOW:
                visible = visible & (place[None, :] > oldest[:, None])
            score = tl.where(visible, score, float("-inf"))
        value = key
        if not SHARES:
            row_ptr = v_ptr + place.to(tl.int64) * stride_v
            value = _load_rows(row_ptr, dv, inside, VALUE_DIM, VALUE_DIM == BLOCK_V, WIDE)
        top, norm, out = _absorb(score, value, top, norm, out, EXACT)
    return top, norm, out


@triton.jit
def _is_ancestor(bits_ptr, node, ancestor, n, WORDS: tl.constexpr):
    """Read bits `ancestor` of the rows `node` as [nodes, ancestors]; False outside the tree.

    With `device_functions.is_ancestor` in its place 16 nodes of heads of 224 spill on sm_90.
    """
    found = (node >= n)[:, None] & (ancestor < 0)[None, :]
    for word in tl.static_range(WORDS):
        bits = tl.load(bits_ptr + node * WORDS + word, mask=node < n, other=0)
        found = found | ((ancestor // 32 == word)[None, :] & (((bits[:, None] >> (ancestor % 32)[None, :]) & 1) != 0))
    return found


@triton.jit
def _take_rows(
    new_ptr, stash_ptr, column, is_new, known, WIDTH: tl.constexpr, KEEP: tl.constexpr, KNOWN: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Load nodes' rows, new ones from the projection and older ones from the stash; KEEP: stash the new ones."""
    rows = _load_rows(new_ptr, column, is_new, WIDTH, False, WIDE)
    if KEEP and tl.program_id(0) == 0:
        tl.store(stash_ptr[:, None] + column[None, :], rows, is_new[:, None] & (column < WIDTH)[None, :])
    if KNOWN:
        rows += _load_rows(stash_ptr, column, known, WIDTH, False, WIDE)
    return rows


@triton.jit(do_not_specialize=["n", "first", "new_from", "context", "chunk", "window"])
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
    query = _load_rows(query_ptr, d, asked, DIM, False, WIDE)
    query_rest = None
    if BLOCK_E:
        e = BLOCK_D + tl.arange(0, BLOCK_E)
        query_rest = _load_rows(query_ptr, e, asked, DIM, False, WIDE)
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
        top, norm, out = _attend_cache(
            query, query_rest, k_cache_ptr, v_cache_ptr, stride_k_cache_l, stride_v_cache_l, begin, whole,
            asked, oldest, top, norm, out, scale, softcap,
            DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_E, BLOCK_V, SHARES, False, WINDOW, SOFTCAP, WIDE, EXACT,
        )  # fmt: skip
        begin = whole
    top, norm, out = _attend_cache(
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
            key = _take_rows(
                k_ptr + new * stride_k_n, stash_k_ptr + old * stride_stash_k_n, d, is_new, known, DIM, KEEP, KNOWN, WIDE
            )
            key_rest = None
            if BLOCK_E:
                key_rest = _take_rows(
                    k_ptr + new * stride_k_n, stash_k_ptr + old * stride_stash_k_n, BLOCK_D + tl.arange(0, BLOCK_E),
                    is_new, known, DIM, KEEP, KNOWN, WIDE,
                )  # fmt: skip
            visible = asked[:, None] & _is_ancestor(bits_ptr, node, other, n, WORDS)
            if WINDOW:
                above = tl.load(depths_ptr + other, other < n, 0)
                visible = visible & (depth[:, None] - above[None, :] < window)
            score = _scores(query, query_rest, key, key_rest, scale, softcap, SOFTCAP, EXACT)
            score = tl.where(visible, score, float("-inf"))
            value = key
            if not SHARES:
                value = _take_rows(
                    v_ptr + new * stride_v_n, stash_v_ptr + old * stride_stash_v_n, dv, is_new, known, VALUE_DIM,
                    KEEP, KNOWN, WIDE,
                )  # fmt: skip
            # The product below multiplies values that a row does not see by 0, so they must be finite.
            value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
            top, norm, out = _absorb(score, value, top, norm, out, EXACT)

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


@triton.jit(do_not_specialize=["parts"])
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
    """Attend from every node to the cached context and to its own ancestors; see `stree.kernels.ops`."""
    check_kernel_dtypes("tree_attention", q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    return _attend(
        "tree_attention", q, (k_cache, v_cache, lengths), (k, v), topology,
        scale=scale, window=window, softcap=softcap, first=first,
    )  # fmt: skip


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
    """Append the last path, stash the new rows, attend from the new tree; see `stree.kernels.ops`."""
    check_kernel_dtypes(
        "attention_step", q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, stash_k=stash_k, stash_v=stash_v
    )
    cache = (k_cache, v_cache, lengths)
    if accepted is not None:
        path = accepted.rows, accepted.lengths
        append("attention_step", cache, (stash_k, stash_v), path, lengths_count_path=True)
    return _attend(
        "attention_step", q, cache, (k, v), topology, stash=(stash_k, stash_v),
        scale=scale, window=window, softcap=softcap, first=first,
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
    dim, value_dim = check_dims(op, k_cache=k_cache, v_cache=v_cache, k=k, v=v, stash_k=stash_k, stash_v=stash_v)
    check_inner("q", q)
    (batch, rows, heads, _), (kv_heads, context) = q.shape, k_cache.shape[1:3]
    n, shared = topology.num_nodes, heads // kv_heads
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


def _is_prefix(values: Tensor, keys: Tensor) -> bool:
    """Whether values are the first columns of the keys, as those of latents are; then they are read once."""
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
