"""Triton code of tree attention; `stree.kernels.attention` launches it, `kernels/README.md` derives it."""

# mypy: disable-error-code="no-untyped-def, no-any-return, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


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
    """Score keys [keys, d] by queries [rows, d], whose last columns may stand apart; in units of log 2."""
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
    """Load [rows, columns] from pointers to the rows' beginnings; 0 outside.  FULL: no column stands beyond WIDTH."""
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

    With `tree_kernels.is_ancestor` in its place 16 nodes of heads of 224 spill on sm_90.
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
    Columns of keys beyond BLOCK_D stand in a tile of BLOCK_E.  SHARES: values are the first columns of the keys.
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
    first_row = (batch * HEADS + query_head // SHARED) * parts * rows + row  # of part 0; the next stands `rows` on
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


@triton.jit(do_not_specialize=["sequences", "limit", "path_size"])
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
