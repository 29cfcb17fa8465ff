"""The short causal convolution on a CPU, compiled with numba: every node reads its ancestors, then the stored window.

This file is imported with the first tree.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from stree.kernels.cpu_jit import array_of, compiled, inner
from stree.kernels.dispatch import Operands
from stree.kernels.topology import AcceptedPath

__all__ = ["conv_commit", "conv_step", "convolve"]

Array = np.ndarray[Any, Any]


def conv_commit(window: Tensor, x: Tensor, accepted: AcceptedPath) -> None:
    """Move the accepted rows into the window of a convolution, in place."""
    _shift(window.numpy(), x.numpy(), accepted.rows.numpy(), accepted.lengths.numpy())


def conv_step(a: Operands) -> Tensor:
    """Commit the last path, stash the new rows before the convolution, convolve the new tree."""
    y: Tensor = a.stash.new_empty(a.x.shape)
    if a.accepted is not None:
        conv_commit(a.window, a.stash, a.accepted)
    bias = array_of(y.new_zeros(y.shape[2]) if a.bias is None else a.bias, y)
    rows = array_of(a.x, y), a.stash.numpy(), a.window.numpy()
    _convolve(*rows, array_of(a.weight, y), bias, a.topology.parents.numpy(), y.numpy())
    return F.silu(y, inplace=True) if a.activation == "silu" else y


@compiled(nogil=True)
def _shift(window: Array, rows: Array, path: Array, lengths: Array) -> None:
    """Shift the rows of int64[b, m] paths of int64[b] lengths into float[b, c, w - 1] windows."""
    batch, channels, history = window.shape
    for b in range(batch):
        for t in range(history):
            source = lengths[b] + t
            for c in range(channels):
                if source < history:
                    window[b, c, t] = window[b, c, source]
                else:
                    window[b, c, t] = rows[b, path[b, source - history], c]


@compiled(nogil=True)
def _convolve(x: Array, rows: Array, window: Array, weight: Array, bias: Array, parents: Array, y: Array) -> None:
    """Stash new rows and convolve them.

    Args:
        x: float[b, n - first, c].
        rows: float[b, N, c], of N >= n nodes; those of x are written.
        window: float[b, c, w - 1].
        weight: float[c, w].
        bias: float[c].
        parents: int32[b, n].
        y: float[b, n - first, c], written.
    """
    first = parents.shape[1] - x.shape[1]
    for b in range(len(x)):
        for i in range(x.shape[1]):
            for c in range(x.shape[2]):
                rows[b, first + i, c] = x[b, i, c]
        convolve(rows[b], window[b], weight, bias, parents[b], y[b])


@inner()
def convolve(rows: Array, window: Array, weight: Array, bias: Array, parents: Array, y: Array) -> None:
    """Convolve the last nodes of one sequence, as many as y has, with their ancestors, then with the stored window."""
    (channels, width), first = weight.shape, len(parents) - len(y)
    taps, history = np.empty((width, channels), y.dtype), np.empty((width - 1, channels), y.dtype)
    for c in range(channels):
        for t in range(width):
            taps[t, c] = weight[c, t]
        for t in range(width - 1):
            history[t, c] = window[c, t]
    for i in range(first, len(parents)):
        out, node, stored = y[i - first], i, width - 2
        for c in range(channels):
            out[c] = bias[c]
        for t in range(width - 1, -1, -1):
            if node >= 0:
                row, node = rows[node], parents[node]
            else:
                row, stored = history[stored], stored - 1
            for c in range(channels):
                out[c] += taps[t, c] * row[c]
