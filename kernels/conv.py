"""The short convolution in Triton: fold of a path into the window and convolution of a tree in one launch.

One program owns a block of channels of one sequence, for all nodes.  Channels do not meet, so a program may fold the
path, then overwrite the rows that it came from: nothing that another program reads changes.  Rows are read where the
projection left them, with any strides over batch and nodes.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stree.kernels.conv_kernels import conv_kernel
from stree.kernels.tiles import ConvTile, check_inner, check_kernel_dtypes, padded
from stree.kernels.topology import AcceptedPath, Topology

__all__ = ["conv_commit", "conv_step", "tree_conv1d"]

Path = Tensor | AcceptedPath


def tree_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parents: Tensor | Topology,
    window: Tensor,
    *,
    activation: str | None = "silu",
    first: int = 0,
) -> Tensor:
    """Convolve every node with its last ancestors, then with the window; see `stree.kernels.ops`."""
    check_kernel_dtypes("tree_conv1d", x=x)
    y = torch.empty(x.shape[0], x.shape[1] - first, x.shape[2], dtype=x.dtype, device=x.device)
    _launch(window, new=(x, weight, bias, y), topology=Topology.cast(parents), silu=activation == "silu", first=first)
    return y


def conv_commit(window: Tensor, x: Tensor, path: Path, path_lengths: Tensor | None) -> None:
    """Move the accepted rows into the window, in place; see `stree.kernels.ops`."""
    check_kernel_dtypes("conv_commit", x=x)
    if window.shape[2]:  # a filter of one tap has no window
        _launch(window, old=x, accepted=AcceptedPath.cast(path, path_lengths))


def conv_step(
    window: Tensor,
    stash: Tensor,
    path: Path | None,
    path_lengths: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parents: Tensor | Topology,
    *,
    activation: str | None = "silu",
    first: int = 0,
) -> Tensor:
    """Fold the last path, stash the new rows, convolve the new tree; see `stree.kernels.ops`."""
    check_kernel_dtypes("conv_step", x=x)
    check_kernel_dtypes("conv_step", stash=stash)
    y = torch.empty(x.shape, dtype=stash.dtype, device=x.device)
    folds = path is not None and window.shape[2] > 0
    _launch(
        window,
        old=stash if folds else None,
        accepted=AcceptedPath.cast(path, path_lengths) if path is not None else None,
        new=(x, weight, bias, y),
        topology=Topology.cast(parents),
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
    """Launch the kernel for a fold (old and accepted), a convolution (new and topology), or both."""
    batch, channels, history = window.shape
    check_kernel_dtypes("the convolution", window=window)
    check_inner("window", window, 2)
    x = weight = bias = index = y = rows = lengths = None
    n, path_size, width = 1, 1, history + 1
    if old is not None:
        assert accepted is not None, "a fold needs the accepted path"
        check_inner("stash", old)
        rows, lengths, path_size = accepted.rows, accepted.lengths, accepted.rows.shape[1]
    if new is not None:
        assert topology is not None, "a convolution needs a topology"
        x, weight, bias, y = new
        check_inner("x", x)
        check_inner("weight", weight)
        n, index = topology.parents.shape[1], topology.conv_rows(width)
    if stash is not None:
        check_inner("stash", stash)
    tile = ConvTile.of(n - first, channels)
    new_from = first if stash is not None else 0
    conv_kernel[(-(-channels // tile.channels), batch)](
        window, rows, lengths, old, x, weight, bias, index, stash, y,
        n, first, new_from, path_size, channels,
        window.stride(0), *_strides(old), *_strides(x), *_strides(stash), 0 if weight is None else weight.stride(0),
        **conv_constants(
            tile, width, fold=old is not None, scan=new is not None, keep=stash is not None, silu=silu,
            known=new_from > 0,
        ),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def conv_constants(
    tile: ConvTile, width: int, *, fold: bool, scan: bool, keep: bool, silu: bool, known: bool
) -> dict[str, Any]:
    """List the compile-time constants of a build; ahead-of-time builds take theirs from here too."""
    return {
        "WIDTH": width, "COLUMNS": padded(width - 1, 1), "BLOCK_N": tile.nodes, "BLOCK_C": tile.channels,
        "FOLD": fold, "SCAN": scan, "KEEP": keep, "SILU": silu, "KNOWN": known,
    }  # fmt: skip


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    """Take the strides over batch and nodes; zeros for none."""
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))
