"""The short convolution of some nodes and channels, for kernels that read its inputs where the projection left them."""

# mypy: disable-error-code="assignment, no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["convolve", "read_filter", "tap_places"]


@triton.jit
def read_filter(window_ptr, weight_ptr, bias_ptr, c, inside, stride_weight_c, WIDTH: tl.constexpr):
    """Read weights, window and bias of some channels: tuples of float32[channels], and float32[channels]."""
    weights, past = (), ()
    for k in tl.static_range(WIDTH):
        weights += (tl.load(weight_ptr + c * stride_weight_c + k, inside, 0.0).to(tl.float32),)
    for k in tl.static_range(WIDTH - 1):
        past += (tl.load(window_ptr + c * (WIDTH - 1) + k, inside, 0.0).to(tl.float32),)
    bias = tl.zeros(c.shape, tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + c, inside, 0.0).to(tl.float32)
    return weights, past, bias


@triton.jit
def tap_places(index_ptr, node, asked, WIDTH: tl.constexpr):
    """Read where each tap of some nodes is: int32[nodes] a tap, a node or, below 0, a column of the window."""
    places = ()
    for tap in tl.static_range(WIDTH):
        places += (tl.load(index_ptr + node * WIDTH + tap, asked, 0).to(tl.int32) - (WIDTH - 1),)
    return places


@triton.jit
def convolve(
    x_ptr, stash_ptr, y_ptr, filters, places, asked, c, inside, new_from, stride_x_n, stride_stash_n,
    WIDTH: tl.constexpr, KNOWN: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Convolve: float32[nodes, channels], and the nodes' own inputs in the dtype of y."""
    weights, past, bias = filters
    total = tl.zeros((asked.shape[0], c.shape[0]), tl.float32) + bias[None, :]
    for tap in tl.static_range(WIDTH):
        place = places[tap]
        is_new = (asked & (place >= new_from))[:, None] & inside[None, :]
        own = tl.load(x_ptr + (place - new_from)[:, None] * stride_x_n + c[None, :], is_new, 0.0)
        own = own.to(y_ptr.dtype.element_ty)  # the last tap is the node itself
        value = own.to(tl.float32)
        if KNOWN:
            known = (asked & (place >= 0) & (place < new_from))[:, None] & inside[None, :]
            value += tl.load(stash_ptr + place[:, None] * stride_stash_n + c[None, :], known, 0.0).to(tl.float32)
        for slot in tl.static_range(tap, WIDTH - 1):  # no tap reaches further into the window
            value = tl.where((place == slot - (WIDTH - 1))[:, None], past[slot][None, :], value)
        total += value * weights[tap][None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    return total, own
