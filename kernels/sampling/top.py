"""The most probable tokens: compiled on the CPU, elsewhere torch's own top-k, which is the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from stree.kernels.dispatch import host_can_read

__all__ = ["top"]


def top(probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find the most probable tokens of each distribution.

    Args:
        probs: float[..., vocab], not negative.
        count: how many, at most vocab.

    Returns:
        float[..., count] probabilities in descending order and int64[..., count] tokens.  On the CPU the first of equal
        ones comes first; elsewhere their order is open.
    """
    if host_can_read(probs):
        from stree.kernels.sampling import cpu  # imports numba

        return cpu.top(probs, count)
    best = torch.topk(probs, count)
    return best.values, best.indices
