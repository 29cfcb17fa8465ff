"""Mamba-2 on a CPU, compiled with numba: products read the states, and walks add what the nodes of a path have written.

With it and `conv/cpu.py` eager steps of the bundled pair take 0.92 to 0.95 of the time for one node and 0.84 to 0.87
for 8 to 32 (AMD EPYC, one thread), and a mixer in one call 0.90 to 0.93 of that.  Compiled steps keep the reference,
whose loops inductor fuses: as an operator this was no faster there.  This file is imported with the first tree.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stree.kernels.conv.cpu import convolve
from stree.kernels.cpu_jit import ZEROS, array_at, compiled, inner, overload
from stree.kernels.dispatch import Operands
from stree.kernels.linear.cpu import products, products_of_row
from stree.kernels.mamba2 import reference
from stree.kernels.topology import AcceptedPath

__all__ = ["mamba2_step", "ssd_commit", "ssd_step"]

Array = np.ndarray[Any, Any]


def ssd_step(a: Operands) -> Tensor:
    """Commit the last path, stash x, B, C and dt of the new rows, scan the new tree."""
    return _step(a) if _is_supported(a, a.stash_xbc, a.stash_dt) else reference.ssd_step(a)


def mamba2_step(a: Operands) -> tuple[Tensor, Tensor | None]:
    """Convolve, and do what `ssd_step` does; the reference serves calls with a gate."""
    if a.gating is not None or not _is_supported(a, a.window, a.stash_conv, a.stash_xbc, a.stash_dt):
        return reference.mamba2_step(a)
    bias = a.state.new_zeros(a.weight.shape[0]) if a.conv_bias is None else a.conv_bias
    return _step(a, [a.window, a.stash_conv, *_contiguous((a.weight, bias), a.state.dtype)], a.weight.shape[1]), None


def _is_supported(a: Operands, *others: Tensor) -> bool:
    """Whether the state and other tensors are contiguous and of one dtype, and no gradient is asked for."""
    is_alike = all(t.dtype == a.state.dtype and t.is_contiguous() for t in (a.state, *others))
    return is_alike and not (torch.is_grad_enabled() and a.xbc.requires_grad)


def _step(a: Operands, convolution: list[Tensor] | None = None, width: int = 0) -> Tensor:
    """Run a step.

    Args:
        a: the operands.
        convolution: its window, stash, weight and bias; None for rows that are convolved already.
        width: of the convolution, or 0.
    """
    if a.accepted is not None:
        reference.commit_stashed(a)
    dtype, (_, heads, headdim, dstate) = a.state.dtype, a.state.shape
    new = [
        t if t.dtype == dtype and t.stride(1) == 1 else t.to(dtype).contiguous()
        for t in (a.xbc.flatten(0, 1), a.dt.flatten(0, 1))
    ]
    y: Tensor = a.state.new_empty((*a.xbc.shape[:2], heads, headdim))
    weights = _contiguous([y.new_zeros(heads) if t is None else t for t in (a.A, a.dt_bias, a.D)], dtype)
    addresses = tuple([t.data_ptr() for t in (*new, *weights, a.state, a.stash_xbc, a.stash_dt, y)])
    of_convolution = (0, 0, 0, 0) if convolution is None else tuple([t.data_ptr() for t in convolution])
    sizes = heads, headdim, a.ngroups, dstate, a.stash_xbc.shape[1], a.first, width
    strides, parents = (new[0].stride(0), new[1].stride(0)), a.topology.parents.numpy()
    _convolve_and_scan(addresses, of_convolution, strides, sizes, parents, *map(float, a.dt_limit), ZEROS[y.itemsize])
    return y


def _contiguous(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of a dtype, contiguous."""
    return [t if t.dtype == dtype and t.is_contiguous() else t.to(dtype).contiguous() for t in tensors]


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
def _convolve_and_scan(
    addresses: tuple[int, ...], convolution: tuple[int, ...], strides: tuple[int, int], sizes: tuple[int, ...],
    parents: Array, lowest: float, highest: float, zero: Any,
) -> None:  # fmt: skip
    """Convolve new rows along each path if the convolution has a width, stash them, and scan the tree.

    Args:
        addresses: of the new rows of x, B and C and those of the step sizes, before bias and softplus; of A, the bias
            of the step sizes, D, the state, the stash of x, B and C, the stash of step sizes, and y, which is written.
        convolution: addresses of its window, stash, weight and bias; its new rows are then those before it.
        strides: from one new row to the next, of x, B and C and of step sizes.
        sizes: heads, headdim, groups, dstate, nodes of a stash, first new node, width of the convolution.
        parents: int32[b, n].
        lowest: limit of the step size.
        highest: the other limit.
        zero: of the dtype.
    """
    at_new, at_new_dt, at_A, at_dt_bias, at_D, at_state, at_xbc, at_dt, at_y = addresses
    at_window, at_stash, at_weight, at_bias = convolution
    heads, headdim, groups, dstate, count, first, width = sizes
    (batch, n), inner, shared = parents.shape, heads * headdim, heads // groups * headdim
    rows, channels = n - first, inner + 2 * groups * dstate
    new = array_at(at_new, (batch * rows, strides[0]), zero)
    new_dt = array_at(at_new_dt, (batch * rows, strides[1]), zero)
    A, dt_bias, D = array_at(at_A, (heads,), zero), array_at(at_dt_bias, (heads,), zero), array_at(at_D, (heads,), zero)
    state = array_at(at_state, (batch, groups, shared, dstate), zero)
    xbc, dt = array_at(at_xbc, (batch, count, channels), zero), array_at(at_dt, (batch, count, heads), zero)
    y = array_at(at_y, (batch, rows, groups, shared), zero)
    window = array_at(at_window, (batch, channels, width - 1), zero)
    stash = array_at(at_stash, (batch, count, channels), zero)
    weight, bias = array_at(at_weight, (channels, width), zero), array_at(at_bias, (channels,), zero)
    query, from_state = np.empty((rows, dstate), y.dtype), np.empty((rows, shared), y.dtype)
    for b in range(batch):
        for i in range(first, n):
            r = b * rows + i - first
            into = stash[b, i] if width else xbc[b, i]
            for c in range(channels):
                into[c] = new[r, c]
            _step_sizes(new_dt[r], dt_bias, lowest, highest, dt[b, i])
        if width:
            mixed = xbc[b, first:n]
            convolve(stash[b], window[b], weight, bias, parents[b], mixed)
            for i in range(rows):
                for c in range(channels):
                    mixed[i, c] = _silu(mixed[i, c])
        for g in range(groups):
            start = inner + (groups + g) * dstate
            for r in range(rows):
                for s in range(dstate):
                    query[r, s] = xbc[b, first + r, start + s]
            if rows == 1:
                products_of_row(query.ctypes.data, rows, state[b, g], from_state.ctypes.data, zero)
            else:
                products(query.ctypes.data, rows, state[b, g], from_state.ctypes.data, zero)
            for r in range(rows):
                for c in range(shared):
                    y[b, r, g, c] = from_state[r, c]
        _scan(xbc[b], dt[b], parents[b], A, D, groups, dstate, y[b].reshape(rows, heads, headdim))


