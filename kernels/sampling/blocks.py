"""Blocks of a vocabulary, each read by a program of its own, in Triton: what draws and softmaxes share."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, no-any-return, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree.kernels.jit import jit
from stree.kernels.sampling.reference import UNITS
from stree.kernels.tiles import check_inner, check_kernel_dtypes, check_limit, padded

__all__ = [
    "MAX_VOCAB",
    "block_constants",
    "blocks_of",
    "end_of",
    "first_best",
    "is_aligned",
    "row_of",
    "scores_of",
    "weights_of",
]

MAX_VOCAB = 1 << 20
BLOCK = 4096  # of a vocabulary in one program


@triton.jit
def row_of(base_ptr, row, stride, ALIGNED: tl.constexpr):
    """Point at a row of a vocabulary; ALIGNED: by 16 bytes, which Triton would otherwise infer from n."""
    found = base_ptr + row.to(tl.int64) * stride
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def end_of(vocab, ALIGNED: tl.constexpr):
    """Return the size of a vocabulary, for ALIGNED rows in a form that lets masked loads be 16 bytes wide."""
    return vocab // 8 * 8 if ALIGNED else vocab


@triton.jit
def weights_of(dist_ptr, index, vocab, UNITS: tl.constexpr):
    """Load weights of a distribution as integers; the product is exact, so a fused multiply-add changes nothing."""
    probs = tl.load(dist_ptr + index, index < vocab, 0.0).to(tl.float64)
    return (probs * UNITS + 0.5).to(tl.int64)


@triton.jit
def scores_of(score_ptr, index, is_token):
    """Load logits in float32, NaN as -inf."""
    score = tl.load(score_ptr + index, is_token, float("-inf")).to(tl.float32)
    return tl.where(score == score, score, float("-inf"))


@triton.jit
def first_best(score, index, vocab):
    """Find the least index of the largest score."""
    return tl.min(tl.where(score == tl.max(score, 0), index, vocab), 0)


@jit(fuses=False, do_not_specialize=["vocab", "stride_b", "stride_r"], do_not_specialize_on_alignment=["score_ptr"])
def blocks_kernel(
    score_ptr, block_ptr, vocab, stride_b, stride_r,
    GREEDY: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Sum the weights of one block of a row, or find its best token; grid (rows, blocks, batch)."""
    row, block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    score_ptr = row_of(score_ptr + batch * stride_b, row, stride_r, ALIGNED)
    vocab = end_of(vocab, ALIGNED)
    index = block * BLOCK + tl.arange(0, BLOCK)
    if GREEDY:
        found = first_best(scores_of(score_ptr, index, index < vocab), index, vocab).to(tl.int64)
    else:
        found = tl.sum(weights_of(score_ptr, index, vocab, UNITS), 0)
    tl.store(block_ptr + (batch * tl.num_programs(0) + row) * tl.num_programs(1) + block, found)


def blocks_of(op: str, scores: Tensor, *, is_greedy: bool = False) -> tuple[Tensor, dict[str, Any]]:
    """Launch the sums of the blocks of every row, or their best tokens; return them and what later launches share.

    Returns:
        int64[batch, rows, blocks] and constants.
    """
    check_kernel_dtypes(op, scores=scores)
    check_limit(op, "a vocabulary", scores.shape[2], MAX_VOCAB)
    check_inner("scores", scores)
    batch, rows, vocab = scores.shape
    constants = block_constants(vocab, is_aligned(scores))
    blocks = torch.empty(batch, rows, -(-vocab // constants["BLOCK"]), dtype=torch.int64, device=scores.device)
    blocks_kernel[(rows, blocks.shape[2], batch)](
        scores, blocks, vocab, *scores.stride()[:2], GREEDY=is_greedy, UNITS=UNITS,
        BLOCK=constants["BLOCK"], ALIGNED=constants["ALIGNED"], num_warps=8,
    )  # fmt: skip
    return blocks, constants


def block_constants(vocab: int, aligned: bool) -> dict[str, Any]:
    """List the compile-time constants of kernels that split a vocabulary."""
    block = min(BLOCK, padded(vocab))
    return {"BLOCK": block, "BLOCKS": padded(-(-vocab // block)), "ALIGNED": aligned}


def is_aligned(scores: Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes and has a multiple of 8 tokens: a matter of the vocabulary."""
    places = (scores.data_ptr(), *(stride * scores.itemsize for stride in scores.stride()[:2]))
    return scores.shape[-1] % 8 == 0 and all(place % 16 == 0 for place in places)
