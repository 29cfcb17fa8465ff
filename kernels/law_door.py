"""The front door to laws: probabilities of logits at a temperature, and on a GPU the distributions' norms beside them.

On a GPU both are one launch of a Triton kernel, one program a row; elsewhere, in float64 and beyond MAX_VOCAB tokens
distributions are those of `stree.kernels.reference_law`, which is the specification.  Nothing waits for a device, and
nothing here knows greedy decoding, top-k or top-p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stree.kernels import reference_law
from stree.kernels.tiles import DTYPES
from stree.kernels.topology import is_launched

__all__ = ["MAX_VOCAB", "probs", "probs_and_norms"]

MAX_VOCAB = 1 << 20


def probs(logits: Tensor, temperature: float = 1.0, out: Tensor | None = None) -> Tensor:
    """Turn logits into probabilities: the softmax of logits / temperature, in float32 or wider.

    A logit of -inf has probability 0 exactly.  A row of nothing else, and one with NaN or +inf, is NaN.

    Args:
        logits: float[..., vocab]; read, never written.
        temperature: positive.
        out: float32[..., vocab] of the same shape, or float64 for float64 logits; where the probabilities go, or None
            for a tensor of their own.

    Returns:
        float32[..., vocab], float64 for float64 logits.
    """
    if _fits(logits, out):
        from stree.kernels import law as kernels

        return kernels.probs(logits, temperature, out)
    return reference_law.probs(logits, temperature, out)


def probs_and_norms(
    logits: Tensor, temperature: float = 1.0, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Give distributions and their norms, where these cost no pass of their own; arguments as for ``probs``.

    Returns:
        The distributions, and float32[...], their Euclidean norms; None where whoever needs norms is to compute them.
    """
    if _fits(logits, out):
        from stree.kernels import law as kernels

        return kernels.probs_and_norms(logits, temperature, out)
    return reference_law.probs(logits, temperature, out), None


def _fits(logits: Tensor, out: Tensor | None) -> bool:
    """Tell whether a kernel makes the laws: on a GPU, of rows of up to MAX_VOCAB tokens, and not in float64."""
    takes = logits.dtype in DTYPES and logits.dim() in (2, 3) and 0 < logits.shape[-1] <= MAX_VOCAB
    return is_launched(logits) and takes and (out is None or (out.dtype == torch.float32 and out.stride(-1) == 1))
