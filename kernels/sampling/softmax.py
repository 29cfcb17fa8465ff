"""Probabilities of logits at a temperature, with the norms of the distributions where they cost no pass of their own.

Where Triton is used both are two launches, a program for a block of a row; elsewhere, in float64 and beyond MAX_VOCAB
tokens probabilities are those of `stree.kernels.sampling.reference`, the specification.  Nothing reads the device;
greedy decoding, top-k and top-p belong to the caller.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stree.kernels.dispatch import uses_triton
from stree.kernels.sampling import reference
from stree.kernels.tiles import DTYPES

__all__ = ["MAX_VOCAB", "probs", "probs_and_norms"]

MAX_VOCAB = 1 << 20


def probs(logits: Tensor, temperature: float | Tensor = 1.0, out: Tensor | None = None) -> Tensor:
    """Compute softmax(logits / temperature), in float32 or wider.

    A logit of -inf has probability 0 exactly.  A row of nothing else, and one with NaN or +inf, is NaN.

    Args:
        logits: float[..., vocab]; read, never written.
        temperature: positive; or float[batch], one for each entry of the first dimension.
        out: float32[..., vocab] of the same shape, or float64 for float64 logits; where the probabilities go, or None
            for a tensor of their own.

    Returns:
        float32[..., vocab], float64 for float64 logits.
    """
    if _has_kernel(logits, out):
        from stree.kernels.sampling import softmax_kernel

        return softmax_kernel.probs(logits, temperature, out)
    return reference.probs(logits, temperature, out)


def probs_and_norms(
    logits: Tensor, temperature: float | Tensor = 1.0, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute the probabilities of `probs` and their norms; for the arguments see there.

    Returns:
        The probabilities, and float32[...], their Euclidean norms; None where norms would need a pass of their own,
        which is left to the caller.
    """
    if _has_kernel(logits, out):
        from stree.kernels.sampling import softmax_kernel

        return softmax_kernel.probs_and_norms(logits, temperature, out)
    return reference.probs(logits, temperature, out), None


def _has_kernel(logits: Tensor, out: Tensor | None) -> bool:
    """Whether Triton computes the probabilities: of rows of up to MAX_VOCAB tokens, and not in float64."""
    takes = logits.dtype in DTYPES and logits.dim() in (2, 3) and 0 < logits.shape[-1] <= MAX_VOCAB
    return uses_triton(logits) and takes and (out is None or (out.dtype == torch.float32 and out.stride(-1) == 1))
