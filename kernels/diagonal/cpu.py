"""Mamba-1 on a CPU: torch computes the decays of all nodes, and numba runs the recurrence from each node's parent.

Time of eager steps over those of the reference, a Mamba of 768 channels, one thread of an AMD processor: 0.96 for one
node, 0.63 for 16 and 0.55 for 32.  This file is imported with the first tree.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stree.kernels.cpu_jit import array_of, compiled
from stree.kernels.diagonal.reference import stash_rows
from stree.kernels.dispatch import Operands

__all__ = ["selective_step"]

Array = np.ndarray[Any, Any]


def selective_step(a: Operands) -> Tensor:
    """Commit the last path, stash x, dt and B of the new rows, scan the new tree."""
    x, dt, B = stash_rows(a)
    y: Tensor = x.new_empty(a.x.shape)
    decay = torch.exp_(dt[:, :, None] * a.A.t().contiguous())  # [b, n, s, c]: loops over channels are the fastest
    D = None if a.D is None else array_of(a.D, y)
    rows = x.numpy(), dt.numpy(), B.numpy(), array_of(a.C, y)
    _scan(decay.numpy(), *rows, a.topology.parents.numpy(), a.state.transpose(1, 2).contiguous().numpy(), D, y.numpy())
    return y


@compiled(fastmath={"contract", "nsz"}, nogil=True)
def _scan(
    h: Array, x: Array, dt: Array, B: Array, C: Array, parents: Array, state: Array, D: Array | None, y: Array
) -> None:
    """Run the recurrence.

    Args:
        h: float[b, n, s, c], the decays; the states of all nodes are written over them.
        x: float[b, n, c].
        dt: float[b, n, c].
        B: float[b, n, s].
        C: float[b, n - first, s].
        parents: int32[b, n].
        state: float[b, s, c].
        D: float[c] or None.
        y: float[b, n - first, c], written.
    """
    batch, n, dstate, channels = h.shape
    first, write = n - y.shape[1], np.empty(channels, h.dtype)
    for b in range(batch):
        for i in range(n):
            for c in range(channels):
                write[c] = dt[b, i, c] * x[b, i, c]
            before = state[b] if parents[b, i] < 0 else h[b, parents[b, i]]
            for s in range(dstate):
                own, parent = h[b, i, s], before[s]
                for c in range(channels):
                    own[c] = own[c] * parent[c] + write[c] * B[b, i, s]
            if i >= first:
                out = y[b, i - first]
                for c in range(channels):
                    out[c] = 0 if D is None else D[c] * x[b, i, c]
                for s in range(dstate):
                    for c in range(channels):
                        out[c] += h[b, i, s, c] * C[b, i - first, s]
