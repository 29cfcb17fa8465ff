"""Mamba-2 on a CPU: one product reads the states, and numba adds what the nodes of each path have written.

With it and `conv/cpu.py` eager steps of the bundled pair take 0.92 to 0.95 of the time for one node and 0.84 to 0.87
for 8 to 32 (AMD EPYC, one thread).  Compiled steps keep the reference, whose loops inductor fuses: as an operator this
was no faster there.  This file is imported with the first tree.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stree.kernels.cpu_jit import array_of, compiled
from stree.kernels.dispatch import Operands
from stree.kernels.mamba2.reference import commit_stashed
from stree.kernels.topology import AcceptedPath

__all__ = ["ssd_commit", "ssd_step"]

Array = np.ndarray[Any, Any]


def ssd_step(a: Operands) -> Tensor:
    """Commit the last path, stash x, B, C and dt of the new rows, scan the new tree."""
    if a.accepted is not None:
        commit_stashed(a)
    batch, heads, headdim, dstate = a.state.shape
    xbc = a.xbc.to(a.state.dtype)
    query = xbc[..., -a.ngroups * dstate :].unflatten(2, (a.ngroups, dstate)).transpose(1, 2)  # [b, g, rows, s]
    state = a.state.reshape(batch, a.ngroups, -1, dstate).transpose(2, 3)
    y = torch.matmul(query, state).transpose(1, 2).reshape(batch, -1, heads, headdim)
    dt_bias, D = (None if x is None else array_of(x, y) for x in (a.dt_bias, a.D))
    new = xbc.numpy(), array_of(a.dt, y), dt_bias, *map(float, a.dt_limit)
    nodes = a.stash_xbc.numpy(), a.stash_dt.numpy(), a.topology.parents.numpy()
    _stash_and_scan(*new, *nodes, array_of(a.A, y), D, a.ngroups, dstate, y.numpy())
    return y


def ssd_commit(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, accepted: AcceptedPath) -> None:
    """Commit the accepted path of a Mamba-2 layer to its state, in place."""
    rows = x.numpy(), dt.numpy(), A.expand(dt.shape[0], -1).contiguous().numpy(), B.numpy()
    _commit(state.numpy(), *rows, accepted.rows.numpy(), accepted.lengths.numpy())


@compiled(nogil=True)
def _commit(state: Array, x: Array, dt: Array, A: Array, B: Array, path: Array, lengths: Array) -> None:
    """Run the recurrence over int64[b, m] paths of int64[b] lengths; A is [b, h], the others as in `ssd_commit`."""
    batch, heads, headdim, dstate = state.shape
    shared, key = heads // B.shape[2], np.empty(dstate, state.dtype)
    for b in range(batch):
        for h in range(heads):
            own = state[b, h]
            for i in range(lengths[b]):
                j = path[b, i]
                decay = np.exp(dt[b, j, h] * A[b, h])
                for s in range(dstate):
                    key[s] = dt[b, j, h] * B[b, j, h // shared, s]
                for p in range(headdim):
                    row, value = own[p], x[b, j, h, p]
                    for s in range(dstate):
                        row[s] = decay * row[s] + value * key[s]


@compiled(fastmath={"reassoc", "contract", "nsz"}, nogil=True)
def _stash_and_scan(
    new_xbc: Array, new_dt: Array, dt_bias: Array | None, lowest: float, highest: float, xbc: Array,
    dt: Array, parents: Array, A: Array, D: Array | None, groups: int, dstate: int, y: Array,
) -> None:  # fmt: skip
    """Stash new rows, and turn S[-1] C[i] into S[i] C[i] + D x[i] on walks from each of them up to its root.

    Args:
        new_xbc: float[b, n - first, h p + 2 g s].
        new_dt: float[b, n - first, h], before bias, softplus and limit.
        dt_bias: float[h] or None.
        lowest: limit of the step size.
        highest: the other limit.
        xbc: float[b, N, h p + 2 g s], x, B and C of N >= n nodes; the new ones are written.
        dt: float[b, N, h], likewise.
        parents: int32[b, n].
        A: float[h].
        D: float[h] or None.
        groups: g.
        dstate: s.
        y: float[b, n - first, h, p], written.
    """
    batch, n = parents.shape
    first = n - new_xbc.shape[1]
    heads, headdim = y.shape[2:]
    shared, number = heads // groups, y.dtype.type
    decay, score = np.empty((n, heads), y.dtype), np.empty(n, y.dtype)
    for b in range(batch):
        for i in range(first, n):
            for c in range(xbc.shape[2]):
                xbc[b, i, c] = new_xbc[b, i - first, c]
            for h in range(heads):
                step = new_dt[b, i - first, h] + (number(0) if dt_bias is None else dt_bias[h])
                step = np.log1p(np.exp(step)) if step <= 20 else step  # softplus, as torch's
                step = number(lowest) if step < lowest else step
                dt[b, i, h] = number(highest) if step > highest else step  # what is not a number stays
        for i in range(n):
            for h in range(heads):
                decay[i, h] = np.exp(dt[b, i, h] * A[h])
        for i in range(first, n):
            for g in range(groups):
                j, start = i, heads * headdim + g * dstate
                query = xbc[b, i, start + groups * dstate :][:dstate]
                while j >= 0:
                    key, dot = xbc[b, j, start : start + dstate], number(0)
                    for s in range(dstate):
                        dot += query[s] * key[s]
                    score[j], j = dot, parents[b, j]
                for h in range(g * shared, (g + 1) * shared):
                    remaining, j = number(1), i
                    while j >= 0:
                        remaining, j = remaining * decay[j, h], parents[b, j]
                    out = y[b, i - first, h]
                    for p in range(headdim):
                        out[p] *= remaining
                    remaining, j = number(1), i
                    while j >= 0:
                        factor = remaining * score[j] * dt[b, j, h]
                        if D is not None and j == i:
                            factor += D[h]
                        x = xbc[b, j, h * headdim : (h + 1) * headdim]
                        for p in range(headdim):
                            out[p] += factor * x[p]
                        remaining, j = remaining * decay[j, h], parents[b, j]
