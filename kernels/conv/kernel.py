"""The short convolution in Triton: commit of a path to the window and convolution of a tree in one launch.

One program owns a block of channels of one sequence, for all nodes.  Channels are independent, so a program may commit
the path, then overwrite the rows that it came from: no other program reads them.  Rows are read where the
projection left them, with any strides over batch and nodes.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor

from stree.kernels.conv.device_functions import convolve, read_filter, tap_places
from stree.kernels.device_functions import STEP_INTEGERS
from stree.kernels.dispatch import Operands
from stree.kernels.jit import jit
from stree.kernels.launch import path_operands, strides
from stree.kernels.tiles import ConvTile, check_inner, check_kernel_dtypes, padded
from stree.kernels.topology import AcceptedPath, Topology

__all__ = ["conv_commit", "conv_step", "tree_conv1d"]


@jit(fuses=True, do_not_specialize=(*STEP_INTEGERS, "stride_x_b"))
def conv_kernel(
    window_ptr, path_ptr, lengths_ptr, old_ptr,
    x_ptr, weight_ptr, bias_ptr, index_ptr, stash_ptr, y_ptr,
    n, first, new_from, path_size, channels,
    stride_window_b, stride_old_b, stride_old_n, stride_x_b, stride_x_n, stride_stash_b, stride_stash_n,
    stride_weight_c,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    COMMIT: tl.constexpr, SCAN: tl.constexpr, KEEP: tl.constexpr, SILU: tl.constexpr, KNOWN: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Move a path into some channels of a window, then convolve a tree; grid (blocks of channels, batch)."""
    batch = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    window_ptr += batch * stride_window_b
    if COMMIT:
        # Column t of the new window is row length + t of the sequence [old window, accepted nodes].
        length = tl.load(lengths_ptr + batch).to(tl.int32)
        column = tl.arange(0, COLUMNS)
        source = length + column
        wanted = (column < WIDTH - 1)[None, :] & inside[:, None]
        stays = wanted & (source < WIDTH - 1)[None, :]
        kept = tl.load(window_ptr + c[:, None] * (WIDTH - 1) + source[None, :], stays, 0.0)
        enters = (column < WIDTH - 1) & (source >= WIDTH - 1)
        row = tl.load(path_ptr + batch * path_size + source - (WIDTH - 1), enters, 0)
        moved_ptr = old_ptr + batch * stride_old_b + row[None, :] * stride_old_n + c[:, None]
        moved = tl.load(moved_ptr, enters[None, :] & inside[:, None], 0.0)
        tl.debug_barrier()  # every old row is read before one is overwritten
        columns_ptr = window_ptr + c[:, None] * (WIDTH - 1) + column[None, :]
        tl.store(columns_ptr, tl.where(stays, kept, moved.to(kept.dtype)), wanted)
        tl.debug_barrier()  # the taps below read the window that other warps have written
    if SCAN:
        stride_x_b *= (
            ALIGNED  # these two are given as multiples of it, by which the compiler knows how wide it may load
        )
        stride_x_n *= ALIGNED
        x_ptr += batch * stride_x_b
        if KEEP:
            stash_ptr += batch * stride_stash_b
        filters = read_filter(window_ptr, weight_ptr, bias_ptr, c, inside, stride_weight_c, WIDTH)  # once for all nodes
        for start in range(first, n, BLOCK_N):
            node = start + tl.arange(0, BLOCK_N)
            asked = node < n
            mask = asked[:, None] & inside[None, :]
            places = tap_places(index_ptr + batch * n * WIDTH, node, asked, WIDTH)
            total, own = convolve(
                x_ptr, stash_ptr, y_ptr, filters, places, asked, c, inside, new_from, stride_x_n, stride_stash_n,
                WIDTH, KNOWN, SILU,
            )  # fmt: skip
            tl.store(y_ptr + (batch * (n - first) + node - first)[:, None] * channels + c[None, :], total, mask)
            if KEEP:
                tl.store(stash_ptr + node[:, None] * stride_stash_n + c[None, :], own, mask)


def tree_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, topology: Topology, window: Tensor, *,
    activation: str | None, first: int,
) -> Tensor:  # fmt: skip
    """Convolve every node with its last ancestors, then with the window; see `stree.kernels.ops`."""
    check_kernel_dtypes("tree_conv1d", x=x)
    y = torch.empty(x.shape[0], x.shape[1] - first, x.shape[2], dtype=x.dtype, device=x.device)
    _launch("tree_conv1d", window, new=(x, weight, bias, y), topology=topology, first=first, silu=activation == "silu")
    return y


def conv_commit(window: Tensor, x: Tensor, accepted: AcceptedPath) -> None:
    """Move the accepted rows into the window, in place; see `stree.kernels.ops`."""
    check_kernel_dtypes("conv_commit", x=x)
    _launch("conv_commit", window, old=x, accepted=accepted)


def conv_step(a: Operands) -> Tensor:
    """Commit the last path, stash the new rows, convolve the new tree; see `stree.kernels.ops`."""
    check_kernel_dtypes("conv_step", x=a.x)
    check_kernel_dtypes("conv_step", stash=a.stash)
    y = torch.empty(a.x.shape, dtype=a.stash.dtype, device=a.x.device)
    _launch(
        "conv_step", a.window, old=a.stash, accepted=a.accepted, new=(a.x, a.weight, a.bias, y), stash=a.stash,
        topology=a.topology, first=a.first, silu=a.activation == "silu",
    )  # fmt: skip
    return y


def _launch(
    op: str, window: Tensor, *, accepted: AcceptedPath | None = None, old: Tensor | None = None,
    new: tuple[Tensor, Tensor, Tensor | None, Tensor] | None = None, stash: Tensor | None = None,
    topology: Topology | None = None, first: int = 0, silu: bool = False,
) -> None:  # fmt: skip
    """Launch the kernel for a commit (accepted and old), a convolution (new and topology), or both."""
    batch, channels, history = window.shape
    check_kernel_dtypes(op, window=window)
    check_inner("window", window, 2)
    if accepted is None or not history:  # a filter of one tap has no window
        accepted = old = None
    if old is None and new is None:
        return
    x, weight, bias, y = new or (None, None, None, None)
    for name, tensor in (("stash" if new else "x", old), ("x", x), ("weight", weight), ("stash", stash)):
        if tensor is not None:
            check_inner(name, tensor)
    n, width, index, new_from = 1, history + 1, None, first if stash is not None else 0
    if topology is not None:
        n, index = topology.num_nodes, topology.conv_rows(width)
    rows, lengths, entries = path_operands(accepted)
    tile, aligned = ConvTile.of(n - first, channels), math.gcd(16, *strides(x))
    conv_kernel[(-(-channels // tile.channels), batch)](
        window, rows, lengths, old, x, weight, bias, index, stash, y, n, first, new_from, entries, channels,
        window.stride(0), *strides(old), *(stride // aligned for stride in strides(x)), *strides(stash),
        *strides(weight, 1),
        WIDTH=width, COLUMNS=padded(history, 1), BLOCK_N=tile.nodes, BLOCK_C=tile.channels, COMMIT=old is not None,
        SCAN=new is not None, KEEP=stash is not None, SILU=silu, KNOWN=new_from > 0,
        ALIGNED=aligned,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
