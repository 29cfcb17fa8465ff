"""The short convolution in Triton: commit of a path to the window and convolution of a tree in one launch.

One program owns a block of channels of one sequence, for all nodes.  Channels are independent, so a program may commit
the path, then overwrite the rows that it came from: no other program reads them.  Rows are read where the
projection left them, with any strides over batch and nodes.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stree.kernels.device_functions import STEP_INTEGERS
from stree.kernels.tiles import ConvTile, check_inner, check_kernel_dtypes, padded
from stree.kernels.topology import AcceptedPath, Topology

__all__ = ["conv_commit", "conv_step", "tree_conv1d"]


@triton.jit(do_not_specialize=STEP_INTEGERS)
def conv_kernel(
    window_ptr, path_ptr, lengths_ptr, old_ptr,
    x_ptr, weight_ptr, bias_ptr, index_ptr, stash_ptr, y_ptr,
    n, first, new_from, path_size, channels,
    stride_window_b, stride_old_b, stride_old_n, stride_x_b, stride_x_n, stride_stash_b, stride_stash_n,
    stride_weight_c,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    COMMIT: tl.constexpr, SCAN: tl.constexpr, KEEP: tl.constexpr, SILU: tl.constexpr, KNOWN: tl.constexpr,
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
        x_ptr += batch * stride_x_b
        if KEEP:
            stash_ptr += batch * stride_stash_b
        for start in range(first, n, BLOCK_N):
            node = start + tl.arange(0, BLOCK_N)
            asked = node < n
            total = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
            if bias_ptr is not None:
                total += tl.load(bias_ptr + c, inside, 0.0).to(tl.float32)[None, :]
            for tap in tl.static_range(WIDTH):
                place = tl.load(index_ptr + (batch * n + node) * WIDTH + tap, asked, 0).to(tl.int32) - (WIDTH - 1)
                is_new = (asked & (place >= new_from))[:, None] & inside[None, :]
                value = tl.load(x_ptr + (place - new_from)[:, None] * stride_x_n + c[None, :], is_new, 0.0)
                value = value.to(y_ptr.dtype.element_ty).to(tl.float32)
                if KNOWN:
                    known = (asked & (place >= 0) & (place < new_from))[:, None] & inside[None, :]
                    value += tl.load(stash_ptr + place[:, None] * stride_stash_n + c[None, :], known, 0.0).to(
                        tl.float32
                    )
                if WIDTH > 1:
                    before = (asked & (place < 0))[:, None] & inside[None, :]
                    past_ptr = window_ptr + c[None, :] * (WIDTH - 1) + (place + WIDTH - 1)[:, None]
                    value += tl.load(past_ptr, before, 0.0).to(tl.float32)
                weight = tl.load(weight_ptr + c * stride_weight_c + tap, inside, 0.0).to(tl.float32)
                total += value * weight[None, :]
            if SILU:
                total = total / (1.0 + tl.exp(-total))
            mask = asked[:, None] & inside[None, :]
            tl.store(y_ptr + (batch * (n - first) + node - first)[:, None] * channels + c[None, :], total, mask)
            if KEEP:
                new = tl.load(x_ptr + (node - new_from)[:, None] * stride_x_n + c[None, :], mask, 0.0)
                tl.store(stash_ptr + node[:, None] * stride_stash_n + c[None, :], new, mask)


def tree_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    topology: Topology,
    window: Tensor,
    *,
    activation: str | None = "silu",
    first: int = 0,
) -> Tensor:
    """Convolve every node with its last ancestors, then with the window; see `stree.kernels.ops`."""
    check_kernel_dtypes("tree_conv1d", x=x)
    y = torch.empty(x.shape[0], x.shape[1] - first, x.shape[2], dtype=x.dtype, device=x.device)
    _launch(window, new=(x, weight, bias, y), topology=topology, silu=activation == "silu", first=first)
    return y


def conv_commit(window: Tensor, x: Tensor, accepted: AcceptedPath) -> None:
    """Move the accepted rows into the window, in place; see `stree.kernels.ops`."""
    check_kernel_dtypes("conv_commit", x=x)
    if window.shape[2]:  # a filter of one tap has no window
        _launch(window, old=x, accepted=accepted)


def conv_step(
    window: Tensor,
    stash: Tensor,
    accepted: AcceptedPath | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    topology: Topology,
    *,
    activation: str | None = "silu",
    first: int = 0,
) -> Tensor:
    """Commit the last path, stash the new rows, convolve the new tree; see `stree.kernels.ops`."""
    check_kernel_dtypes("conv_step", x=x)
    check_kernel_dtypes("conv_step", stash=stash)
    y = torch.empty(x.shape, dtype=stash.dtype, device=x.device)
    commits = accepted is not None and window.shape[2] > 0
    _launch(
        window,
        old=stash if commits else None,
        accepted=accepted,
        new=(x, weight, bias, y),
        topology=topology,
        stash=stash,
        silu=activation == "silu",
        first=first,
    )
    return y


def _launch(
    window: Tensor,
    *,
    old: Tensor | None = None,
    accepted: AcceptedPath | None = None,
    new: tuple[Tensor, Tensor, Tensor | None, Tensor] | None = None,
    topology: Topology | None = None,
    stash: Tensor | None = None,
    silu: bool = False,
    first: int = 0,
) -> None:
    """Launch the kernel for a commit (old and accepted), a convolution (new and topology), or both."""
    batch, channels, history = window.shape
    check_kernel_dtypes("the convolution", window=window)
    check_inner("window", window, 2)
    x = weight = bias = index = y = rows = lengths = None
    n, path_size, width = 1, 1, history + 1
    if old is not None:
        assert accepted is not None, "a commit needs the accepted path"
        check_inner("stash", old)
        rows, lengths, path_size = accepted.rows, accepted.lengths, accepted.rows.shape[1]
    if new is not None:
        assert topology is not None, "a convolution needs a topology"
        x, weight, bias, y = new
        check_inner("x", x)
        check_inner("weight", weight)
        n, index = topology.num_nodes, topology.conv_rows(width)
    if stash is not None:
        check_inner("stash", stash)
    tile = ConvTile.of(n - first, channels)
    new_from = first if stash is not None else 0
    conv_kernel[(-(-channels // tile.channels), batch)](
        window, rows, lengths, old, x, weight, bias, index, stash, y,
        n, first, new_from, path_size, channels,
        window.stride(0), *_strides(old), *_strides(x), *_strides(stash), 0 if weight is None else weight.stride(0),
        **conv_constants(
            tile, width, commit=old is not None, scan=new is not None, keep=stash is not None, silu=silu,
            known=new_from > 0,
        ),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def conv_constants(
    tile: ConvTile, width: int, *, commit: bool, scan: bool, keep: bool, silu: bool, known: bool
) -> dict[str, Any]:
    """List the compile-time constants of a build; ahead-of-time builds take theirs from here too."""
    return {
        "WIDTH": width, "COLUMNS": padded(width - 1, 1), "BLOCK_N": tile.nodes, "BLOCK_C": tile.channels,
        "COMMIT": commit, "SCAN": scan, "KEEP": keep, "SILU": silu, "KNOWN": known,
    }  # fmt: skip


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    """Take the strides over batch and nodes; zeros for none."""
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))
