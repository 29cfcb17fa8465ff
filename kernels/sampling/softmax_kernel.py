"""Softmax of logits and its norms in Triton: one launch, two reads of the logits and one write of the probabilities."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree.kernels.sampling.kernel import is_aligned
from stree.kernels.tiles import padded

__all__ = ["probs", "probs_and_norms", "probs_constants", "probs_warps"]

BLOCK = 8192  # of a vocabulary in one pass


@triton.jit(
    do_not_specialize=[
        "scale",
        "rows",
        "stride_t",
        "stride_logit_b",
        "stride_logit_r",
        "stride_probs_b",
        "stride_probs_r",
    ],
    do_not_specialize_on_alignment=["logit_ptr", "probs_ptr", "norm_ptr"],
)
def probs_kernel(
    logit_ptr, probs_ptr, norm_ptr, temperature_ptr, scale, rows, vocab, stride_t, stride_logit_b,
    stride_logit_r, stride_probs_b, stride_probs_r, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute the softmax of one row of logits at a temperature, and its norm if asked; grid (rows, batch)."""
    row = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    logit_ptr += batch * stride_logit_b + row * stride_logit_r
    probs_ptr += batch * stride_probs_b + row * stride_probs_r
    if ALIGNED:  # as in `draw_kernel`
        logit_ptr = tl.multiple_of(logit_ptr, 16)
        probs_ptr = tl.multiple_of(probs_ptr, 16)
    if temperature_ptr is not None:
        scale = tl.div_rn(1.0, tl.load(temperature_ptr + batch * stride_t).to(tl.float32))
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
    """Launch a program for every row of [batch, rows, vocab] or [rows, vocab]."""
    # Every row of a matrix has its own temperature: it is a batch entry.
    batch_dim = 1 if isinstance(temperature, Tensor) else 0
    logits, out = (tensor if tensor.dim() == 3 else tensor.unsqueeze(batch_dim) for tensor in (logits, out))
    logits = logits if logits.stride(2) == 1 else logits.contiguous()
    batch, rows, vocab = logits.shape
    if not batch * rows:
        return
    of_rows = temperature if isinstance(temperature, Tensor) else None
    stride, scale = (0, 1 / temperature) if of_rows is None else (of_rows.stride(0), 1.0)
    constants = probs_constants(vocab, aligned=is_aligned(logits) and is_aligned(out))
    with torch.cuda.device_of(logits):  # Triton launches on the current device, wherever the tensors are
        probs_kernel[(rows, batch)](
            logits, out, norms, of_rows, scale, rows, vocab, stride, *logits.stride()[:2],
            *out.stride()[:2], **constants, num_warps=probs_warps(constants["BLOCK"]),
            enable_fp_fusion=False,  # quotients are rounded before their maximum is taken off
        )  # fmt: skip


def probs_constants(vocab: int, *, aligned: bool = True) -> dict[str, Any]:
    """List the compile-time constants of a softmax; ahead-of-time builds take theirs from here too."""
    return {"BLOCK": min(BLOCK, padded(vocab)), "ALIGNED": aligned}


def probs_warps(block: int) -> int:
    """Choose warps so that a thread holds 16 tokens of a block, above 512 tokens."""
    return max(1, block // 512)
