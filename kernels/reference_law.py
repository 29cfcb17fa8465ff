"""Logits of logits in plain torch: the specification of `stree.kernels.law_door`."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["probs"]


def probs(logits: Tensor, temperature: float = 1.0, out: Tensor | None = None) -> Tensor:
    """Turn logits into probabilities; see `stree.kernels.law_door`.

    Logits are divided first, so what counts are differences of quotients rounded to float32.  On a GPU torch takes the
    reciprocal of the temperature, rounded, and multiplies.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if temperature != 1:
        logits = torch.div(logits, temperature, out=out)
        if out is None and logits.device.type == "cpu":
            out = logits  # a tensor of our own
    return torch.softmax(logits, -1, out=out)
