"""What the launches of Triton kernels share on the host.  Imports no Triton."""

from __future__ import annotations

from torch import Tensor

from stree.kernels.topology import AcceptedPath

__all__ = ["path_operands", "strides"]


def path_operands(accepted: AcceptedPath | None) -> tuple[Tensor | None, Tensor | None, int]:
    """Return rows, lengths and number of entries of the path that a launch commits; one entry for none."""
    return (None, None, 1) if accepted is None else (accepted.rows, accepted.lengths, accepted.rows.shape[1])


def strides(tensor: Tensor | None, count: int = 2) -> tuple[int, ...]:
    """Return the first strides of a tensor, by default over sequences and nodes; zeros for none."""
    return (0,) * count if tensor is None else tensor.stride()[:count]
