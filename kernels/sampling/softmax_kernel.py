"""Softmax of logits and its norms in Triton: two launches, each of one program for every block of a vocabulary.

How a row is split depends on its vocabulary alone, so its probabilities are the same in any batch.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree.kernels.jit import jit
from stree.kernels.sampling.blocks import block_constants, end_of, is_aligned, row_of

__all__ = ["probs", "probs_and_norms"]


@triton.jit
def _quotients(
    logit_ptr, temperature_ptr, scale, row, batch, index, vocab, stride_t, stride_b, stride_r, ALIGNED: tl.constexpr
):  # fmt: skip
    """Load logits of a row and divide them by its temperature."""
    if temperature_ptr is not None:
        scale = tl.div_rn(1.0, tl.load(temperature_ptr + batch * stride_t).to(tl.float32))
    logit_ptr = row_of(logit_ptr + batch * stride_b, row, stride_r, ALIGNED)
    return tl.load(logit_ptr + index, index < vocab, float("-inf")).to(tl.float32) * scale


@jit(
    fuses=False,
    do_not_specialize=["scale", "vocab", "stride_t", "stride_b", "stride_r"],
    do_not_specialize_on_alignment=["logit_ptr"],
)
def masses_kernel(
    logit_ptr, part_ptr, temperature_ptr, scale, vocab, stride_t, stride_b, stride_r,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Find one block's maximum m and its sums of e^(x - m) and e^2(x - m); grid (rows, blocks, batch)."""
    row, block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks = tl.num_programs(1)
    index = block * BLOCK + tl.arange(0, BLOCK)
    score = _quotients(
        logit_ptr, temperature_ptr, scale, row, batch, index, end_of(vocab, ALIGNED), stride_t, stride_b, stride_r,
        ALIGNED,
    )  # fmt: skip
    best = tl.maximum(tl.max(score, 0), -3.4028234663852886e38)
    share = tl.exp(score - best)
    part_ptr += (batch * tl.num_programs(0) + row) * 3 * blocks + block
    tl.store(part_ptr, best)
    tl.store(part_ptr + blocks, tl.sum(share, 0))
    tl.store(part_ptr + 2 * blocks, tl.sum(share * share, 0))


@jit(
    fuses=False,
    do_not_specialize=["scale", "vocab", "stride_t", "stride_b", "stride_r", "stride_probs_b", "stride_probs_r"],
    do_not_specialize_on_alignment=["logit_ptr", "probs_ptr", "norm_ptr"],
)
def probs_kernel(
    logit_ptr, part_ptr, probs_ptr, norm_ptr, temperature_ptr, scale, vocab, stride_t, stride_b, stride_r,
    stride_probs_b, stride_probs_r, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write one block of a row's softmax, and the row's norm if asked; grid (rows, blocks, batch)."""
    row, block, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks = tl.num_programs(1)
    vocab = end_of(vocab, ALIGNED)
    index = block * BLOCK + tl.arange(0, BLOCK)
    score = _quotients(
        logit_ptr, temperature_ptr, scale, row, batch, index, vocab, stride_t, stride_b, stride_r, ALIGNED
    )
    place = batch * tl.num_programs(0) + row
    part = tl.arange(0, BLOCKS)
    part_ptr += place * 3 * blocks + part
    best = tl.load(part_ptr, part < blocks, -3.4028234663852886e38)
    top = tl.max(best, 0)
    share = tl.exp(best - top)
    inverse = tl.div_rn(1.0, tl.sum(tl.load(part_ptr + blocks, part < blocks, 0.0) * share, 0))
    probs_ptr = row_of(probs_ptr + batch * stride_probs_b, row, stride_probs_r, ALIGNED)
    tl.store(probs_ptr + index, tl.exp(score - top) * inverse, index < vocab)
    if norm_ptr is not None:
        squares = tl.sum(tl.load(part_ptr + 2 * blocks, part < blocks, 0.0) * (share * share), 0)
        tl.store(norm_ptr + place, tl.sqrt_rn(squares) * inverse, block == 0)


def probs(logits: Tensor, temperature: float | Tensor, out: Tensor | None) -> Tensor:
    """Compute the softmax of rows of logits; see `stree.kernels.sampling.softmax`."""
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device) if out is None else out
    _launch(logits, temperature, out, None)
    return out


def probs_and_norms(logits: Tensor, temperature: float | Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the softmax of rows of logits and its norms; see `stree.kernels.sampling.softmax`."""
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device) if out is None else out
    norms = out.new_empty(out.shape[:-1])
    _launch(logits, temperature, out, norms)
    return out, norms


def _launch(logits: Tensor, temperature: float | Tensor, out: Tensor, norms: Tensor | None) -> None:
    """Launch the programs for the blocks of every row of [batch, rows, vocab] or [rows, vocab]."""
    # Every row of a matrix has its own temperature: it is a batch entry.
    batch_dim = 1 if isinstance(temperature, Tensor) else 0
    logits, out = (tensor if tensor.dim() == 3 else tensor.unsqueeze(batch_dim) for tensor in (logits, out))
    logits = logits if logits.stride(2) == 1 else logits.contiguous()
    batch, rows, vocab = logits.shape
    if not batch * rows:
        return
    of_rows = temperature if isinstance(temperature, Tensor) else None
    stride, scale = (0, 1 / temperature) if of_rows is None else (of_rows.stride(0), 1.0)
    constants = block_constants(vocab, is_aligned(logits) and is_aligned(out))
    block, aligned = constants["BLOCK"], constants["ALIGNED"]
    warps = max(1, block // 512)
    parts = out.new_empty(batch, rows, 3, -(-vocab // block))
    grid, given = (rows, parts.shape[3], batch), (of_rows, scale, vocab, stride, *logits.stride()[:2])
    with torch.cuda.device_of(logits):  # Triton launches on the current device, wherever the tensors are
        masses_kernel[grid](logits, parts, *given, BLOCK=block, ALIGNED=aligned, num_warps=warps)
        probs_kernel[grid](logits, parts, out, norms, *given, *out.stride()[:2], **constants, num_warps=warps)
