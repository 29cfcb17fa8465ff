"""The short causal convolution in plain torch: taps along root paths, then in the stored window."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stree.kernels.dispatch import Operands
from stree.kernels.reference import accumulator
from stree.kernels.topology import AcceptedPath, Topology
from stree.kernels.tree_indices import take_rows

__all__ = ["conv_commit", "conv_step", "tree_conv1d"]


def tree_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, topology: Topology, window: Tensor, *,
    activation: str | None, first: int,
) -> Tensor:  # fmt: skip
    """Convolve every node with its last ancestors, then with the stored window."""
    batch, n, channels = x.shape
    width = weight.shape[1]
    dtype = accumulator(x)
    rows = torch.cat((window.transpose(1, 2), x), 1).to(dtype)  # [b, width - 1 + n, c]
    taps = weight.t().to(dtype)
    if n > 1:  # the rows of a single node are the window and itself, already in order
        index = topology.conv_rows(width)
        rows = take_rows(rows, index[:, first:].flatten(1))
        taps = taps.contiguous()
    y = (rows.view(batch, n - first, width, channels) * taps).sum(2)
    if bias is not None:
        y += bias
    if activation == "silu":
        F.silu(y, inplace=True)
    return y.to(x.dtype)


def conv_commit(window: Tensor, x: Tensor, accepted: AcceptedPath) -> None:
    """Move the accepted rows into the window of a convolution, in place."""
    batch, channels, history = window.shape
    accepted = AcceptedPath.cast(accepted, None, history + 1)
    if accepted.conv_from is None or accepted.conv_rows is None or accepted.conv_keeps is None:
        return  # a filter of one tap has no window
    kept = window.gather(2, accepted.conv_from[:, None].expand(-1, channels, -1))
    entered = take_rows(x, accepted.conv_rows, accepted.batch).to(window.dtype)
    # Tap by tap: inductor does not vectorise loops over so few columns.
    taps = [torch.where(accepted.conv_keeps[..., t], kept[..., t], entered[:, t]) for t in range(history)]
    for t, tap in enumerate(taps):
        window[..., t] = tap


def conv_step(a: Operands) -> Tensor:
    """Commit the last path, stash the new rows before the convolution, convolve the new tree."""
    n = a.topology.parents.shape[1]
    if a.accepted is not None:
        conv_commit(a.window, a.stash, a.accepted)
    a.stash[:, a.first : n].copy_(a.x)
    rows, options = a.stash[:, :n], {"activation": a.activation, "first": a.first}
    return tree_conv1d(rows, a.weight, a.bias, a.topology, a.window, **options)
