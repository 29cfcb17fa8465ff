"""Logits of logits and their norms in Triton: one launch, two reads of the logits and one write of the distribution."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stree.kernels.accept import is_aligned
from stree.kernels.law_kernels import probs_kernel
from stree.kernels.tiles import padded

__all__ = ["probs", "probs_and_norms", "probs_constants", "probs_warps"]

BLOCK = 8192  # of a vocabulary in one pass


def probs(logits: Tensor, temperature: float, out: Tensor | None) -> Tensor:
    """Turn rows of logits into distributions; see `stree.kernels.law_door`."""
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device) if out is None else out
    _launch(logits, temperature, out, None)
    return out


def probs_and_norms(logits: Tensor, temperature: float, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Do the same, with their norms; see `stree.kernels.law_door`."""
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device) if out is None else out
    norms = out.new_empty(out.shape[:-1])
    _launch(logits, temperature, out, norms)
    return out, norms


def _launch(logits: Tensor, temperature: float, out: Tensor, norms: Tensor | None) -> None:
    """Launch a program for every row of [batch, rows, vocab] or [rows, vocab]."""
    logits, out = (tensor if tensor.dim() == 3 else tensor[None] for tensor in (logits, out))
    logits = logits if logits.stride(2) == 1 else logits.contiguous()
    batch, rows, vocab = logits.shape
    if not batch * rows:
        return
    constants = probs_constants(vocab, aligned=is_aligned(logits) and is_aligned(out))
    with torch.cuda.device_of(logits):  # Triton launches on the current device, wherever the tensors are
        probs_kernel[(rows, batch)](
            logits, out, norms, rows, vocab, 1.0 / temperature, *logits.stride()[:2], *out.stride()[:2],
            **constants, num_warps=probs_warps(constants["BLOCK"]),
            enable_fp_fusion=False,  # quotients are rounded before their maximum is taken off
        )  # fmt: skip


def probs_constants(vocab: int, *, aligned: bool = True) -> dict[str, Any]:
    """List the compile-time constants of distributions; ahead-of-time builds take theirs from here too."""
    return {"BLOCK": min(BLOCK, padded(vocab)), "ALIGNED": aligned}


def probs_warps(block: int) -> int:
    """Choose warps so that a thread holds 16 tokens of a block, above 512 tokens."""
    return max(1, block // 512)
