"""What traversal verification takes and returns; see `stree.kernels.traversal.api`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

__all__ = ["DELTA", "INDEPENDENT", "NOTHING", "SAMPLED", "TINY", "DraftRows", "TraversedPath"]

SAMPLED: Final = 0  # kinds of drafted nodes, see `DraftRows`
DELTA: Final = 1
INDEPENDENT: Final = 2
NOTHING: Final = 1e-20  # far below float32's rounding of 1, and far enough from its smallest number to divide by
TINY: Final = 1e-38  # a divisor that keeps 0 / 0 at 0; about the smallest normal float32


@dataclass(frozen=True, slots=True, eq=False)
class DraftRows:
    """Distributions that the nodes were drawn from.

    Attributes:
        probs: float[b, rows, vocab].
        row: int[b, n], the row of each node; not read of DELTA nodes.
        kind: int8[b, n], DELTA (one-hot), INDEPENDENT (drawn from its row whatever its elder siblings are) or SAMPLED
            (drawn from what its elder siblings leave of its row).
    """

    probs: Tensor
    row: Tensor
    kind: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TraversedPath:
    """The accepted path of each sequence, the token after it, and what the coins were tossed with.

    Attributes:
        path: int32[b, m], nodes from the root down, padded by -1.
        path_lengths: int32[b], root included.
        next_token: int64[b].
        ratios: float32[b, n], min(1, p / q) at each drafted node's token; 0 for the root and padding.
        coins: float32[b, n], probability with which each drafted node's coin shows; undefined for the root and padding.
    """

    path: Tensor
    path_lengths: Tensor
    next_token: Tensor
    ratios: Tensor
    coins: Tensor