@inner(fastmath={"reassoc", "contract", "nsz"})
def _step_sizes(new: Array, bias: Array, lowest: float, highest: float, out: Array) -> None:
    """Write step sizes, float[h], after bias, softplus and limits."""
    number = out.dtype.type
    for h in range(len(out)):
        step = new[h] + bias[h]
        step = np.log1p(np.exp(step)) if step <= 20 else step  # softplus, as torch's
        step = number(lowest) if step < lowest else step
        out[h] = number(highest) if step > highest else step  # what is not a number stays


@inner(fastmath={"reassoc", "contract", "nsz"})
def _scan(xbc: Array, dt: Array, parents: Array, A: Array, D: Array, groups: int, dstate: int, y: Array) -> None:
    """Turn S[-1] C[i] into S[i] C[i] + D x[i] for one sequence's last nodes, as many as y has."""
    n, (count, heads, headdim) = len(parents), y.shape
    first, shared, number = n - count, heads // groups, y.dtype.type
    decay, score = np.empty((n, heads), y.dtype), np.empty(n, y.dtype)
    for i in range(n):
        for h in range(heads):
            decay[i, h] = np.exp(dt[i, h] * A[h])
    for i in range(first, n):
        for g in range(groups):
            j, start = i, heads * headdim + g * dstate
            query = xbc[i, start + groups * dstate :][:dstate]
            while j >= 0:
                key, dot = xbc[j, start : start + dstate], number(0)
                for s in range(dstate):
                    dot += query[s] * key[s]
                score[j], j = dot, parents[j]
            for h in range(g * shared, (g + 1) * shared):
                remaining, j = number(1), i
                while j >= 0:
                    remaining, j = remaining * decay[j, h], parents[j]
                out = y[i - first, h]
                for p in range(headdim):
                    out[p] *= remaining
                remaining, j = number(1), i
                while j >= 0:
                    factor = remaining * score[j] * dt[j, h]
                    if j == i:
                        factor += D[h]
                    x = xbc[j, h * headdim : (h + 1) * headdim]
                    for p in range(headdim):
                        out[p] += factor * x[p]
                    remaining, j = remaining * decay[j, h], parents[j]


def _silu(x: Any) -> Any:
    """Return x / (1 + exp(-x)), in code that vectorises."""
    raise NotImplementedError


@overload(_silu, strict=False)
def _compiled_silu(x: Any) -> Any:
    if x.bitwidth == 64:
        return lambda x: x / (1 + np.exp(-x))
    return lambda x: x / (np.float32(1) + _exp(-x))


@inner()
def _exp(x: Any) -> Any:
    """Return exp(x) of float32 within a unit in the last place: 2^k exp(r), with the polynomial of Cephes."""
    x = x if x > np.float32(-87.3) else np.float32(-87.3)  # what is not a number, too
    x = x if x < np.float32(88.7) else np.float32(88.7)
    k = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - k * np.float32(0.693359375) + k * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + np.float32(c)
    return (p * r * r + r + np.float32(1)) * np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)
