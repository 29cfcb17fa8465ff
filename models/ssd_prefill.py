"""Mamba-2's scan of a prompt on a CPU, in chunks whose products are few and large."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.models.layers.base import state_dtype

__all__ = ["ssd_chunk_scan"]

CHUNK = 64  # tokens; the work on pairs of tokens grows with it, the work on states shrinks


def ssd_chunk_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    dt_bias: Tensor | None = None, initial_states: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False, **_: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Run the recurrence of Mamba-2 (arXiv 2405.21060, section 6) over prompts.

    The arguments are those of ``mamba_chunk_scan_combined`` of mamba-ssm.  Products and states are float32, float64 for
    float64 models; the sums of log decays are float64.

    Args:
        hidden_states: float[batch, n, nheads, headdim].
        dt: float[batch, n, nheads].
        A: float[nheads], negative.
        B: float[batch, n, ngroups, dstate]; ngroups divides nheads.
        C: as B.
        chunk_size: most tokens of a chunk; at most ``CHUNK`` are taken.
        D: float[nheads], or None for no skip term.
        dt_bias: float[nheads], added to dt, or None.
        initial_states: float[batch, nheads, headdim, dstate], read only, or None for zeros.
        dt_softplus: whether step sizes are softplus(dt).
        dt_limit: bounds of the step sizes.
        return_final_states: whether the states after the last token are returned, too.

    Returns:
        float32[batch, n, nheads, headdim], and float32[batch, nheads, headdim, dstate] where states are asked for;
        float64 for float64 models.
    """
    batch, n, heads, headdim = hidden_states.shape
    groups, dstate, size, wide = B.shape[2], B.shape[3], min(chunk_size, CHUNK), state_dtype(hidden_states.dtype)
    dt = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    state = hidden_states.new_zeros(batch, groups, heads // groups * headdim, dstate, dtype=wide)
    if initial_states is not None:
        state.copy_(initial_states.reshape(state.shape))
    output = hidden_states.new_empty(hidden_states.shape, dtype=wide)
    hidden = torch.ones(size, size, dtype=torch.bool, device=dt.device).triu_(1)
    for begin in range(0, n, size):
        part = slice(begin, begin + size)
        x, step, key, query = (rows[:, part].to(wide) for rows in (hidden_states, dt, B, C))
        key, query, rows = key.transpose(1, 2), query.transpose(1, 2), x.shape[1]  # [b, g, rows, s]
        sums = (step * A).double().cumsum(1).transpose(1, 2)  # [b, h, rows]
        decay = (sums[..., None] - sums[:, :, None]).to(wide).masked_fill_(hidden[:rows, :rows], -torch.inf)
        weight = decay.exp_().view(batch, groups, -1, rows, rows) * (query @ key.transpose(2, 3))[:, :, None]
        written = x * step[..., None]
        inside = weight.view(batch, heads, rows, rows) @ written.transpose(1, 2)  # [b, h, rows, p]
        y = (query @ state.transpose(2, 3)).view(batch, groups, rows, -1, headdim).transpose(1, 2)
        y = y.reshape(x.shape) * sums.transpose(1, 2).to(wide).exp()[..., None]
        y += inside.transpose(1, 2)
        output[:, part] = y if D is None else y.addcmul_(x, D.to(wide)[:, None])
        written *= (sums[..., -1:] - sums).transpose(1, 2).to(wide).exp_()[..., None]
        total = sums[..., -1].to(wide).exp().repeat_interleave(headdim, 1)
        state *= total.view(batch, groups, -1, 1)
        state += written.view(batch, rows, groups, -1).permute(0, 2, 3, 1) @ key
    return (output, state.view(batch, heads, headdim, dstate)) if return_final_states else output
