"""Triton code of distributions and their norms; `stree.kernels.law` launches it."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["rows", "stride_logit_b", "stride_logit_r", "stride_law_b", "stride_law_r"],
    do_not_specialize_on_alignment=["logit_ptr", "law_ptr", "norm_ptr"],
)
def probs_kernel(
    logit_ptr, probs_ptr, norm_ptr, rows, vocab, scale, stride_logit_b, stride_logit_r, stride_probs_b, stride_probs_r,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute the softmax of one row of scaled logits, and its Euclidean norm if asked; grid (rows, batch)."""
    row = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    logit_ptr += batch * stride_logit_b + row * stride_logit_r
    probs_ptr += batch * stride_probs_b + row * stride_probs_r
    if ALIGNED:  # said once for every tree, as in `draw_kernel`
        logit_ptr = tl.multiple_of(logit_ptr, 16)
        probs_ptr = tl.multiple_of(probs_ptr, 16)
    lane = tl.arange(0, BLOCK)
    # Every lane has a maximum and a sum of its own; one exponential serves whichever of the two is to be scaled.
    best = tl.full((BLOCK,), -3.4028234663852886e38, tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        index = start + lane
        score = tl.load(logit_ptr + index, index < vocab, float("-inf")).to(tl.float32) * scale
        gap = score - best
        share = tl.exp(-tl.abs(gap))
        mass = tl.where(gap > 0, mass * share + 1.0, mass + share)
        best = tl.maximum(best, score)
    top = tl.max(best, 0)
    inverse = tl.div_rn(1.0, tl.sum(mass * tl.exp(best - top), 0))
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        index = start + lane
        score = tl.load(logit_ptr + index, index < vocab, float("-inf")).to(tl.float32) * scale
        probs = tl.exp(score - top) * inverse
        tl.store(probs_ptr + index, probs, index < vocab)
        squares += probs * probs
    if norm_ptr is not None:
        tl.store(norm_ptr + batch * rows + row, tl.sqrt_rn(tl.sum(squares, 0)))
