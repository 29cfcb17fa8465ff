"""Parts of the attention kernel: loads of rows, scores, the running softmax, the context, the ancestor bits."""

# mypy: disable-error-code="no-any-return, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["absorb", "attend_cache", "load_rows", "scores", "sees", "take_rows"]


@triton.jit
def _tanh(x):
    """Compute the hyperbolic tangent: below 0.3, where 1 - e^-2x rounds its digits away, by its series."""
    square = x * x
    series = x * (1.0 + square * (-0.33333334 + square * (0.13333334 + square * (-0.053968254 + square * 0.021869488))))
    power = tl.exp(-2.0 * tl.abs(x))
    quotient = (1.0 - power) / (1.0 + power)
    return tl.where(square < 0.09, series, tl.where(x < 0.0, -quotient, quotient))


@triton.jit
def scores(query, query_rest, key, key_rest, scale, softcap, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """Score keys [keys, d] by queries [rows, d], whose last columns may be a tensor of their own; in units of log 2."""
    score = tl.dot(query, tl.trans(key), input_precision=EXACT)
    if key_rest is not None:
        score = tl.dot(query_rest, tl.trans(key_rest), score, input_precision=EXACT)
    score *= scale
    if SOFTCAP:
        score = softcap * _tanh(score)
    return score


@triton.jit
def absorb(score, value, top, norm, out, EXACT: tl.constexpr):
    """Take more keys into a running softmax: its maximum and sum [rows], its weighted sum of values [rows, dv]."""
    new_top = tl.maximum(top, tl.max(score, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    kept = tl.exp2(top - base)
    weight = tl.exp2(score - base[:, None])
    out = tl.dot(weight.to(value.dtype), value, out * kept[:, None], input_precision=EXACT)
    return new_top, norm * kept + tl.sum(weight, 1), out


@triton.jit
def load_rows(row_ptr, column, inside, WIDTH: tl.constexpr, FULL: tl.constexpr, WIDE: tl.constexpr):
    """Load [rows, columns] from pointers to the rows' beginnings; 0 outside.  FULL: no column is beyond WIDTH."""
    pointers = row_ptr[:, None] + column[None, :]
    if inside is None:
        rows = tl.load(pointers) if FULL else tl.load(pointers, (column < WIDTH)[None, :], 0.0)
    else:
        rows = tl.load(pointers, inside[:, None] & (column < WIDTH)[None, :], 0.0)
    return rows.to(tl.float32) if WIDE else rows


@triton.jit
def attend_cache(
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
        key = load_rows(row_ptr, d, inside, DIM, DIM >= BLOCK_D, WIDE)
        key_rest = None
        if BLOCK_E:
            key_rest = load_rows(row_ptr, BLOCK_D + tl.arange(0, BLOCK_E), inside, DIM, DIM == BLOCK_D + BLOCK_E, WIDE)
        score = scores(query, query_rest, key, key_rest, scale, softcap, SOFTCAP, EXACT)
        if MASKED:
            visible = asked[:, None] & (place < end)[None, :]
            if WINDOW:
                visible = visible & (place[None, :] > oldest[:, None])
            score = tl.where(visible, score, float("-inf"))
        value = key
        if not SHARES:
            row_ptr = v_ptr + place.to(tl.int64) * stride_v
            value = load_rows(row_ptr, dv, inside, VALUE_DIM, VALUE_DIM == BLOCK_V, WIDE)
        top, norm, out = absorb(score, value, top, norm, out, EXACT)
    return top, norm, out


@triton.jit
def sees(bits_ptr, node, ancestor, n, WORDS: tl.constexpr):
    """Read bits `ancestor` of the rows `node` as [nodes, ancestors]; False outside the tree.

    With `device_functions.is_ancestor` in its place 16 nodes of heads of 224 spill on sm_90.
    """
    found = (node >= n)[:, None] & (ancestor < 0)[None, :]
    for word in tl.static_range(WORDS):
        bits = tl.load(bits_ptr + node * WORDS + word, mask=node < n, other=0)
        found = found | ((ancestor // 32 == word)[None, :] & (((bits[:, None] >> (ancestor % 32)[None, :]) & 1) != 0))
    return found


@triton.jit
def take_rows(
    new_ptr, stash_ptr, column, is_new, known, WIDTH: tl.constexpr, KEEP: tl.constexpr, KNOWN: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Load nodes' rows, new ones from the projection and older ones from the stash; KEEP: stash the new ones."""
    rows = load_rows(new_ptr, column, is_new, WIDTH, False, WIDE)
    if KEEP and tl.program_id(0) == 0:
        tl.store(stash_ptr[:, None] + column[None, :], rows, is_new[:, None] & (column < WIDTH)[None, :])
    if KNOWN:
        rows += load_rows(stash_ptr, column, known, WIDTH, False, WIDE)
    return rows
