"""Drawing tokens by inverting cumulative sums: numba's code on a CPU, elsewhere torch's operators; the same tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from stree.kernels.dispatch import backend_of, module_of

__all__ = ["invert"]


def invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token of each distribution at which its cumulative sum exceeds a share of the total.

    Sums are taken in float64, token by token.

    Args:
        probs: float[..., vocab], not negative, not necessarily normalised.
        uniform: float64[...], the shares, in [0, 1).

    Returns:
        int64[...]; a token of probability zero only if all are zero, and then 0.
    """
    if backend_of(probs) == "cpu":
        each = probs.expand(*uniform.shape, probs.shape[-1])
        index: Tensor = module_of("stree.kernels.sampling.cpu").invert(each, uniform)
        return index
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    level = uniform.unsqueeze(-1) * total
    level = torch.minimum(level, torch.nextafter(total, torch.zeros_like(total)))  # the product may round up
    index = torch.searchsorted(cumulative, level, right=True).squeeze(-1)
    return index.clamp_(max=probs.shape[-1] - 1) * (total.squeeze(-1) > 0)
